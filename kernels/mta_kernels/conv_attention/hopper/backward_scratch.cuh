// p and ds of a block's rows in scratch, which the products of dk and dv read.
#pragma once
#include <backward_layout.cuh>

// By one warp, for p or ds: zeros where the products read a row outside its tiles, and in rows after the last. Places lie
// `shift` after their keys.
DEVICE void clear_scratch(const Arguments& args, const RowBlock& rows, uint16_t* scratch, int shift, int row, int lane) {
    int from = 0, to = 0;
    if (row >= args.at.query_rows) {
        to = args.pitch;
    } else if (SPANS) {  // products read fewer than ROW_STEP rows beyond the last block that sees a key
        const int block = row / ALIGNED * ALIGNED, block_before = max(row - ROW_STEP + 1, 0) / ALIGNED * ALIGNED;
        from = keys_begin(args.at, block_before) / PLACES * PLACES;
        to = ((keys_end(args.at, block + ALIGNED - 1) + ALIGNED - 1) / ALIGNED / 2 + 1) * PLACES;
    } else if (CAUSAL) {
        to = ((keys_end(args.at, row) - 1 + shift + ROW_STEP - 1) / 64 + 1) * 64;  // as `slabs_seen` of the products
    }
    to = min(to, args.pitch);
    const bool written = row < args.at.query_rows;
    const auto clear = [&](int place) {
        *(uint4*)(scratch + rows.in_scratch(args, row, place / 32 * 32) + place % 32) = uint4{0, 0, 0, 0};
    };
#pragma unroll 1
    for (int at = from + lane * 8; at < (written ? rows.first_tile * KEYS : to); at += 32 * 8) clear(at);
#pragma unroll 1
    for (int at = rows.end_tile * KEYS + lane * 8; written && at < to; at += 32 * 8) clear(at);
}

DEVICE void clear_rows(const Arguments& args, const RowBlock& rows, int warp, int lane) {
    const int chunk_row = rows.first_row_block * BLOCK_ROWS, stored_rows = rows.end_row < args.at.query_rows ?
        rows.end_row - chunk_row : min(rows.end_row - chunk_row + ROW_STEP - 1, args.chunk_rows);
#pragma unroll 1
    for (int row = rows.first_row + warp; row < chunk_row + stored_rows; row += CLEARING_WARPS) {
        clear_scratch(args, rows, args.p, LEFT, row, lane);
        clear_scratch(args, rows, args.ds, LAG, row, lane);
    }
}

// A tile as it lies in registers: a warp writes 64 bytes of eight rows at once. `row`: the query of this thread's first row.
DEVICE void store_tile(const Arguments& args, const RowBlock& rows, uint16_t* places, const uint32_t (&tile)[4][4], int row) {
#pragma unroll
    for (int part = 0; part < 4; part++) {
        const int h = part / 2, block = part % 2 * 2;
        const uint4 numbers = {tile[block][h], tile[block][2 + h], tile[block + 1][h], tile[block + 1][2 + h]};
        if (rows.holds(row + 8 * h)) *(uint4*)(places + (int64_t)block / 2 * 32 * args.chunk_rows + h * 8 * 32) = numbers;
    }
}
