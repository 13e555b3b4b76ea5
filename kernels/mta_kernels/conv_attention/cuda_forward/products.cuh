// Copies of tiles of q, k and v, and their products by a warp.
#pragma once
#include "convolve.cuh"

using Scores = float[ROW_TILES][KEYS / 2];            // of each set of 16 rows, four numbers of every eight columns
using Accumulator = float[ROW_TILES][VALUE_DIM / 2];
using Queries = uint32_t[QUERIES_IN_REGISTERS ? DEPTH_STEPS : 1][ROW_TILES][4];

// Begin to copy rows of a head into a tile, by eight threads a row: its row i is row `row_of(i)`, or zeros if that is outside.
template <int Count, class RowOf>
DEVICE void copy_rows(uint32_t tile, const uint16_t* head, int64_t stride, int rows, RowOf row_of) {
    const int chunk = threadIdx.x % 8;
#pragma unroll
    for (int first = 0; first < Count; first += THREADS / 8) {
        const int at = first + threadIdx.x / 8, row = row_of(at);
        if (Count % (THREADS / 8) && at >= Count) continue;
        const bool inside = row >= 0 && row < rows;
        const uint16_t* source = head + (inside ? row * stride : 0) + chunk * 8;
#pragma unroll
        for (int on = 0; on < HEAD_DIM / 8; on += 8)
            if (on + 8 <= HEAD_DIM / 8 || chunk + on < HEAD_DIM / 8)
                copy_async(tile + in_tile<DEPTH>(at, chunk + on), source + on * 8, inside);
    }
}

DEVICE void load_queries(uint32_t (&a)[ROW_TILES][4], uint32_t queries_at, int step) {
#pragma unroll
    for (int e = 0; e < ROW_TILES; e++) load_matrices(a[e], at_step<DEPTH>(queries_at, step) + 16 * e * DEPTH * 2);
}

// scores += q k, for a tile of k. 16 keys are loaded while those before them are multiplied.
DEVICE void multiply_keys(Scores& scores, Queries& queries, uint32_t queries_at, uint32_t key_tile) {
    uint32_t next_keys[2][4];
    auto load_keys = [&](int i) {
        load_matrices(next_keys[i % 2], at_step<DEPTH>(key_tile, i / (KEYS / 16)) + 16 * (i % (KEYS / 16)) * DEPTH * 2);
    };
    load_keys(0);
#pragma unroll
    for (int i = 0; i < DEPTH_STEPS * (KEYS / 16); i++) {
        const int step = i / (KEYS / 16), n = i % (KEYS / 16);
        auto& a = queries[QUERIES_IN_REGISTERS ? step : 0];
        const auto& b = next_keys[i % 2];
        if (!QUERIES_IN_REGISTERS && n == 0) load_queries(a, queries_at, step);
        if (i + 1 < DEPTH_STEPS * (KEYS / 16)) load_keys(i + 1);
#pragma unroll
        for (int e = 0; e < ROW_TILES; e++) {
            multiply<ELEMENT>(eight_columns(scores[e], 2 * n), a[e], b[0], b[1]);
            multiply<ELEMENT>(eight_columns(scores[e], 2 * n + 1), a[e], b[2], b[3]);
        }
    }
}

// accumulator += p v, for a tile of v and its probabilities p.
DEVICE void multiply_values(Accumulator& accumulator, const uint32_t (&probabilities)[ROW_TILES][KEYS / 4], uint32_t value_tile) {
#pragma unroll
    for (int step = 0; step < KEYS / 16; step++)
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
