// The epilogue of the backward: dq, and the weight's gradient of a block's rows.
#pragma once
#include <backward_layout.cuh>
#include <backward_scale.cuh>

DEVICE void write_dq(const Arguments& args, const RowBlock& rows, const float (&dq)[HEAD_DIM / 2], float unit, int first_row,
                     int column) {
#pragma unroll
    for (int h = 0; h < 2; h++) {
        const int row = first_row + 8 * h;
        if (!rows.holds(row)) continue;
        const int64_t of_row = (int64_t)rows.batch_head * args.at.query_rows + row;
        const float of_ds = SPANS ? unit * document_unit(args, rows.batch_head, row) : unit;
        uint32_t* out = (uint32_t*)(args.dq + of_row * HEAD_DIM + column);
#pragma unroll
        for (int b = 0; b < HEAD_DIM / 8; b++)
            out[4 * b] = pack<ELEMENT>(dq[4 * b + 2 * h] * of_ds, dq[4 * b + 2 * h + 1] * of_ds);
    }
}

// dweight[8 i + y, n]: tap 7 - i, score column y and column n - LEFT of c, both counted from the same 8 columns.
// One tap of the weight is a diagonal of 8 of them. `buffer`: shared memory that no thread reads any more.
DEVICE void write_dweight(const Arguments& args, const RowBlock& rows, const float (&dweight)[12], float grad_factor,
                          uint32_t buffer, int warpgroup, int thread, int local_row, int column) {
    warpgroup_barrier(warpgroup + 1);
#pragma unroll
    for (int i = 0; i < 12; i++)
        store_shared(buffer + ((local_row + i / 2 % 2 * 8) * 24 + i / 4 * 8 + column + i % 2) * 4,
                     __float_as_uint(dweight[i]));
    warpgroup_barrier(warpgroup + 1);
    const float unit = args.scale / grad_factor;
    const int64_t of_block = (int64_t)rows.batch_head * args.chunks.all_row_blocks + rows.first_row / BLOCK_ROWS;
    float* sums = args.dweight + (of_block * WARPGROUPS + warpgroup) * (QUERY_TAPS * KEY_TAPS);
    for (int i = thread; i < QUERY_TAPS * KEY_TAPS; i += 128) {
        const int tap = QUERY_TAPS - 1 - i / KEY_TAPS, key_tap = i % KEY_TAPS;
        float sum = 0;
        for (int y = 0; y < 8; y++)
            sum += __uint_as_float(load_shared(buffer + (((7 - tap) * 8 + y) * 24 + y + LEFT + PAD - key_tap) * 4));
        sums[i] = sum * unit;
    }
}
