// dv += p^T grad_out and dk += ds^T q, of a chunk of rows of one head and PLACES places of scratch: the blocks of the backward
// that compute no rows.
#pragma once
#include <tiles.cuh>

constexpr int PLACES = 256;   // numbers of a scratch row that a block reads: 128 a warp group
constexpr int ROW_STEP = 64;  // rows of an iteration

#include <backward_scheduler.cuh>

constexpr int PRODUCT_STAGE = (PLACES / 64 + SLABS) * SLAB;

struct ProductTile {
    int batch_head, first_row, first_place, shift, slot;
    bool of_ds;
    int begin, end;  // rows of the chunk, from a multiple of ROW_STEP or where a document's begin
};

// By one thread: tiles of p or ds, and of output gradients or queries.
template <int Stages>
DEVICE void load_products(const ProductTile& tile, uint32_t tiles, uint32_t full, uint32_t empty, const TensorMap* scratch,
                          const TensorMap* right, int head, int batch) {
    for (int row = tile.begin, iteration = 0; row < tile.end; row += ROW_STEP, iteration++) {
        const int stage = iteration % Stages;
        const uint32_t to = tiles + stage * PRODUCT_STAGE;
        barrier_wait(empty + 8 * stage, iteration / Stages & 1 ^ 1);
        barrier_expect(full + 8 * stage, PRODUCT_STAGE);
        for (int slab = 0; slab < PLACES / 64; slab++)
            copy_tile(to + slab * SLAB, scratch, full + 8 * stage, tile.first_place + slab * 64, row, tile.slot, tile.of_ds);
        const int right_row = tile.first_row + row - (tile.of_ds ? 0 : ROWS_BEFORE);
        for (int slab = 0; slab < SLABS; slab++)
            copy_tile(to + (PLACES / 64 + slab) * SLAB, right, full + 8 * stage, slab * 64, right_row, head, batch);
    }
}

// By a warpgroup: 128 places of them, added to `out` [N, HEAD_DIM] of the head, times `factor`; `first`: out holds nothing yet.
// From key `first_rounded` on the sums are whole and go to `rounded` instead.
template <int Stages>
DEVICE void add_products(const ProductTile& tile, uint32_t tiles, uint32_t full, uint32_t empty, float* out,
                         uint16_t* rounded, int first_rounded, int keys, float factor, bool first, int warpgroup, int thread) {
    float sums[2][HEAD_DIM / 2];
#pragma unroll
    for (int i = 0; i < HEAD_DIM / 2; i++) sums[0][i] = sums[1][i] = 0;
    const uint64_t left = operand(tiles + warpgroup * 2 * SLAB, SLAB, 1024, SWIZZLE_128);
    const uint64_t right = operand(tiles + PLACES / 64 * SLAB, SLAB, 1024, SWIZZLE_128);
    int iteration = 0;
    for (int row = tile.begin; row < tile.end; row += ROW_STEP, iteration++) {
        const int stage = iteration % Stages;
        const uint64_t of_stage = bytes_on(stage * PRODUCT_STAGE);
        barrier_wait(full + 8 * stage, iteration / Stages & 1);
        products_begin();
#pragma unroll
        for (int step = 0; step < ROW_STEP / 16; step++)
#pragma unroll
            for (int half = 0; half < 2; half++)
                Product<HEAD_DIM / 2, ELEMENT>::run_transposed(sums[half], left + of_stage + bytes_on(half * SLAB + step * 16 * 128),
                                                               right + of_stage + bytes_on(step * 16 * 128));
        products_commit();
        products_wait<1>();
        if (iteration > 0 && thread == 0) barrier_arrive(empty + 8 * ((iteration - 1) % Stages));
    }
    products_wait<0>();

    const int lane = thread % 32, local_row = thread / 32 * 16 + lane / 4, column = lane % 4 * 2;
#pragma unroll
    for (int half = 0; half < 2; half++)
#pragma unroll
        for (int h = 0; h < 2; h++) {
            // A tile of 64 keys lies as threads held it: place 32 a + 8 b + 2 c + d is key 32 a + 8 c + 2 b + d.
            const int place = tile.first_place + (warpgroup * 2 + half) * 64 + local_row + 8 * h;
            const int key = place / 32 * 32 + place % 8 / 2 * 8 + place % 32 / 8 * 2 + place % 2 - tile.shift;
            if (key < 0 || key >= keys) continue;
            float2* const to = (float2*)(out + (int64_t)key * HEAD_DIM + column);
            uint32_t* const rounded_to = (uint32_t*)(rounded + (int64_t)key * HEAD_DIM + column);
#pragma unroll
            for (int b = 0; b < HEAD_DIM / 8; b++) {
                float2 sum = {sums[half][4 * b + 2 * h] * factor, sums[half][4 * b + 2 * h + 1] * factor};
                if (!first) {
                    const float2 before = to[4 * b];
                    sum.x += before.x, sum.y += before.y;
                }
                if (key >= first_rounded)
                    rounded_to[4 * b] = pack<ELEMENT>(sum.x, sum.y);
                else
                    to[4 * b] = sum;
            }
        }
}
