// The mixing warps of the values kernel: exponentials of 8 rows to mixed probabilities, for the blocks of their heads.
//
// A warp multiplies [16 keys x 16 heads] of a row by that row's weights, post[g, h] times the scale of head g and row. Each row
// has its own weights, and a warp has the same rows in all steps: its weights stay in registers. Column n of a product is head
// n % SLOTS of block n / SLOTS.
#pragma once
#include "values_layout.cuh"

DEVICE int head_of(int rank, int slot) { return slot < OWN ? rank * OWN + slot : HEADS; }

using RowWeights = uint32_t[8][2][2];  // of 8 rows, 8 columns each, from 8 input heads each

DEVICE void load_weights(RowWeights& weights, const Arguments& args, const Block& block, int first_row) {
    const int lane = thread_index() % 32, in = lane % 4 * 2;
    float post[2][4];
#pragma unroll
    for (int i = 0; i < 8; i++) {
        const int column = i / 4 * 8 + lane / 4;
        const float number =
            number_at<HEADS, ELEMENT>(args.post, in + i / 2 % 2 * 8 + i % 2, head_of(column / SLOTS, column % SLOTS));
        post[i / 4][i % 4] = to_float(from_float<ELEMENT>(number));
    }
#pragma unroll
    for (int row = 0; row < 8; row++) {
        float scale[4];
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const int head = in + i / 2 * 8 + i % 2;
            const bool is_there = head < HEADS && first_row + row < args.rows;
            scale[i] = is_there ? args.scale[((int64_t)block.sequence * HEADS + head) * args.rows + first_row + row] : 0;
        }
#pragma unroll
        for (int i = 0; i < 4; i++)
            weights[row][i / 2][i % 2] = pack<ELEMENT>(post[i / 2][i % 2 * 2] * scale[i % 2 * 2],
                                                       post[i / 2][i % 2 * 2 + 1] * scale[i % 2 * 2 + 1]);
    }
}

// Where a lane stores its rows of matrices [head][8 keys]: in this block's planes, or in the pieces for another block.
struct Destination {
    uint32_t at, stage_pitch;

    DEVICE Destination(const Block& block, int group) {
        const int lane = thread_index() % 32, column = lane / 16 * 8 + lane % 8, rank = column / SLOTS;
        const bool own = rank == block.rank;
        at = own ? block.planes_at(0) + (rank * GROUPS + group) * PIECE : block.sent_at(0, rank) + group * PIECE;
        at += column % SLOTS * CORE + lane / 8 % 2 * EIGHT_PITCH + row_of(rank, column % SLOTS, 0) * 16;
        stage_pitch = own ? PLANES : (CLUSTER - 1) * SENT;
    }
};

using Pairs = uint32_t[8][4];  // of 8 rows and 16 keys: matrices [head][8 keys], both halves of keys, then of heads

// `from` is this lane's row of a row's matrices. All loads precede the first product, so that their latencies overlap.
DEVICE void mix_keys(Pairs& pairs, uint32_t from, const RowWeights& weights) {
    uint32_t e[8][4];
#pragma unroll
    for (int row = 0; row < 8; row++) load_matrices_transposed(e[row], from + row * (UNIT / 8));
#pragma unroll
    for (int row = 0; row < 8; row++) {
        float x[2][4] = {};
#pragma unroll
        for (int half = 0; half < 2; half++) multiply<ELEMENT>(x[half], e[row], weights[row][half][0], weights[row][half][1]);
#pragma unroll
        for (int i = 0; i < 4; i++) pairs[row][i] = pack<ELEMENT>(x[i / 2][i % 2 * 2], x[i / 2][i % 2 * 2 + 1]);
    }
}

DEVICE void clear(Pairs& pairs) {
#pragma unroll
    for (int i = 0; i < 32; i++) pairs[i / 4][i % 4] = 0;
}

DEVICE void mix_units(const Arguments& args, const Block& block) {
    const int warp = thread_index() / 32 % MIXING_WARPS, lane = thread_index() % 32;
    const int group = warp % GROUPS, part = warp / GROUPS;
    const int first_row = block.first_row + (block.rank * GROUPS + group) * 8;
    RowWeights weights;
    load_weights(weights, args, block, first_row);
    const Destination destination(block, group);
    // A lane's row: of heads from 0 or from 8 on, of 8 keys from 0 or from 8 on.
    const int head = lane / 16 * 8 + lane % 8;
    const uint32_t lane_at = head * (KEYS * 2) + ((lane / 8 % 2) ^ (head / 2 % 4)) * 16;
    // The exponentials of a tile of 64 rows end at its last visible key.
    const int stored_steps = TILES == 1 ? block.steps : (Block::keys_end(args, first_row / 64 * 64 + 64) + KEYS - 1) / KEYS;
    constexpr int SENT_PART = PIECE / PARTS, KEY_STEPS = KEYS / 16 / PARTS;
#pragma unroll 1
    for (int step = 0; step < block.steps; step++) {
        const int unit = step * GROUPS + group, stage = block.planes.stage(step);
        const uint32_t full = block.planes.full_at(step);
        const uint32_t from = block.shared + UNITS_AT + block.units.stage(unit) * UNIT + lane_at;
        const uint32_t to = destination.at + stage * destination.stage_pitch;
        block.units.wait(unit);
#pragma unroll
        for (int i = 0; i < KEY_STEPS; i++) {
            const int keys = part * KEY_STEPS + i;
            Pairs pairs;
            if (TILES == 1 || step < stored_steps) mix_keys(pairs, from ^ (keys * 32), weights);
            else clear(pairs);
            if (i == 0) block.planes.acquire(step);  // in all blocks; the pieces that this one sent have arrived
#pragma unroll
            for (int row = 0; row < 8; row++)
                store_matrices_transposed((to + keys * 2 * EIGHT_PITCH) ^ (row * 16), pairs[row]);
        }
        fence_async_proxy();
        __syncwarp();
        if (lane == 0) {
            block.units.release(unit);
            if (warp == 0) barrier_expect(full, (ROWS / 8 - GROUPS) * PIECE);  // from other blocks
            else barrier_arrive(full);
#pragma unroll
            for (int i = 1; i < CLUSTER; i++) {
                const int rank = (block.rank + i) % CLUSTER;
                const int piece = (block.rank * GROUPS + group) * PIECE + part * SENT_PART;
                copy_to_block(rank, block.planes_at(stage) + piece,
                              block.sent_at(stage, rank) + group * PIECE + part * SENT_PART, SENT_PART, full);
            }
        }
    }
}
