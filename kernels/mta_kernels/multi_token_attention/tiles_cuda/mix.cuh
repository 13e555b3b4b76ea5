// The mixing of heads: out [16 heads x 8 columns] = mix [16 x heads] convolved [heads x 8 columns], for a row at a time.
#pragma once
#include "steps.cuh"

// The mixing's matrices, as A of products: in registers where there is one, else in shared memory.
struct Mixing {
    uint32_t only[4];

    DEVICE static void block(const Arguments& args, int index, int lane, uint32_t (&a)[4]) {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            uint32_t both[2];
#pragma unroll
            for (int e = 0; e < 2; e++) {
                const int to = index / BLOCKS * 16 + i % 2 * 8 + lane / 4;
                const int from = index % BLOCKS * 16 + i / 2 * 8 + lane % 4 * 2 + e;
                both[e] = to < HEADS && from < HEADS ? args.mix[to * args.mix_out + from * args.mix_in].bits : 0;
            }
            a[i] = both[1] << 16 | both[0];
        }
    }
    DEVICE void load(const Arguments& args, uint32_t shared) {
        const int lane = thread_index() % 32;
        if (!MIX) return;
        if (BLOCKS == 1) block(args, 0, lane, only);
#pragma unroll 1
        for (int i = thread_index() / 32; BLOCKS > 1 && i < BLOCKS * BLOCKS; i += WARPS) {
            uint32_t a[4];
            block(args, i, lane, a);
            store_shared(shared + MIX_AT + (i * 32 + lane) * 16, uint4{a[0], a[1], a[2], a[3]});
        }
    }
    DEVICE void read(uint32_t shared, int to, int from, uint32_t (&a)[4]) const {
        if (BLOCKS == 1) {
#pragma unroll
            for (int i = 0; i < 4; i++) a[i] = only[i];
            return;
        }
        const uint4 x = load_shared_16(shared + MIX_AT + ((to * BLOCKS + from) * 32 + thread_index() % 32) * 16);
        a[0] = x.x, a[1] = x.y, a[2] = x.z, a[3] = x.w;
    }
};

// One row of convolved numbers of all heads, as B of products.
struct MixedRow {
    uint32_t heads[BLOCKS][STEP][2];

    DEVICE MixedRow(uint32_t result, int slot) {
        const int lane = thread_index() % 32;
#pragma unroll
        for (int block = 0; block < BLOCKS; block++)
#pragma unroll
            for (int i = 0; i < STEP; i += 2) {
                int head = block * 16 + lane / 8 % 2 * 8 + lane % 8;
                while (head >= PLANES) head -= 8;  // finite numbers, of other banks, for heads that there are not
                uint32_t found[4];
                const uint32_t address = result + head * PLANE + slot * COLUMNS * 2 + (i + lane / 16) * 16;
                if (MIX) load_matrices_transposed(found, address);
                else load_matrices(found, address);
#pragma unroll
                for (int j = 0; j < 4; j++) heads[block][i + j / 2][j % 2] = found[j];
            }
    }
    // Numbers of heads 16 to + lane / 4, and 8 further: STEP pairs of columns that follow one another, from
    // 2 STEP (lane % 4) of the step on.
    DEVICE void mix(const Mixing& mixing, uint32_t shared, int to, uint32_t (&pairs)[2][STEP]) const {
        if (!MIX) {
#pragma unroll
            for (int i = 0; i < STEP * 2; i++) pairs[i % 2][i / 2] = heads[to][i / 2][i % 2];
            return;
        }
        float sums[STEP][4] = {};
#pragma unroll
        for (int from = 0; from < BLOCKS; from++) {
            uint32_t a[4];
            mixing.read(shared, to, from, a);
#pragma unroll
            for (int i = 0; i < STEP; i++) multiply<ELEMENT>(sums[i], a, heads[from][i][0], heads[from][i][1]);
        }
#pragma unroll
        for (int i = 0; i < STEP * 2; i++)
            pairs[i % 2][i / 2] = pack<ELEMENT>(sums[i / 2][i % 2 * 2], sums[i / 2][i % 2 * 2 + 1]);
    }
};

DEVICE void store_pairs(ELEMENT* destination, const uint32_t (&pairs)[STEP]) {
    if constexpr (STEP == 4) store_memory(destination, uint4{pairs[0], pairs[1], pairs[2], pairs[3]});
    else store_memory(destination, pairs[0], pairs[1]);
}

constexpr int ROWS_A_WARP = (ROWS + WARPS - 1) / WARPS;

// Calls `use(sums, place, seen, column, numbers)` for what this lane has of each row that this warp has of a step: `sums` is
// the element of an array of this row and head, `place` is in `out`, `seen` is set unless the tick is shown.
// `mine` is the place of this lane's numbers of row 0.
DEVICE int64_t first_numbers(const Arguments& args) {
    const int lane = thread_index() % 32;
    return args.out.place(0, lane / 4, 0) + lane % 4 * STEP * 2;
}
template <class Sums, class Use>
DEVICE void mix_rows(const Arguments& args, const Tick& tick, const Mixing& mixing, uint32_t shared, uint32_t result,
                     int64_t mine, Sums (&sums)[ROWS_A_WARP][BLOCKS][2], Use use) {
    const int lane = thread_index() % 32, warp = WARPS - 1 - thread_index() / 32;  // the last convolve fewer heads
    const int column = tick.step * COLUMNS + lane % 4 * STEP * 2;
#pragma unroll
    for (int i = 0; i < ROWS_A_WARP; i++) {
        const int slot = i * WARPS + warp, row = tick.row_block * ROWS + row_of(slot);
        if (slot >= ROWS || row >= args.rows) continue;
        Seen seen;
        if (!tick.shown) seen = Seen(args, args.first_position + row);
        __syncwarp();  // lanes may have come by other ways
        const MixedRow mixed(result, slot);
        ELEMENT* place = args.out.start + (tick.out + mine + row_of(slot) * args.out.row);
#pragma unroll
        for (int to = 0; to < BLOCKS; to++) {
            uint32_t pairs[2][STEP];
            if (to > 0) __syncwarp();
            mixed.mix(mixing, shared, to, pairs);
#pragma unroll
            for (int half = 0; half < 2; half++) {
                if (to * 16 + half * 8 + 8 > HEADS && to * 16 + half * 8 + lane / 4 >= HEADS) continue;
                use(sums[i][to][half], place + (to * 16 + half * 8) * args.out.head, seen, column, pairs[half]);
            }
        }
    }
}
