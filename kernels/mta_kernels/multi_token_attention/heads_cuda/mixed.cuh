// Numbers of all heads mixed for the forward: a lane has keys side by side, so that it stores 16 bytes at once.
//
// Pair p of 16 pairs of keys lies in a tile where pair p / 4 of chunk p % 4 would.
#pragma once
#include "walk.cuh"

static_assert(TILES_END == SHARED_BYTES, "as in plan.py");

DEVICE uint32_t spread_keys() {  // where a lane's two keys go
    const int lane = lane_index();
    return lane / 16 * 64 + lane % 4 * 16 + lane % 16 / 4 * 4;
}

// UNIT keys of heads lane / 4 and 8 further.
struct Mixed {
    Numbers numbers[UNIT / 16];

    DEVICE Mixed(const Weights& weights, uint32_t rows, uint32_t tile) {  // `rows` is matrix_row()
#pragma unroll
        for (int i = 0; i < UNIT / 16; i++) {
            uint32_t loaded[4];
            load_matrices_transposed(loaded, tile + rows + i * 32);
            mix(numbers[i], weights, loaded);
        }
    }
    // Of numbers[i][eight][2 * half + e], the key.
    DEVICE static int key(int i, int eight, int e) {
        return i / 2 * 32 + lane_index() % 4 * 8 + (i % 2 * 2 + eight) * 2 + e;
    }
};

// The same, rounded: halves of heads, then of keys, of 16.
struct Rounded {
    uint32_t pairs[UNIT / 16][4];

    // `destination` is of the first head and key.
    DEVICE void store(ELEMENT* destination, int64_t head_stride) const {
        const int head = lane_index() / 4;
#pragma unroll
        for (int half = 0; half < 2; half++)
#pragma unroll
            for (int i = 0; i < UNIT / 16; i += 2) {
                const uint4 x = {pairs[i][half], pairs[i][half + 2], pairs[i + 1][half], pairs[i + 1][half + 2]};
                if (half * 8 + 8 <= HEADS || half * 8 + head < HEADS)
                    store_global(destination + ((half * 8 + head) * head_stride + Mixed::key(i, 0, 0)), x);
            }
    }
};

// What belongs to a unit of a row, or to its next head, in `pieces` and `factors`.
DEVICE int64_t place_of_piece(const Arguments& args, int batch, int unit, int row) {
    return (((int64_t)batch * args.key_tiles * UNITS_A_ROW + unit) * args.rows + row) * HEADS;
}

// What exponentials of a piece are times to be probabilities, as stored: a float. Of bfloat16 two numbers that add up to it,
// so that the products of a pair are rounded once.
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
        return multiply_add(pair, high, multiply_add(pair, low, 0x80008000u));  // -0: of no sign
    }
};
