// Copies of tiles of q, k and v, and their products by a warp.
#pragma once
#include "convolve.cuh"

using Accumulator = float[ROW_TILES][VALUE_DIM / 2];
using Queries = uint32_t[QUERIES_IN_REGISTERS ? DEPTH_STEPS : 1][ROW_TILES][4];

// Copies of a head's rows into tiles, by eight threads a row: thread t takes chunks t % 8, t % 8 + 8, .. of row t / 8 and of
// those THREADS / 8 further.
constexpr int ROWS_AT_ONCE = THREADS / 8;

DEVICE void copy_chunks(uint32_t tile, const uint16_t* source, bool inside, int row, int chunk) {
#pragma unroll
    for (int on = 0; on < HEAD_DIM / 8; on += 8)
        if (on + 8 <= HEAD_DIM / 8 || chunk + on < HEAD_DIM / 8)
            copy_async(tile + in_tile<DEPTH>(row, chunk + on), source + (chunk + on) * 8, inside);
}

// The rows of q. Sets of a warp's rows lie one after the other, for `load_matrices`.
DEVICE void copy_queries(uint32_t tile, const Rows& q, int batch, int head, int first_row, int rows) {
    const uint16_t* const start = row_of(q, batch, head, 0);
#pragma unroll 1
    for (int i = threadIdx.x / 8; i < TILE_ROWS; i += ROWS_AT_ONCE) {
        const int row = first_row + i / WARP_ROWS * WARP_ROWS + i % 16 * ROW_TILES + i % WARP_ROWS / 16;
        const bool inside = row >= 0 && row < rows;
        copy_chunks(tile, start + (inside ? row * q.stride_row : 0), inside, i, threadIdx.x % 8);
    }
}

// The tile of k or v that begins with row `first_row`: zeros for rows outside the head at `start`.
DEVICE void copy_tile(uint32_t tile, const uint16_t* start, const Rows& x, int first_row, int rows) {
    static_assert(KEYS % ROWS_AT_ONCE == 0, "all threads copy as many rows");
    static_assert(ROWS_AT_ONCE % 8 == 0, "chunks are permuted alike in all rows of a thread");
    const unsigned thread = thread_index();
    const int stride = (int)x.stride_row;  // below MAX_STRIDE of forward.py
#pragma unroll
    for (int i = 0; i < KEYS; i += ROWS_AT_ONCE) {
        const int row = first_row + (int)(thread / 8) + i;
        copy_chunks(tile + i * DEPTH * 2, start + (int64_t)row * stride, row >= 0 && row < rows, thread / 8, thread % 8);
    }
    copies_commit();
}

// A lane's addresses for `load_matrices`, computed anew at each use.
DEVICE uint32_t queries_at(uint32_t shared) {
    const unsigned thread = thread_index();
    return shared + QUERIES + in_tile<DEPTH>(thread / 32 * WARP_ROWS + thread % 16, thread % 32 / 16);
}
DEVICE uint32_t keys_at(uint32_t shared) {
    const unsigned thread = thread_index();
    return shared + KEYS_AT + in_tile<DEPTH>(thread % 32 / 16 * 8 + thread % 8, thread / 8 % 2);
}
DEVICE uint32_t values_at(uint32_t shared) {
    const unsigned thread = thread_index();
    return shared + VALUES_AT + in_tile<DEPTH>(thread % 16, thread % 32 / 16);
}

DEVICE void load_queries(uint32_t (&a)[ROW_TILES][4], uint32_t queries_at, int step) {
#pragma unroll
    for (int e = 0; e < ROW_TILES; e++) load_matrices(a[e], at_step<DEPTH>(queries_at, step) + 16 * e * DEPTH * 2);
}

// scores += q k, for CHUNK rows of k.
DEVICE void multiply_keys(Columns& scores, Queries& queries, uint32_t queries_at, uint32_t key_tile) {
#pragma unroll
    for (int step = 0; step < DEPTH_STEPS; step++) {
        auto& a = queries[QUERIES_IN_REGISTERS ? step : 0];
        if (!QUERIES_IN_REGISTERS) load_queries(a, queries_at, step);
#pragma unroll
        for (int n = 0; n < CHUNK / 16; n++) {
            uint32_t b[4];
            load_matrices(b, at_step<DEPTH>(key_tile, step) + 16 * n * DEPTH * 2);
#pragma unroll
            for (int e = 0; e < ROW_TILES; e++) {
                multiply<ELEMENT>(eight_columns(scores[e], 2 * n), a[e], b[0], b[1]);
                multiply<ELEMENT>(eight_columns(scores[e], 2 * n + 1), a[e], b[2], b[3]);
            }
        }
    }
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
