// The online softmax of the forward, in units of log 2.
//
// The sum and the accumulator of a row share a reference. Any reference that keeps them in range will do. It moves to the
// maximum only when a thread's numbers of a step, 16 of 64 columns, add up to more than LARGEST_SUM. Most steps thus skip the
// maximum. The including file defines VALUE_DIM and ELEMENT.
#pragma once
#include <positions.cuh>

constexpr float LARGEST_SUM = 4096;

template <int Columns> struct OnlineSoftmax {
    const float unit;  // the factor of c
    float (&reference)[2], (&running_sum)[2], (&sums)[2];
    uint32_t (&probabilities)[Columns / 4];  // of a step: A fragments of the product with the values

    DEVICE void exponentiate(const float (&c)[Columns / 2]) {
#pragma unroll
        for (int h = 0; h < 2; h++) {
            float sum[2] = {0, 0};
#pragma unroll
            for (int b = 0; b < Columns / 8; b++) {
                const float first = exp2_fast(fmaf(c[4 * b + 2 * h], unit, -reference[h]));
                const float second = exp2_fast(fmaf(c[4 * b + 2 * h + 1], unit, -reference[h]));
                sum[b % 2] += first + second;
                probabilities[2 * b + h] = pack<ELEMENT>(first, second);
            }
            sums[h] = sum[0] + sum[1];
        }
    }

    // Move the references of rows whose sums are too large. The choice is the row's own: no row depends on another.
    DEVICE void rescale(const float (&c)[Columns / 2], float (&accumulator)[VALUE_DIM / 2]) {
        float rescale[2];
#pragma unroll
        for (int h = 0; h < 2; h++) {
            int moves = !(sums[h] <= LARGEST_SUM);
            float largest = MINUS_INFINITY;
#pragma unroll
            for (int b = 0; b < Columns / 8; b++) largest = fmaxf(largest, fmaxf(c[4 * b + 2 * h], c[4 * b + 2 * h + 1]));
#pragma unroll
            for (int lane = 1; lane < 4; lane *= 2) {
                moves |= __shfl_xor_sync(~0u, moves, lane);
                largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, lane));
            }
            largest = moves ? fmaxf(largest * unit, -1e20f) : reference[h];
            rescale[h] = exp2_fast(reference[h] - largest);
            reference[h] = largest;
            running_sum[h] *= rescale[h];
        }
#pragma unroll
        for (int i = 0; i < VALUE_DIM / 2; i++) accumulator[i] *= rescale[i / 2 % 2];
    }

    // Probabilities of Columns columns of c.
    DEVICE void update(const float (&c)[Columns / 2], float (&accumulator)[VALUE_DIM / 2]) {
        exponentiate(c);
        if (__any_sync(~0u, !(fmaxf(sums[0], sums[1]) <= LARGEST_SUM))) {
            rescale(c, accumulator);
            exponentiate(c);
        }
        running_sum[0] += sums[0], running_sum[1] += sums[1];
    }

    // The sum of a whole row, of its four threads.
    DEVICE float row_sum(int h) const {
        float sum = running_sum[h];
        sum += __shfl_xor_sync(~0u, sum, 1);
        sum += __shfl_xor_sync(~0u, sum, 2);
        return sum;
    }
};
