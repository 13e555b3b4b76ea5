// T, the banded matrices of the convolution, as the right operand of products.
//
//   T[t][y, j] = weight[QUERY_TAPS-1-t, y-j+PAD], and of the gradient, from the last tap to the first, T'[t][j, y] = weight[t, y-j+PAD]
//
// T is the same at all columns. Eight columns of c read EIGHTS eights of scores, so T of a tap is EIGHTS 8 x 8 matrices. In
// shared memory a matrix is column by column, so `load_matrices` gives T, and transposed, from the last matrix to the first, T'.
#pragma once
#include "geometry.cuh"

constexpr float SMALLEST_SCALE = 1e-37f;  // for a scale of 0: scores so small that the softmax is uniform

// By all threads: T of a head, in fp16, over a power of two and with the sign of the scale. So a weight of any size works.
// Returns the factor of c for a softmax in powers of two, which is above zero.
DEVICE float write_taps(const Weight& weight, float scale_log2, int head, uint32_t taps) {
    float largest = 0;
    for (int i = threadIdx.x % 32; i < QUERY_TAPS * KEY_TAPS; i += 32)
        largest = fmaxf(largest, fabsf(weight_at(weight, head, i / KEY_TAPS, i % KEY_TAPS)));
    largest = warp_max(largest);
    const int exponent = largest > 0 ? ilogbf(largest) + 1 : 0;
    const float sign = scale_log2 < 0 ? -1 : 1;
#pragma unroll 1
    for (int i = threadIdx.x; i < QUERY_TAPS * EIGHTS * 32; i += THREADS) {  // two rows of a column of a matrix
        const int query_tap = QUERY_TAPS - 1 - i / (32 * EIGHTS), eight = i / 32 % EIGHTS, column = i % 32 / 4;
        float value[2];
#pragma unroll
        for (int e = 0; e < 2; e++) {
            const int tap = 8 * (eight - LEFT_EIGHTS) + i % 4 * 2 + e - column + PAD;
            const bool inside = tap >= 0 && tap < KEY_TAPS;
            value[e] = inside ? sign * ldexpf(weight_at(weight, head, query_tap, tap), -exponent) : 0.f;
        }
        store_shared(taps + i * 4, pack<Half>(value[0], value[1]));
    }
    const float unit = ldexpf(fabsf(scale_log2), exponent);  // NaN stays NaN
    return unit < SMALLEST_SCALE ? SMALLEST_SCALE : unit;
}
