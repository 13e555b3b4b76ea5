// The forward's products by a warp: where its operands lie, and rows of out.
#pragma once
#include "warp_rows.cuh"

using Accumulator = float[ROW_TILES][VALUE_DIM / 2];

DEVICE uint32_t queries_at(uint32_t shared) { return rows_at(shared + QUERIES, thread_index() / 32 * WARP_ROWS); }
DEVICE uint32_t values_at(uint32_t shared) {
    const unsigned thread = thread_index();
    return shared + VALUES_AT + in_tile<DEPTH>(thread % 16, thread % 32 / 16);
}

// accumulator += p v, for CHUNK rows of v and their probabilities p.
DEVICE void multiply_values(Accumulator& accumulator, const uint32_t (&probabilities)[ROW_TILES][CHUNK / 4], uint32_t value_tile) {
#pragma unroll
    for (int step = 0; step < CHUNK / 16; step++)
#pragma unroll
        for (int n = 0; n < DEPTH_STEPS; n++) {
            uint32_t b[4];
            load_matrices_transposed(b, at_step<DEPTH>(value_tile, n) + 16 * step * DEPTH * 2);
#pragma unroll
            for (int e = 0; e < ROW_TILES; e++) {
                const auto& a = *(const uint32_t(*)[4])(probabilities[e] + 4 * step);
                multiply<ELEMENT>(eight_columns(accumulator[e], 2 * n), a, b[0], b[1]);
                if (2 * n + 1 < VALUE_DIM / 8) multiply<ELEMENT>(eight_columns(accumulator[e], 2 * n + 1), a, b[2], b[3]);
            }
        }
}
