// Mixes the numbers of all heads for the forward: a lane has neighbouring keys, so that it stores 16 bytes at once.
//
// Pair p of 16 pairs of keys lies in a tile where pair p / 4 of chunk p % 4 would.
#pragma once
#include "walk.cuh"

static_assert(TILES_END == SHARED_BYTES, "as in heads.py");

DEVICE uint32_t spread_keys() {  // the place of a lane's two keys
    const int lane = lane_index();
    return lane / 16 * 64 + lane % 4 * 16 + lane % 16 / 4 * 4;
}

// The loop over tasks of a head's warp; calls `begin(tasks, task)` before each task.
template <class Begin> DEVICE void convolve_tasks(const Arguments& args, int head, const Begin& begin) {
    allocate_registers();
    const Bands<PAD, false> bands(args.taps + head * QUERY_TAPS * KEY_TAPS);
    int turns = 0;
#pragma unroll 1
    for (Tasks tasks(args); tasks.exist(args); tasks.next(args)) {
        const Task task = tasks.of_head(args, head);
        begin(tasks, task);
        turns = convolve_turns(
            args, task, bands, turns, spread_keys(), [](const Segment&, int, int, bool) {}, [](const Segment&, uint32_t, int) {});
    }
    meet_mixers(turns);
}

// AT_ONCE keys of heads lane / 4 and 8 further.
constexpr int AT_ONCE = 32;
struct Mixed {
    Numbers numbers[2];

    DEVICE Mixed(const Weights& weights, uint32_t tile) {  // `tile` is at this lane's matrix_row()
#pragma unroll
        for (int i = 0; i < 2; i++) {
            uint32_t loaded[4];
            load_matrices_transposed(loaded, tile + i * 32);
            mix(numbers[i], weights, loaded);
        }
    }
    // Loads from the tile, in the order of `Destination::store`.
    DEVICE static void load(uint32_t (&pairs)[2][4], uint32_t tile) {
#pragma unroll
        for (int i = 0; i < 2; i++) load_matrices(pairs[i], tile + i * 32);
    }
    // The key of numbers[i][eight][2 * half + e].
    DEVICE static int key(int i, int eight, int e) { return lane_index() % 4 * 8 + (i * 2 + eight) * 2 + e; }
};

// The addresses of a lane's first key of row 0, of both heads.
struct Destination {
    ELEMENT* heads[2];
    DEVICE Destination(const Arguments& args, int batch) {
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int head = batch * HEADS + lane_index() / 4 + half * 8;
            heads[half] = args.out + ((int64_t)head * args.rows * args.pitch + Mixed::key(0, 0, 0));
        }
    }
    // Stores AT_ONCE keys, rounded: halves of heads, then of keys, of 16. `place` is from the first key of row 0.
    DEVICE void store(int64_t place, const uint32_t (&pairs)[2][4]) const {
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const uint4 x = {pairs[0][half], pairs[0][half + 2], pairs[1][half], pairs[1][half + 2]};
            if (half * 8 + 8 <= HEADS || half * 8 + lane_index() / 4 < HEADS) store_global(heads[half] + place, x);
        }
    }
};

// The place of a unit of a row in `pieces`, `factors` and `sums`; the next head's is the next.
DEVICE int64_t place_of_piece(const Arguments& args, int batch, int unit, int row) {
    return (((int64_t)batch * args.key_tiles * UNITS_A_ROW + unit) * args.rows + row) * HEADS;
}

// The factor that turns a piece's exponentials into probabilities, as stored: a float. For bfloat16 two numbers that add up
// to it, so that the products of a pair are rounded once.
template <class Element> struct Factor {
    static DEVICE uint32_t stored(float factor) { return __float_as_uint(factor); }
    static DEVICE uint32_t times(uint32_t pair, uint32_t factor) {
        const float x = __uint_as_float(factor);
        return pack<Element>(number_of(pair, 0) * x, number_of(pair, 1) * x);
    }
};
template <> struct Factor<Bfloat16> {
    static DEVICE uint32_t stored(float factor) {
        const Bfloat16 high = from_float<Bfloat16>(factor);
        return (uint32_t)high.bits << 16 | from_float<Bfloat16>(factor - to_float(high)).bits;
    }
    static DEVICE uint32_t times(uint32_t pair, uint32_t factor) {
        const uint32_t high = factor & 0xFFFF0000u | factor >> 16, low = factor << 16 | factor & 0xFFFFu;
        return multiply_add(pair, high, multiply_add(pair, low, 0x80008000u));  // -0 leaves the sign unchanged
    }
};
