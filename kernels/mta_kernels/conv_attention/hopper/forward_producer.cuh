// The producer warp group of the forward: one thread copies keys and values, another queries and T.
//
// A pipeline stage holds a tile of keys and the values of the tile before. The consumers multiply both in one iteration, so
// they wait for one barrier a tile.
#pragma once
#include <forward_scheduler.cuh>

// The tile of values that the next stage holds.
struct PendingValues {
    int part = 0, tile = 0, kv_head = 0, batch = 0;

    DEVICE void copy(const Block& block, const TensorMap* value_map, int stage, uint32_t full) const {
        for (int slab = 0; slab < VALUE_SLABS; slab++)
            copy_tile(block.shared + VALUES + (stage * VALUE_SLABS + slab) * SLAB, value_map, full,
                      part * VALUE_DIM + slab * 64, tile * KEYS - LEFT, kv_head, batch);
    }
};

// The producer warp, by one thread.
DEVICE void copy_keys_and_values(const Arguments& args, const Block& block, const TensorMap* key_map,
                                 const TensorMap* value_map) {
    const Pipeline<STAGES>& pipeline = block.pipeline;
    const TileScheduler scheduler{block};
    int iteration = 0;  // counts key tiles, of all work tiles
    PendingValues values;
#pragma unroll 1
    for (int count = 0; true; count++) {
        const int slot = count % SLOTS;
        barrier_wait(block.tile_full + 8 * slot, count / SLOTS & 1);
        const WorkTile work = scheduler.read(slot);
        fence_async_proxy();  // an arrival does not wait for loads
        if (!work.exists()) break;
#pragma unroll 1
        for (int tile = work.first_tile; tile < work.end_tile; tile++, iteration++) {
            if (tile == max(work.end_tile - PREFETCH_TILES, work.first_tile)) barrier_arrive(block.prefetch);
            const int stage = pipeline.stage(iteration);
            const uint32_t full = pipeline.acquire(iteration);
            barrier_expect(full, (SLABS + (iteration > 0 ? VALUE_SLABS : 0)) * SLAB);
            for (int slab = 0; slab < SLABS; slab++)
                copy_tile(block.shared + KEYS_AT + (stage * SLABS + slab) * SLAB, key_map, full, slab * 64, tile * KEYS,
                          work.kv_head, work.batch);
            if (iteration > 0) values.copy(block, value_map, stage, full);
            values.part = work.part, values.tile = tile, values.kv_head = work.kv_head, values.batch = work.batch;
        }
    }
    const int stage = pipeline.stage(iteration);  // the last values have a stage without keys
    const uint32_t full = pipeline.acquire(iteration);
    barrier_expect(full, VALUE_SLABS * SLAB);
    values.copy(block, value_map, stage, full);
}

// The query loader, by one thread: takes work tiles, publishes them to all roles, and copies their queries and T.
DEVICE void schedule_and_copy_queries(const Arguments& args, const Block& block, const TensorMap* query_map) {
    const TileScheduler scheduler{block};
#pragma unroll 1
    for (int count = 0; true; count++) {
        const int slot = count % SLOTS, use = count / SLOTS;
        int number = blockIdx.x;
        if (count > 0) {
            barrier_wait_asleep(block.prefetch, (count - 1) & 1);
            number = args.blocks + fetch_next(args.tile_counter);
        }
        barrier_wait(block.tile_empty + 8 * slot, (use & 1) ^ 1);
        const WorkTile work = number < args.work_tiles ? WorkTile(args, number) : WorkTile();
        scheduler.write(slot, work);
        barrier_arrive(block.tile_full + 8 * slot);
        if (!work.exists()) break;
        if (count == 0) wait_for_launch_before();  // which writes T, its scale and the counter, but not keys and values
        scheduler.write_unit(slot, args.weight_scale[work.head]);
        if constexpr (QUERY_SLOTS == 1) barrier_wait(block.queries_empty, (count & 1) ^ 1);
        const uint32_t queries = block.shared + QUERIES + count % QUERY_SLOTS * QUERY_BYTES;
        barrier_expect(block.queries_full + 8 * slot, QUERY_BYTES + QUERY_TAPS * TAP);
        for (int w = 0; w < WARPGROUPS; w++)
            for (int slab = 0; slab < SLABS; slab++)
                copy_tile(queries + (w * SLABS + slab) * SLAB, query_map, block.queries_full + 8 * slot,
                          slab * 64, work.first_row + w * WARPGROUP_STRIDE - HALO, work.head, work.batch);
        copy_bytes(block.shared + TAPS + slot * (QUERY_TAPS * TAP), args.taps + work.head * (QUERY_TAPS * TAP / 2),
                   QUERY_TAPS * TAP, block.queries_full + 8 * slot);
    }
}
