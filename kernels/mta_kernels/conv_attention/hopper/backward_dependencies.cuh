// What a block of the backward waits for before it begins, and its block of gradient products if it computes no rows.
#pragma once
#include <backward_layout.cuh>

// How many blocks of products a chunk has, of p and of ds.
DEVICE int products_of(const Arguments& args, int chunk) {
    const int keys = chunk_keys<BLOCK_ROWS>(args.chunks, args.at, chunk);
    return place_blocks(keys, LEFT) + place_blocks(keys, LAG);
}

// dk or dv of a block of places: its producer warp and its consumer warp groups.
DEVICE void compute_products(const Arguments& args, const WorkTile& work, const RowBlock& of, uint32_t shared,
                             const TensorMap* scratch_map, const TensorMap* query_map, const TensorMap* grad_map,
                             int warpgroup, int thread) {
    const uint32_t full = shared + BARRIERS, empty = full + 8 * PRODUCT_STAGES;
    const int keys = chunk_keys<BLOCK_ROWS>(args.chunks, args.at, work.chunk), of_p = place_blocks(keys, LEFT);
    const bool of_ds = work.part >= of_p;
    const int block = of_ds ? work.part - of_p : work.part, shift = of_ds ? LAG : LEFT;
    const int first_row = of.first_row_block * BLOCK_ROWS, first_place = block * PLACES;
    int begin = 0, end = min(args.chunk_rows, args.at.query_rows - first_row);
    if (CAUSAL)
        begin = max(first_place - shift - (args.at.key_rows - args.at.query_rows) - first_row, 0) / ROW_STEP * ROW_STEP;
    if (SPANS) {  // its keys are of three blocks
        const int last = (args.at.key_rows - 1) / ALIGNED;
        begin = max(begin, args.seen_by[min(max(2 * block - 1, 0), last)] - first_row);
        end = min(end, args.seen_by[last + 1 + min(2 * block + 1, last)] - first_row);
    }
    const ProductTile product = {of.batch_head, first_row, first_place, shift, of.slot, of_ds, begin, end};
    if (warpgroup == WARPGROUPS) {
        deallocate_registers<24>();
        if (thread == 0) {
            fence_async_proxy_everywhere();
            load_products<PRODUCT_STAGES>(product, shared, full, empty, scratch_map, of_ds ? query_map : grad_map, of.head,
                                          of.batch);
        }
    } else {
        allocate_registers<240>();
        const int64_t of_head = (int64_t)of.batch_head * args.at.key_rows * HEAD_DIM;
        uint16_t* const rounded = of_ds ? args.dk_rounded : args.dv_rounded;
        const bool rounds = rounded && !args.exact_rows[of.batch_head];
        const int seen_later = work.chunk > 0 ? chunk_keys<BLOCK_ROWS>(args.chunks, args.at, work.chunk - 1) : 0;
        add_products<PRODUCT_STAGES>(product, shared, full, empty, (of_ds ? args.dk : args.dv) + of_head, rounded + of_head,
                                     rounds ? seen_later : keys, keys, of_ds ? args.ds_unit[of.batch_head] : 1.f,
                                     work.chunk == args.chunks.chunks - 1, warpgroup, thread);
        part_barrier<WARPGROUPS * 128>();
        if (threadIdx.x == 0) count_up(args.chunks.products_done + work.stage);
    }
}
