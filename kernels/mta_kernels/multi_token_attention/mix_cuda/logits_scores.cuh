// The roles that compute scores: the copying thread and two warp groups, each with half of the block's heads.
#pragma once
#include <logits_layout.cuh>

// The copying thread: for each head the queries of a tile, in two halves, then its keys step by step. With several tiles, tile
// t's block multicasts the keys of warp group t's heads to the blocks of all tiles. All blocks fill stages in the same rounds.
DEVICE void copy_queries_and_keys(const Arguments& args, const Block& block, const TensorMap* query_map,
                                  const TensorMap* key_map) {
    int round = 0;  // of the stages
    const auto copy = [&](const TensorMap* map, int row, int group_of_heads, int sequence, bool for_all_tiles) {
#pragma unroll 1
        for (int i = 0; i < OWN_HEADS; i++)
#pragma unroll 1
            for (int group = 0; group < SCORE_GROUPS; group++) {
                const int head = head_of(i, group, block.part);
                if (!is_head(head)) continue;
                barrier_wait(block.used(group, i), round & 1 ^ 1);
                barrier_expect(block.come(group, i), STAGE);
                if (for_all_tiles && block.tile != group) continue;
                for (int slab = 0; slab < SLABS; slab++) {
                    const uint32_t at = block.stage(group, i) + slab * SLAB, come = block.come(group, i);
                    const int column = slab * 64, head_of_map = head / group_of_heads;
                    if (for_all_tiles) copy_tile_to_blocks(block.of_all_tiles(), at, map, come, column, row, head_of_map, sequence);
                    else copy_tile(at, map, come, column, row, head_of_map, sequence);
                }
            }
        round++;
    };
#pragma unroll 1
    for (Piece piece(args, block.worker); piece.any(); piece.next(args, block.worker)) {
        const int row = args.first_row + block.first_row(piece);
        copy(query_map, row, 1, piece.sequence, false);
        copy(query_map, row + 32, 1, piece.sequence, false);
        const int steps = piece.steps();
#pragma unroll 1
        for (int step = 0; step < steps; step++) copy(key_map, piece.key(step), args.group, piece.sequence, TILES > 1);
    }
}

using Query = uint32_t[DEPTH_STEPS][4];

// A warp that computes scores of its group's heads, from queries in registers and keys, rounded into planes.
struct ScoreWarp {
    const Block& block;
    int group, warp, lane;
    int round = 0;      // of the stages
    uint64_t keys;
    uint32_t row_at;    // where a lane stores its part of the group's first plane, in a buffer

    DEVICE ScoreWarp(const Block& block, int group, int thread)
        : block(block), group(group), warp(thread / 32), lane(thread % 32) {
        keys = moved(operand(block.stage(group, 0), 16, 1024, SWIZZLE_128), 0);
        row_at = head_of(0, group, block.part) * PLANE + (warp % ROW_GROUPS * 16 + lane / 4) * STEP_KEYS * 2 + lane % 4 * 16;
    }
    DEVICE bool has(int i) const { return is_head(head_of(i, group, block.part)); }
    DEVICE int mixer() const { return block.rank(block.tile, warp / ROW_GROUPS); }  // the block that mixes this warp's rows
    DEVICE void wait(int i) const { barrier_wait(block.come(group, i), round & 1); }
    DEVICE void release(int i) const {
#if TILES > 1
        if (lane < TILES) arrive_in_block(block.rank(lane, block.part), block.used(group, i));
#else
        if (lane == 0) barrier_arrive(block.used(group, i));
#endif
    }

    // This warp's 16 rows of the heads' queries, which arrive in two halves of 32 rows.
    DEVICE void load_queries(Query (&queries)[OWN_HEADS]) {
#pragma unroll
        for (int half = 0; half < 2; half++, round++)
#pragma unroll
            for (int i = 0; i < OWN_HEADS; i++) {
                if (!has(i)) continue;
                wait(i);
                if (warp / 2 == half) {
                    load_query(queries[i], i);
                    fence_async_proxy();  // an arrival does not wait for loads, and the next copy overwrites these bytes
                }
                __syncwarp();
                release(i);
            }
    }
    DEVICE void load_query(Query& query, int i) const {
        const int row = warp % 2 * 16 + lane % 16;
#pragma unroll
        for (int step = 0; step < DEPTH_STEPS; step++)
            load_matrices(query[step], block.stage(group, i) + step / 4 * SLAB + row * 128 +
                                           ((step % 4 * 2 + lane / 16) ^ row % 8) * 16);
    }

    DEVICE void multiply(float (&scores)[16], const Query& query, int i) const {
        wait(i);
        products_begin();
#pragma unroll
        for (int step = 0; step < DEPTH_STEPS; step++)
            Product<16, Element>::run_fragments(
                scores, query[step], keys + bytes_on(i * STAGE + step / 4 * SLAB + step % 4 * 32), step > 0);
        products_commit();
        products_wait<0>();
        release(i);
    }

    // A lane has keys 8 b + 2 (lane % 4) and the next of rows lane / 4 and 8 further: its 16 bytes of a row are these
    // pairs in the order of b. `mix_row` restores the order of keys.
    DEVICE void store(const float (&scores)[16], int i, int buffer, float scale) const {
        const uint32_t at = block.planes(buffer) + row_at + head_of(i, 0, 0) * PLANE;
#pragma unroll
        for (int half = 0; half < 2; half++) {
            uint32_t pairs[4];
#pragma unroll
            for (int b = 0; b < 4; b++)
                pairs[b] = pack<Element>(scores[4 * b + 2 * half] * scale, scores[4 * b + 2 * half + 1] * scale);
            const uint4 values = {pairs[0], pairs[1], pairs[2], pairs[3]};
#if SPLIT > 1
            send(mixer(), at + half * 8 * STEP_KEYS * 2, values, full(buffer));
#else
            store_shared(at + half * 8 * STEP_KEYS * 2, values);
#endif
        }
    }
    DEVICE void wait_until_empty(int buffer, int parity) const {
        barrier_wait(block.empty(buffer, warp), parity);
    }
    DEVICE uint32_t full(int buffer) const { return block.full(buffer, warp % ROW_GROUPS); }
    DEVICE void fill(int buffer) const {
        __syncwarp();
        if (lane != 0) return;
#if SPLIT > 1
        int heads = 0;
#pragma unroll
        for (int i = 0; i < OWN_HEADS; i++) heads += has(i);
        expect_in_block(mixer(), full(buffer), heads * 16 * STEP_KEYS * 2);
#else
        barrier_arrive(full(buffer));
#endif
    }
};

DEVICE void make_scores(const Arguments& args, const Block& block, int group, int thread) {
    ScoreWarp own(block, group, thread);
    Query queries[OWN_HEADS];
    int count = 0;  // steps
#pragma unroll 1
    for (Piece piece(args, block.worker); piece.any(); piece.next(args, block.worker)) {
        own.load_queries(queries);
        const int end = count + piece.steps();
#pragma unroll 1
        for (; count < end; count++, own.round++) {
            const int buffer = count % BUFFERS;
            own.wait_until_empty(buffer, count / BUFFERS & 1 ^ 1);
#pragma unroll
            for (int i = 0; i < OWN_HEADS; i++) {
                if (!own.has(i)) continue;
                float scores[16];
                own.multiply(scores, queries[i], i);
                own.store(scores, i, buffer, args.scale * LOG2_E);
            }
            own.fill(buffer);
        }
    }
}
