// The producer warp group of the backward. One thread takes work tiles and copies what they need, another reports what
// is stored. Two warps write zeros to the scratch around it.
//
// A pipeline stage holds a tile of keys, and the values and late keys (the keys of ds's columns) of the tile before.
#pragma once
#include <backward_products.cuh>
#include <backward_scratch.cuh>

struct TensorMaps {
    const TensorMap *queries, *keys, *values, *grads, *scratch;
};

// Queries, output gradients and both forms of T of the head, once no consumer reads the previous row block's any more.
DEVICE void copy_rows(const Arguments& args, const Block& block, const RowBlock& rows, const TensorMaps& maps, bool odd_rows) {
    constexpr int TAP_BYTES = QUERY_TAPS * TAP;
    barrier_wait(block.rows_empty, !odd_rows);
    barrier_expect(block.rows_full, 2 * (WARPGROUPS * SLABS * SLAB + TAP_BYTES));
    for (int w = 0; w < WARPGROUPS; w++)
        for (int slab = 0; slab < SLABS; slab++) {
            const int at = (w * SLABS + slab) * SLAB, row = rows.first_row + w * ROWS - HALO;
            copy_tile(block.shared + QUERIES + at, maps.queries, block.rows_full, slab * 64, row, rows.head, rows.batch);
            copy_tile(block.shared + GRADS + at, maps.grads, block.rows_full, slab * 64, row, rows.head, rows.batch);
        }
    copy_bytes(block.shared + TAPS, args.taps + rows.head * (TAP_BYTES / 2), TAP_BYTES, block.rows_full);
    copy_bytes(block.shared + TAPS_BACK, args.taps_back + rows.head * (TAP_BYTES / 2), TAP_BYTES, block.rows_full);
}

DEVICE void copy_rows_and_keys(const Arguments& args, const Block& block, const RowBlock& rows, const TensorMaps& maps,
                               int iteration, bool odd_rows) {
    const uint32_t shared = block.shared;
#pragma unroll 1
    for (int tile = rows.first_tile; tile <= rows.end_tile; tile++, iteration++) {
        const int at = block.pipeline.stage(iteration) * SLABS * SLAB;
        const bool has_keys = tile < rows.end_tile, has_tile_before = tile > rows.first_tile;
        const uint32_t full = block.pipeline.acquire(iteration);
        barrier_expect(full, (has_keys + 2 * has_tile_before) * SLABS * SLAB);
        for (int slab = 0; slab < SLABS; slab++) {
            if (has_keys)
                copy_tile(shared + KEYS_AT + at + slab * SLAB, maps.keys, full, slab * 64, tile * KEYS, rows.kv_head, rows.batch);
            if (!has_tile_before) continue;
            copy_tile(shared + VALUES + at + slab * SLAB, maps.values, full, slab * 64, (tile - 1) * KEYS - LEFT, rows.kv_head,
                      rows.batch);
            copy_tile(shared + LATE_KEYS + at + slab * SLAB, maps.keys, full, slab * 64, (tile - 1) * KEYS - LAG, rows.kv_head,
                      rows.batch);
        }
        if (!has_tile_before) copy_rows(args, block, rows, maps, odd_rows);
    }
}

DEVICE void copy_work(const Arguments& args, const Block& block, const TensorMaps& maps) {
    int stages = 0, steps = 0;  // iterations of both pipelines
    bool was_of_rows = true, odd_rows = false;
#pragma unroll 1
    for (PipelineState state; true; state.number++) {
        const WorkTile work = take_work(args.chunks, products_of(args));
        if (state.number >= 2) barrier_wait(state.reported(block), state.phase() ^ 1);
        if (work.exists()) {
            if (work.of_rows) wait_for_scratch(args.chunks, work, products_of(args));
            else wait_for_rows(args.chunks, work, products_of(args));
        }
        state.write(block, {work, work.of_rows ? stages : steps, odd_rows});
        if (!work.exists()) return;
        if (state.number > 0 && work.of_rows != was_of_rows) {  // the other kind has another layout of shared memory
            const PipelineState before{state.number - 1};
            barrier_wait(before.stored(block), before.phase());
        }
        was_of_rows = work.of_rows;
        const RowBlock of(args, work);
        if (work.of_rows) {
            copy_rows_and_keys(args, block, of, maps, stages, odd_rows);
            stages += of.end_tile - of.first_tile + 1, odd_rows = !odd_rows;
        } else {
            const ProductTile tile(args, work, of);
            fence_async_proxy_everywhere();
            copy_products(args.at, args.chunks.slots, block, of, tile, maps.scratch, tile.of_ds ? maps.queries : maps.grads, steps);
        }
    }
}

// By two warps: zeros in the scratch beside what the consumers store.
DEVICE void clear_work(const Arguments& args, const Block& block, int thread) {
#pragma unroll 1
    for (PipelineState state; true; state.number++) {
        barrier_wait_asleep(state.full(block), state.phase());
        const WorkTile work = state.read(block, args.chunks);
        if (!work.exists()) return;
        if (work.of_rows) clear_rows(args, RowBlock(args, work), thread / 32, thread % 32);
        fence_async_proxy_everywhere();  // the copy engine will read what is stored
        barrier_arrive(state.stored(block));
    }
}

// By one thread: reports to other blocks what this one has stored.
DEVICE void report_work(const Arguments& args, const Block& block) {
#pragma unroll 1
    for (PipelineState state; true; state.number++) {
        barrier_wait_asleep(state.full(block), state.phase());
        const WorkTile work = state.read(block, args.chunks);
        if (!work.exists()) return;
        barrier_wait_asleep(state.stored(block), state.phase());
        if (work.of_rows) rows_are_done(args.chunks, work.stage, products_of(args));
        else products_are_done(args.chunks, work.stage, products_of(args));
        barrier_arrive(state.reported(block));
    }
}
