// Mixes heads on the tensor cores: tiles of 16 positions of all heads from shared memory and back.
//
// A product of 16 x 8 numbers gives lane t rows t / 4 and 8 further, columns 2 (t % 4) and the next (mma.cuh):
//   mixed    [positions x heads] = scores^T weights^T     scores lie as [heads][positions]: transposed as they are loaded
//   mixed    as 16-bit pairs is the right side of a second product [heads x positions]
//   results  [heads x positions] = weights mixed^T        which goes back to where the scores were
#pragma once
#include "layout.cuh"

// A matrix [HEADS, HEADS] to shared memory, rounded, padded with zeros.
DEVICE void load_weights(const Matrix& matrix, uint32_t destination) {
    for (int i = thread_index(); i < PADDED * PADDED; i += THREADS) {
        const int row = i / PADDED, column = i % PADDED;
        const float number = number_at<HEADS, ELEMENT>(matrix, row, column);
        store_shared(destination + row * WEIGHT_PITCH + column * 2, from_float<ELEMENT>(number).bits);
    }
}

// A matrix of weights, or its transpose, in squares of 16 x 16 numbers: the left side of a product, or, in another order,
// the right side of one with the transpose.
template <bool Transposed> struct Weights {
    static constexpr bool HELD = SQUARES * SQUARES * OPERANDS <= 4;  // in registers
    uint32_t held[HELD ? SQUARES : 1][HELD ? SQUARES : 1][4];
    uint32_t at;  // this lane's row

    DEVICE Weights(uint32_t matrix) {
        const int lane = thread_index() % 32, row = lane / 8 % 2 * 8, column = lane / 16 * 8;
        if (Transposed) at = matrix + (column + lane % 8) * WEIGHT_PITCH + row * 2;
        else at = matrix + (row + lane % 8) * WEIGHT_PITCH + column * 2;
        if (HELD) {
#pragma unroll
            for (int i = 0; i < SQUARES * SQUARES; i++) load(held[HELD ? i / SQUARES : 0][HELD ? i % SQUARES : 0], i / SQUARES, i % SQUARES);
        }
    }
    DEVICE void load(uint32_t (&square)[4], int row, int column) const {
        if (Transposed) load_matrices_transposed(square, at + column * 16 * WEIGHT_PITCH + row * 32);
        else load_matrices(square, at + row * 16 * WEIGHT_PITCH + column * 32);
    }
    DEVICE void get(uint32_t (&square)[4], int row, int column) const {
        if (HELD) {
#pragma unroll
            for (int i = 0; i < 4; i++) square[i] = held[HELD ? row : 0][HELD ? column : 0][i];
        } else {
            load(square, row, column);
        }
    }
};

// This lane's row of a tile's 8 x 8 matrices, [heads][positions]: for every 16 heads, from the buffer's start. Padding
// heads repeat the last one; their weight is zero.
struct Lane {
    uint32_t across[SQUARES];  // matrices in the order of a transposed left side: both halves of positions, then of heads
    uint32_t along[SQUARES];   // in the order of a left side: both halves of heads, then of positions
    int pitch;

    DEVICE Lane(int of_pitch) : pitch(of_pitch) {
        const int lane = thread_index() % 32;
#pragma unroll
        for (int square = 0; square < SQUARES; square++) {
            across[square] = min(16 * square + lane / 16 * 8 + lane % 8, HEADS - 1) * pitch + lane / 8 % 2 * 16;
            along[square] = min(16 * square + lane / 8 % 2 * 8 + lane % 8, HEADS - 1) * pitch + lane / 16 * 16;
        }
    }
};

DEVICE float low_half(uint32_t pair) { return to_float(ELEMENT{(uint16_t)pair}); }
DEVICE float high_half(uint32_t pair) { return to_float(ELEMENT{(uint16_t)(pair >> 16)}); }

// x [16 positions x heads] of a tile; `Mixed` by weights [out, in], or the numbers themselves.
template <bool Mixed, bool Transposed>
DEVICE void mix(float (&x)[EIGHTS][4], uint32_t tile, const Lane& lane, const Weights<Transposed>& weights) {
#pragma unroll
    for (int i = 0; i < EIGHTS * 4; i++) x[i / 4][i % 4] = 0;
#pragma unroll
    for (int in = 0; in < SQUARES; in++) {
        uint32_t a[4];
        load_matrices_transposed(a, tile + lane.across[in]);
        if (!Mixed) {
#pragma unroll
            for (int i = 0; i < 4; i++)
                x[2 * in + i / 2][i % 2 * 2] = low_half(a[i]), x[2 * in + i / 2][i % 2 * 2 + 1] = high_half(a[i]);
            continue;
        }
#pragma unroll
        for (int out = 0; out < SQUARES; out++) {
            uint32_t w[4];
            weights.get(w, out, in);
            multiply<ELEMENT>(x[2 * out], a, w[0], w[2]);
            multiply<ELEMENT>(x[2 * out + 1], a, w[1], w[3]);
        }
    }
}

// Rounds x to pairs of heads, at positions lane / 4 and 8 further.
DEVICE void round_pairs(uint32_t (&pairs)[EIGHTS][2], const float (&x)[EIGHTS][4]) {
#pragma unroll
    for (int i = 0; i < EIGHTS * 2; i++) pairs[i / 2][i % 2] = pack<ELEMENT>(x[i / 2][i % 2 * 2], x[i / 2][i % 2 * 2 + 1]);
}

// Stores 16 x 16 numbers [heads][positions] of a product to a tile: both halves of heads, then of positions.
DEVICE void store_square(uint32_t tile, int square, const uint32_t (&pairs)[4], const Lane& lane, uint32_t scrap) {
#if BULK
    const int head = 16 * square + thread_index() / 8 % 2 * 8 + thread_index() % 8;
    store_matrices(head < HEADS ? tile + lane.along[square] : scrap, pairs);
#else
    const int head = 16 * square + thread_index() % 32 / 4;
#pragma unroll
    for (int i = 0; i < 4; i++)
        if (head + i % 2 * 8 < HEADS)
            store_shared(tile + (head + i % 2 * 8) * lane.pitch + i / 2 * 16 + thread_index() % 4 * 4, pairs[i]);
#endif
}

// Loads pairs of heads, as `round_pairs` makes them, from a tile, and stores them to it.
DEVICE void load_pairs(uint32_t (&pairs)[EIGHTS][2], uint32_t tile, const Lane& lane) {
#pragma unroll
    for (int square = 0; square < SQUARES; square++) {
        uint32_t a[4];
        load_matrices_transposed(a, tile + lane.across[square]);
#pragma unroll
        for (int i = 0; i < 4; i++) pairs[2 * square + i / 2][i % 2] = a[i];
    }
}
#if BULK
DEVICE void store_pairs(uint32_t tile, const uint32_t (&pairs)[EIGHTS][2], const Lane& lane, uint32_t scrap) {
#pragma unroll
    for (int square = 0; square < SQUARES; square++) {
        uint32_t a[4];
#pragma unroll
        for (int i = 0; i < 4; i++) a[i] = pairs[2 * square + i / 2][i % 2];
        const int head = 16 * square + thread_index() % 32 / 16 * 8 + thread_index() % 8;
        store_matrices_transposed(head < HEADS ? tile + lane.across[square] : scrap, a);
    }
}
#endif

DEVICE uint32_t scaled(uint32_t pair, const float (&scale)[2]) {
    return pack<ELEMENT>(low_half(pair) * scale[0], high_half(pair) * scale[1]);
}

// Weights [out, in], each times the scale of the input head: of a lane's heads 2 (t % 4) and the next of every eight.
struct ScaledWeights {
    uint32_t held[SQUARES][SQUARES][4];
    template <bool Transposed> DEVICE ScaledWeights(const Weights<Transposed>& weights, const float (&scale)[EIGHTS][2]) {
#pragma unroll
        for (int i = 0; i < SQUARES * SQUARES; i++) {
            uint32_t(&square)[4] = held[i / SQUARES][i % SQUARES];
            weights.get(square, i / SQUARES, i % SQUARES);
#pragma unroll
            for (int j = 0; j < 4; j++) square[j] = scaled(square[j], scale[i % SQUARES * 2 + j / 2]);
        }
    }
    DEVICE void get(uint32_t (&square)[4], int row, int column) const {
#pragma unroll
        for (int i = 0; i < 4; i++) square[i] = held[row][column][i];
    }
};

// Mixes the pairs by weights [out, in] to a tile.
template <class OfWeights>
DEVICE void mix_back(uint32_t tile, const uint32_t (&pairs)[EIGHTS][2], const Lane& lane, uint32_t scrap,
                     const OfWeights& weights) {
#pragma unroll
    for (int out = 0; out < SQUARES; out++) {
        float sums[2][4] = {};  // of both halves of the positions
#pragma unroll
        for (int in = 0; in < SQUARES; in++) {
            uint32_t w[4];
            weights.get(w, out, in);
#pragma unroll
            for (int half = 0; half < 2; half++)
                multiply<ELEMENT>(sums[half], w, pairs[2 * in][half], pairs[2 * in + 1][half]);
        }
        uint32_t rounded[4];
#pragma unroll
        for (int i = 0; i < 4; i++) rounded[i] = pack<ELEMENT>(sums[i / 2][i % 2 * 2], sums[i / 2][i % 2 * 2 + 1]);
        store_square(tile, out, rounded, lane, scrap);
    }
}
