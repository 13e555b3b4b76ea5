// Convolution of a row along its keys as a product of matrices, by a warp: a row of taps is a band.
//
//   out[16 m + n] += sum over y of row[16 m + y - BEFORE] taps[y - n - BEFORE + PAD],  y below 32
// The right operand has row[16 m + y - BEFORE] in column m and the left one the band, [n x y]. Lane t has 8 neighbours of y
// from 8 (t % 4) on of block m = t / 4: 16 bytes. The sum does not depend on which y is which k of the product.
#pragma once
#include <sm80_decode.cuh>

constexpr int BAND_BYTES = 128;  // of a row of taps in shared memory, zeros around them: tap i is number ZEROS + i
constexpr int ZEROS = 24;

constexpr int keys_before(int pad) { return (pad + 7) / 8 * 8; }  // BEFORE: whole 16 bytes

// Stores ROWS rows of TAPS taps, `tap(row, i)` each, where bands are loaded from; with `Rest` their rounding errors after
// them. All lanes of a warp take part; all loads are in flight before one is used.
template <int ROWS, int TAPS, bool Rest, class Tap> DEVICE void put_taps(uint32_t to, Tap tap) {
    const int lane = threadIdx.x % 32;
    float numbers[ROWS][2];
#pragma unroll
    for (int i = 0; i < 2 * ROWS; i++) numbers[i / 2][i % 2] = tap(i / 2, min(max(lane + i % 2 * 32 - ZEROS, 0), TAPS - 1));
#pragma unroll
    for (int i = 0; i < 2 * ROWS; i++) {
        const int at = lane + i % 2 * 32;
        const float number = at >= ZEROS && at < ZEROS + TAPS ? numbers[i / 2][i % 2] : 0;
        const ELEMENT rounded = from_float<ELEMENT>(number);
        const uint32_t place = to + i / 2 * BAND_BYTES + at * 2;
        store_shared(place, rounded.bits);
        if (Rest) store_shared(place + ROWS * BAND_BYTES, from_float<ELEMENT>(number - to_float(rounded)).bits);
    }
}

template <int PAD> struct Band {
    uint32_t numbers[2][4];  // left operands of two products

    DEVICE void load(uint32_t taps) {
        const int lane = threadIdx.x % 32;
#pragma unroll
        for (int half = 0; half < 2; half++) {  // n = lane / 4 and 8 more
            const int first = ZEROS + lane % 4 * 8 - lane / 4 - half * 8 - (keys_before(PAD) - PAD);
            uint32_t pairs[5];
#pragma unroll
            for (int i = 0; i < 5; i++) pairs[i] = load_shared(taps + (first / 2 + i) * 4);
#pragma unroll
            for (int i = 0; i < 4; i++)
                numbers[i / 2][i % 2 * 2 + half] = (uint32_t)(((uint64_t)pairs[i + 1] << 32 | pairs[i]) >> first % 2 * 16);
        }
    }
    // sums of keys 16 m + n: n = lane / 4 of m = lane % 4 * 2 and the next, and n + 8 of the same.
    DEVICE void multiply_by(uint4 row, float (&sums)[4]) const {
        multiply<ELEMENT>(sums, numbers[0], row.x, row.y);
        multiply<ELEMENT>(sums, numbers[1], row.z, row.w);
    }
    DEVICE static int key_of(int i) {  // of sums[i]
        const int lane = threadIdx.x % 32;
        return (lane % 4 * 2 + i % 2) * 16 + lane / 4 + i / 2 * 8;
    }
};
