// dv += p^T grad_out and dk += ds^T q, of a chunk of rows of one head and PLACES places of scratch: the backward's work tiles
// of products.
#pragma once
#include <backward_layout.cuh>
#include <backward_scale.cuh>

struct ProductTile {
    bool of_ds;
    int keys, shift, first_row, first_place;
    int begin, end;  // rows of the chunk, from a multiple of ROW_STEP or where a document's begin

    DEVICE ProductTile(const Arguments& args, const WorkTile& work, const RowBlock& of) {
        keys = chunk_keys<BLOCK_ROWS>(args.chunks, args.at, work.chunk);
        const int of_p = place_blocks(keys, LEFT);
        of_ds = work.part >= of_p;
        const int block = of_ds ? work.part - of_p : work.part;
        shift = of_ds ? LAG : LEFT;
        first_row = of.first_row_block * BLOCK_ROWS, first_place = block * PLACES;
        begin = 0, end = min(args.chunk_rows, args.at.query_rows - first_row);
        if (CAUSAL)
            begin = max(first_place - shift - (args.at.key_rows - args.at.query_rows) - first_row, 0) / ROW_STEP * ROW_STEP;
        if (SPANS) {  // its keys lie in three blocks
            const int last = (args.at.key_rows - 1) / ALIGNED;
            begin = max(begin, args.seen_by[min(max(2 * block - 1, 0), last)] - first_row);
            end = min(end, args.seen_by[last + 1 + min(2 * block + 1, last)] - first_row);
        }
    }
    // Slabs of 64 places that some of the ROW_STEP rows from `row` on see. Beyond, the scratch is not of these rows.
    DEVICE int slabs_seen(const Positions& at, int row) const {
        if (!CAUSAL || SPANS) return PLACES / 64;
        const int last_place = first_row + row + ROW_STEP - 1 + (at.key_rows - at.query_rows) + shift;
        return min((last_place - first_place) / 64 + 1, PLACES / 64);
    }
};

// By one thread: tiles of p or ds, and of output gradients or queries. `iteration`: how many the block has copied.
DEVICE void copy_products(const Positions& at, int slots, const Block& block, const RowBlock& of, const ProductTile& tile,
                          const TensorMap* scratch, const TensorMap* right, int& iteration) {
#pragma unroll 1
    for (int row = tile.begin; row < tile.end; row += ROW_STEP, iteration++) {
        const uint32_t to = block.shared + block.products.stage(iteration) * PRODUCT_STAGE;
        const uint32_t full = block.products.acquire(iteration);
        const int slabs = tile.slabs_seen(at, row);
        barrier_expect(full, (slabs + SLABS) * SLAB);
#pragma unroll 1
        for (int slab = 0; slab < slabs; slab++)
            copy_tile(to + slab * SLAB, scratch, full, 0, row, tile.first_place / 32 + slab * 2, tile.of_ds * slots + of.slot);
        for (int slab = 0; slab < SLABS; slab++)
            copy_tile(to + (PLACES / 64 + slab) * SLAB, right, full, slab * 64, tile.first_row + row, of.head, of.batch);
    }
}

// Of ROW_STEP rows, the first slabs of a warp group.
template <int Slabs> DEVICE void multiply_slabs(float (&sums)[2][HEAD_DIM / 2], uint64_t left, uint64_t right) {
    products_begin();
#pragma unroll
    for (int step = 0; step < ROW_STEP / 16; step++)
#pragma unroll
        for (int slab = 0; slab < Slabs; slab++)
            Product<HEAD_DIM / 2, ELEMENT>::run_transposed(sums[slab], left + bytes_on(slab * SLAB + step * 16 * 64),
                                                           right + bytes_on(step * 16 * 128));
}

// By a warp group: 128 of the places, added to dk or dv of the head. From the first key on that no later chunk sees, sums are final:
// they are rounded, if all of the head's rows are computed here.
DEVICE void add_products(const Arguments& args, const Block& block, const BlockWork& work, int warpgroup, int thread) {
    const RowBlock of(args, work);
    const ProductTile tile(args, work, of);
    const bool is_first = work.chunk == args.chunks.chunks - 1;  // dk and dv hold nothing yet
    const int64_t of_head = (int64_t)of.batch_head * args.at.key_rows * HEAD_DIM;
    float* const out = (tile.of_ds ? args.dk : args.dv) + of_head;
    uint16_t* const all_rounded = tile.of_ds ? args.dk_rounded : args.dv_rounded;
    uint16_t* const rounded = all_rounded + of_head;
    const int seen_later = work.chunk > 0 ? chunk_keys<BLOCK_ROWS>(args.chunks, args.at, work.chunk - 1) : 0;
    const int first_rounded = all_rounded && !args.exact_rows[of.batch_head] ? seen_later : tile.keys;
    const float factor = tile.of_ds ? args.ds_unit[of.batch_head] : 1.f;

    float sums[2][HEAD_DIM / 2];
#pragma unroll
    for (int i = 0; i < HEAD_DIM / 2; i++) sums[0][i] = sums[1][i] = 0;
    const uint64_t left = operand(block.shared + warpgroup * 2 * SLAB, SLAB / 2, 512, SWIZZLE_64);
    const uint64_t right = operand(block.shared + PLACES / 64 * SLAB, SLAB, 1024, SWIZZLE_128);
    int iteration = work.iteration;
#pragma unroll 1
    for (int row = tile.begin; row < tile.end; row += ROW_STEP, iteration++) {
        const int own_slabs = tile.slabs_seen(args.at, row) - 2 * warpgroup;
        const uint64_t of_stage = bytes_on(block.products.stage(iteration) * PRODUCT_STAGE);
        block.products.wait(iteration);
        if (own_slabs >= 2) multiply_slabs<2>(sums, left + of_stage, right + of_stage);
        else if (own_slabs == 1) multiply_slabs<1>(sums, left + of_stage, right + of_stage);
        else warpgroup_barrier(warpgroup + 1);  // without products: a warp that still waits would miss the stage's next phase
        products_commit();
        products_wait<1>();
        if (iteration > work.iteration && thread == 0) block.products.release(iteration - 1);
    }
    products_wait<0>();
    if (iteration > work.iteration && thread == 0) block.products.release(iteration - 1);

    const int lane = thread % 32, local_row = thread / 32 * 16 + lane / 4, column = lane % 4 * 2;
    // A tile of 64 keys lies as threads held it: place 32 a + 8 b + 2 c + d is key 32 a + 8 c + 2 b + d.
    const auto key_of = [&](int half, int h) {
        const int place = tile.first_place + (warpgroup * 2 + half) * 64 + local_row + 8 * h;
        return place / 32 * 32 + place % 8 / 2 * 8 + place % 32 / 8 * 2 + place % 2 - tile.shift;
    };
#pragma unroll
    for (int half = 0; half < 2; half++) {
        float2 before[2][HEAD_DIM / 8];
#pragma unroll
        for (int h = 0; h < 2; h++) {  // all loads before the first store, which might be to the same place
            const int key = key_of(half, h);
            const bool adds = !is_first && key >= 0 && key < tile.keys;
            const float2* const from = (const float2*)(out + (int64_t)key * HEAD_DIM + column);
#pragma unroll
            for (int b = 0; b < HEAD_DIM / 8; b++) before[h][b] = adds ? from[4 * b] : float2{0, 0};
        }
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const int key = key_of(half, h);
            if (key < 0 || key >= tile.keys) continue;
            const float unit = SPANS && tile.of_ds ? factor * document_unit(args, of.batch_head, key) : factor;
            float2* const to = (float2*)(out + (int64_t)key * HEAD_DIM + column);
            uint32_t* const rounded_to = (uint32_t*)(rounded + (int64_t)key * HEAD_DIM + column);
#pragma unroll
            for (int b = 0; b < HEAD_DIM / 8; b++) {
                const float2 sum = {before[h][b].x + sums[half][4 * b + 2 * h] * unit,
                                    before[h][b].y + sums[half][4 * b + 2 * h + 1] * unit};
                if (key >= first_rounded)
                    rounded_to[4 * b] = pack<ELEMENT>(sum.x, sum.y);
                else
                    to[4 * b] = sum;
            }
        }
    }
}
