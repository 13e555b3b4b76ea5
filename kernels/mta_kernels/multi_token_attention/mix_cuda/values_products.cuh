// The consumer warp groups of the values kernel: rows of out, mixed probabilities times values, by wgmma.
#pragma once
#include "values_layout.cuh"

// A warp group's part. With two tiles of 64 rows it has one tile and all heads of the block, else half of the heads. With an
// odd number both compute the head in the middle.
struct Share {
    int tile, first_head;  // the latter a place in the block

    DEVICE Share(int warpgroup)
        : tile(TILES == CONSUMERS ? warpgroup : 0), first_head(TILES == CONSUMERS ? 0 : warpgroup * (OWN - PRODUCTS)) {}
    DEVICE bool is_there(const Block& block, int product) const { return block.rank * OWN + first_head + product < HEADS; }
};

DEVICE void write_rows(const Arguments& args, const Block& block, const Share& share, const float (&sums)[PRODUCTS][HEAD_DIM / 2],
                       int thread) {
    const int lane = thread % 32;
#pragma unroll
    for (int product = 0; product < PRODUCTS; product++) {
        if (!share.is_there(block, product)) continue;
        const int place = share.first_head + product, head = block.rank * OWN + place;
        ELEMENT* out = args.out + block.sequence * args.out_batch + head * args.out_head + lane % 4 * 2;
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const int row =
                block.first_row + share.tile * 64 + thread / 32 * 16 + h * 8 + row_of(block.rank, place, lane / 4);
            if (row >= args.rows) continue;
#pragma unroll
            for (int i = 0; i < HEAD_DIM / 8; i++)
                *(uint32_t*)(out + row * args.out_row + i * 8) =
                    pack<ELEMENT>(sums[product][4 * i + 2 * h], sums[product][4 * i + 2 * h + 1]);
        }
    }
}

DEVICE void multiply_values(const Arguments& args, const Block& block, int warpgroup, int thread) {
    const Share share(warpgroup);
    const int lane = thread % 32;
    float sums[PRODUCTS][HEAD_DIM / 2];
#pragma unroll
    for (int i = 0; i < PRODUCTS * HEAD_DIM / 2; i++) sums[i / (HEAD_DIM / 2)][i % (HEAD_DIM / 2)] = 0;
    const uint64_t planes = operand(block.planes_at(0) + share.tile * 8 * PIECE + share.first_head * CORE, EIGHT_PITCH, PIECE, NO_SWIZZLE);
    const uint64_t values = operand(block.shared + VALUES_AT + share.first_head * SLABS * SLAB, SLAB, 1024, SWIZZLE_128);
#pragma unroll 1
    for (int step = 0; step < block.steps; step++) {
        const uint64_t left = planes + bytes_on(block.planes.stage(step) * PLANES);
        const uint64_t right = values + bytes_on(block.values.stage(step) * VALUES);
        block.values.wait(step);
        block.planes.wait(step);
        products_begin();
#pragma unroll
        for (int product = 0; product < PRODUCTS; product++) {
#pragma unroll
            for (int keys = 0; keys < KEYS / 16; keys++)
                Product<HEAD_DIM / 2, ELEMENT>::run_values(
                    sums[product], left + bytes_on(product * CORE + keys * 2 * EIGHT_PITCH),
                    right + bytes_on(product * SLABS * SLAB + keys * 16 * 128));
        }
        products_commit();
        products_wait<0>();  // the other warp group's products run meanwhile
        if (lane < CLUSTER) arrive_in_block(lane, block.planes.empty_at(step));
        if (lane == 0) block.values.release(step);
    }
    write_rows(args, block, share, sums, thread);
}
