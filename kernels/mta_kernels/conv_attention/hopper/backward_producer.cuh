// The producer warp of the backward, by one thread.
//
// A pipeline stage holds a tile of keys, and the values and late keys (those of ds's columns) of the tile before.
#pragma once
#include <backward_layout.cuh>

struct TensorMaps {
    const TensorMap *queries, *keys, *values, *grads;
};

DEVICE void copy_rows_and_keys(const Block& block, const RowBlock& rows, const TensorMaps& maps) {
    const uint32_t shared = block.shared;
    barrier_expect(block.rows_full, 2 * WARPGROUPS * SLABS * SLAB);
    for (int w = 0; w < WARPGROUPS; w++)
        for (int slab = 0; slab < SLABS; slab++) {
            const int at = (w * SLABS + slab) * SLAB, row = rows.first_row + w * ROWS - HALO;
            copy_tile(shared + QUERIES + at, maps.queries, block.rows_full, slab * 64, row, rows.head, rows.batch);
            copy_tile(shared + GRADS + at, maps.grads, block.rows_full, slab * 64, row - ROWS_BEFORE, rows.head, rows.batch);
        }
    const uint32_t full = block.pipeline.full, empty = block.pipeline.empty;
    for (int tile = rows.first_tile; tile <= rows.end_tile; tile++) {
        const int iteration = tile - rows.first_tile, stage = iteration % STAGES, at = stage * SLABS * SLAB;
        const bool has_keys = tile < rows.end_tile, has_tile_before = iteration > 0;
        barrier_wait(empty + 8 * stage, iteration / STAGES & 1 ^ 1);
        barrier_expect(full + 8 * stage, (has_keys + 2 * has_tile_before) * SLABS * SLAB);
        for (int slab = 0; slab < SLABS; slab++) {
            if (has_keys)
                copy_tile(shared + KEYS_AT + at + slab * SLAB, maps.keys, full + 8 * stage, slab * 64, tile * KEYS,
                          rows.kv_head, rows.batch);
            if (!has_tile_before) continue;
            copy_tile(shared + VALUES + at + slab * SLAB, maps.values, full + 8 * stage, slab * 64,
                      (tile - 1) * KEYS - LEFT - KEYS_BEFORE, rows.kv_head, rows.batch);
            copy_tile(shared + LATE_KEYS + at + slab * SLAB, maps.keys, full + 8 * stage, slab * 64,
                      (tile - 1) * KEYS - LAG, rows.kv_head, rows.batch);
        }
    }
}
