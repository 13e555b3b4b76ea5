// Copies of tiles of rows and of keys, and their products by a warp.
//
// The including file defines OPERANDS_IN_REGISTERS: whether rows stay there, or are loaded for each product.
#pragma once
#include "convolve.cuh"

using Operand = uint32_t[OPERANDS_IN_REGISTERS ? DEPTH_STEPS : 1][ROW_TILES][4];  // a warp's rows of q

// Copies of a head's rows into tiles, by eight threads a row: thread t takes chunks t % 8, t % 8 + 8, .. of row t / 8 and of
// the rows THREADS / 8 further.
constexpr int ROWS_AT_ONCE = THREADS / 8;

DEVICE void copy_chunks(uint32_t tile, const uint16_t* source, bool inside, int row, int chunk) {
#pragma unroll
    for (int on = 0; on < HEAD_DIM / 8; on += 8)
        if (on + 8 <= HEAD_DIM / 8 || chunk + on < HEAD_DIM / 8)
            copy_async(tile + in_tile<DEPTH>(row, chunk + on), source + (chunk + on) * 8, inside);
}

// TILE_ROWS rows. Sets of a warp's rows lie one after the other, for `load_matrices`.
DEVICE void copy_rows(uint32_t tile, const Rows& q, int batch, int head, int first_row, int rows) {
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

// A lane's addresses for `load_matrices`, computed anew at each use: of rows 0 and on of a tile of q from row `first` on, and
// of a tile of k.
DEVICE uint32_t rows_at(uint32_t tile, int first) {
    const unsigned thread = thread_index();
    return tile + in_tile<DEPTH>(first + thread % 16, thread % 32 / 16);
}
DEVICE uint32_t keys_at(uint32_t tile) {
    const unsigned thread = thread_index();
    return tile + in_tile<DEPTH>(thread % 32 / 16 * 8 + thread % 8, thread / 8 % 2);
}

DEVICE void load_operand(uint32_t (&a)[ROW_TILES][4], uint32_t rows_at, int step) {
#pragma unroll
    for (int e = 0; e < ROW_TILES; e++) load_matrices(a[e], at_step<DEPTH>(rows_at, step) + 16 * e * DEPTH * 2);
}

// sums += rows k, for CHUNK rows of k.
DEVICE void multiply_rows(Columns& sums, Operand& rows, uint32_t rows_at, uint32_t key_tile) {
#pragma unroll
    for (int step = 0; step < DEPTH_STEPS; step++) {
        auto& a = rows[OPERANDS_IN_REGISTERS ? step : 0];
        if (!OPERANDS_IN_REGISTERS) load_operand(a, rows_at, step);
#pragma unroll
        for (int n = 0; n < CHUNK / 16; n++) {
            uint32_t b[4];
            load_matrices(b, at_step<DEPTH>(key_tile, step) + 16 * n * DEPTH * 2);
#pragma unroll
            for (int e = 0; e < ROW_TILES; e++) {
                multiply<ELEMENT>(eight_columns(sums[e], 2 * n), a[e], b[0], b[1]);
                multiply<ELEMENT>(eight_columns(sums[e], 2 * n + 1), a[e], b[2], b[3]);
            }
        }
    }
}
