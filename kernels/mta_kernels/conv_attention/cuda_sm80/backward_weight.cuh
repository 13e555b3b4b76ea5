// The weight's gradient: sums over rows i and columns j of dc[i, j] s[i-t, j-pad+b], as products of 16 x 8 numbers, 16 rows deep.
//
// Their rows are two taps t and eight columns of scores, their columns the eights of dc that these touch. All columns of scores
// add to the same sums, and a tap of the weight is a diagonal of them.
#pragma once
#include "warp_rows.cuh"

using WeightGrads = float[TAP_PAIRS][EIGHTS][4];

// Adds CHUNK columns of scores, from `column` of the window on, times dc of a warp's rows less HALO, scaled by `level(e, dc)`.
template <class Level> DEVICE void add_weight_grads(WeightGrads& sums, uint32_t scores, uint32_t grads, int column, Level level) {
    const unsigned thread = thread_index(), lane = thread % 32;
#pragma unroll
    for (int e = 0; e < ROW_TILES; e++) {
        const uint32_t at = score_rows(scores, thread) + row_place(e - HALO - 1) + column * 2 + (lane / 16 * 8 + lane % 8) * PITCH;
        const uint32_t one_less = score_rows(scores, thread) + row_place(e - HALO) + column * 2 + (lane / 16 * 8 + lane % 8) * PITCH;
        const uint32_t of_taps = lane / 8 % 2 ? at : one_less;  // the second tap is a row higher
        const uint32_t of_grads = score_rows(grads, thread) + row_place(e - HALO) + lane % 16 * PITCH + (column / 8 + lane / 16) * 16;
        uint32_t dc[PAIRS][4];  // eights of dc, 16 rows
#pragma unroll
        for (int i = 0; i < PAIRS; i++) load_matrices_transposed(dc[i], of_grads + i * 32);
        level(e, dc);
#pragma unroll
        for (int n = 0; n < CHUNK / 8; n++)
#pragma unroll
            for (int pair = 0; pair < TAP_PAIRS; pair++) {
                uint32_t s[4];
                load_matrices_transposed(s, of_taps + n * 16 - pair * PITCH);
#pragma unroll
                for (int i = 0; i < EIGHTS; i++)
                    multiply<Half>(sums[pair][i], s, dc[(n + i) / 2][(n + i) % 2 * 2], dc[(n + i) / 2][(n + i) % 2 * 2 + 1]);
            }
    }
}

// The sums of all warps, each tap's numbers in a fixed order. `shared`: memory that no thread reads now, before a barrier.
DEVICE void write_weight_grads(const WeightGrads& sums, uint32_t shared, float* out, float unit) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#pragma unroll
    for (int pair = 0; pair < TAP_PAIRS; pair++)
#pragma unroll
        for (int i = 0; i < EIGHTS; i++)
#pragma unroll
            for (int x = 0; x < 4; x++) {
                const int row = (2 * pair + x / 2) * 8 + lane / 4, column = 8 * i + lane % 4 * 2 + x % 2;
                store_shared(shared + (warp * WEIGHT_NUMBERS + row * 8 * EIGHTS + column) * 4, __float_as_uint(sums[pair][i][x]));
            }
    __syncthreads();
    for (int i = threadIdx.x; i < QUERY_TAPS * KEY_TAPS; i += THREADS) {
        const int tap = QUERY_TAPS - 1 - i / KEY_TAPS, key_tap = i % KEY_TAPS;
        float sum = 0;
#pragma unroll 1
        for (int w = 0; w < WARPS; w++)
            for (int y = 0; y < 8; y++)
                sum += __uint_as_float(load_shared(shared + (w * WEIGHT_NUMBERS + (tap * 8 + y) * 8 * EIGHTS + y + LEFT + PAD - key_tap) * 4));
        out[i] = sum * unit;
    }
}
