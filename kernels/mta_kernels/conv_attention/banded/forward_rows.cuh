// The epilogue of the forward: writes rows of out and their logsumexp from the accumulators, and computes rows that overflowed
// again.
#pragma once
#include <forward_exact.cuh>
#include <forward_softmax.cuh>

// 4 x 4 transpose across four lanes.
DEVICE void transpose_of_four_lanes(uint32_t (&words)[4], int lane) {
#pragma unroll
    for (int distance = 1; distance < 4; distance *= 2) {
        const bool upper = lane & distance;
#pragma unroll
        for (int i = 0; i < 4; i++) {
            if (i & distance) continue;
            const uint32_t received = __shfl_xor_sync(~0u, upper ? words[i] : words[i + distance], distance);
            (upper ? words[i] : words[i + distance]) = received;
        }
    }
}

// Rows of a warp's accumulator: row i is query `warp_row` + Apart i. Rows before `first_result` are not written.
template <int Apart, class Arguments, int Columns>
DEVICE void write_rows(const Arguments& args, const WorkTile& work, const OnlineSoftmax<Columns>& softmax,
                       const float (&accumulator)[VALUE_DIM / 2], int warp_row, int first_result, int lane) {
    bool is_again[2];  // rows to compute again
#pragma unroll
    for (int h = 0; h < 2; h++) {
        const float sum = softmax.row_sum(h);
        const int row = warp_row + Apart * (lane / 4 + 8 * h);
        const bool is_row = row >= max(first_result, 0), is_out = is_row && sum > 0;
        is_again[h] = is_row && !is_out;
        const int64_t of_row = out_row(args.at, work.batch_head, row);
        const float inverse = 1 / sum;
        // A thread has two numbers of every eight columns. Four threads exchange theirs, so that each writes eight.
        uint4* out = (uint4*)(args.out + of_row * HEAD_DIM + work.part * VALUE_DIM) + lane % 4;
#pragma unroll
        for (int b = 0; b < VALUE_DIM / 8; b += 4) {
            uint32_t words[4];
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const int at = 4 * min(b + i, VALUE_DIM / 8 - 1) + 2 * h;
                words[i] = pack<ELEMENT>(accumulator[at] * inverse, accumulator[at + 1] * inverse);
            }
            transpose_of_four_lanes(words, lane);
            if (is_out && b + lane % 4 < VALUE_DIM / 8) out[b] = uint4{words[0], words[1], words[2], words[3]};
        }
        if (is_out && work.part == 0 && lane % 4 == 0)
            args.logsumexp[of_row] = marked((softmax.reference[h] + log2f(sum)) * LN_2, false);
    }
    if (__any_sync(~0u, is_again[0] || is_again[1]))
#pragma unroll 1
        for (int i = 0; i < 16; i++)
            if (__any_sync(~0u, lane / 4 == i % 8 && (i < 8 ? is_again[0] : is_again[1])))
                exact_row(args, work, warp_row + Apart * i, lane);
}
