// Copies of tiles of q, k and v, and their products by a warp.
#pragma once
#include "convolve.cuh"

using Scores = float[ROW_TILES][KEYS / 2];            // of each set of 16 rows, four numbers of every eight columns
using Accumulator = float[ROW_TILES][VALUE_DIM / 2];
using Queries = uint32_t[QUERIES_IN_REGISTERS ? DEPTH_STEPS : 1][ROW_TILES][4];

// Copies of a head's rows into tiles, by eight threads a row: thread t takes chunks t % 8, t % 8 + 8, .. of row t / 8 and of
// those THREADS / 8 further.
constexpr int ROWS_AT_ONCE = THREADS / 8;

DEVICE void copy_chunks(uint32_t tile, const uint16_t* source, bool inside, int row) {
    const int chunk = threadIdx.x % 8;
#pragma unroll
    for (int on = 0; on < HEAD_DIM / 8; on += 8)
        if (on + 8 <= HEAD_DIM / 8 || chunk + on < HEAD_DIM / 8)
            copy_async(tile + in_tile<DEPTH>(row, chunk + on), source + on * 8, inside);
}

// The rows of q. Sets of a warp's rows lie one after the other, for `load_matrices`.
DEVICE void copy_queries(uint32_t tile, const Rows& q, int batch, int head, int first_row, int rows) {
    const uint16_t* const start = row_of(q, batch, head, 0) + threadIdx.x % 8 * 8;
#pragma unroll 1
    for (int i = threadIdx.x / 8; i < TILE_ROWS; i += ROWS_AT_ONCE) {
        const int row = first_row + i / WARP_ROWS * WARP_ROWS + i % 16 * ROW_TILES + i % WARP_ROWS / 16;
        const bool inside = row >= 0 && row < rows;
        copy_chunks(tile, start + (inside ? row * q.stride_row : 0), inside, i);
    }
}

// Tiles of k or v, one after the other.
struct Tiles {
    const uint16_t* next;  // this thread's first chunk of the next tile
    int next_row;          // its row
    int rows, stride;      // the lower half of what the host gives

    DEVICE Tiles(const Rows& x, int batch, int head, int first_row, int rows)
        : next_row(first_row + (int)threadIdx.x / 8), rows(rows), stride((int)x.stride_row) {
        next = row_of(x, batch, head, 0) + next_row * x.stride_row + threadIdx.x % 8 * 8;
    }
    // Begin to copy a tile: zeros for rows outside the head.
    DEVICE void copy(uint32_t tile) {
        static_assert(KEYS % ROWS_AT_ONCE == 0, "all threads copy as many rows");
#pragma unroll
        for (int on = 0; on < KEYS; on += ROWS_AT_ONCE, next_row += ROWS_AT_ONCE, next += ROWS_AT_ONCE * stride)
            copy_chunks(tile, next, (unsigned)next_row < (unsigned)rows, threadIdx.x / 8 + on);
    }
};

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
