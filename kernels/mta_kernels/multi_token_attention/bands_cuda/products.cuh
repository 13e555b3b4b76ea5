// The convolution of a row as banded products: out[i, j] = sum over a, b of taps[a, b] x[i + offset + a, j - pad + b].
//
// A matrix of 16 chunks has 8 keys of a row in each of its rows. Its product with a banded matrix of a tap row's
// weights has 8 keys of out in each row. A row of x adds to QUERY_TAPS rows of out, and completes one.
#pragma once
#include "layout.cuh"

// The banded matrices of a convolution by taps, or of its transpose, as B of products.
template <int Pad, bool Transposed> struct Bands {
    uint32_t pairs[QUERY_TAPS][EIGHTS];

    DEVICE Bands(const ELEMENT* taps) {
        const int lane = lane_index();
#pragma unroll
        for (int t = 0; t < QUERY_TAPS; t++)
#pragma unroll
            for (int i = 0; i < EIGHTS; i++) {
                uint32_t both[2];
#pragma unroll
                for (int e = 0; e < 2; e++) {
                    const int tap = 8 * (i - Reach<Pad>::LEFT) + lane % 4 * 2 + e - lane / 4 + Pad;
                    const int place = t * KEY_TAPS + tap;
                    const bool inside = tap >= 0 && tap < KEY_TAPS;
                    both[e] = inside ? taps[Transposed ? QUERY_TAPS * KEY_TAPS - 1 - place : place].bits : 0;
                }
                pairs[t][i] = both[1] << 16 | both[0];
            }
    }
};

// Incomplete rows of out: in step `step` of QUERY_TAPS the row `n` further has index (step + n) % QUERY_TAPS.
struct RowSums {
    float sums[QUERY_TAPS][4] = {};

    // `rows` are matrices of a row: two for each of EIGHTS shifts.
    template <int Loads, class Bands>
    DEVICE void add(int step, const uint32_t (&rows)[Loads][4], const Bands& bands) {
#pragma unroll
        for (int n = 0; n < QUERY_TAPS; n++) {
            float(&sum)[4] = sums[(step + n) % QUERY_TAPS];
            const uint32_t(&band)[EIGHTS] = bands.pairs[QUERY_TAPS - 1 - n];
            constexpr int LAST = EIGHTS - 1;
            if constexpr (EIGHTS > 1) multiply<ELEMENT>(sum, rows[0], band[0], band[1]);
            if constexpr (EIGHTS != 2)
                multiply_8<ELEMENT>(sum, matrix(rows, 2 * LAST), matrix(rows, 2 * LAST + 1), band[LAST]);
        }
    }
    // Rows of steps `step` and the next: both first eights of each, `low`, and the `last` eights of both as one product.
    // Calls `done(step)` when its row of out is complete, `next(i)` after the last read of low[0], low[1] or last.
    template <class Bands, class Done, class Next>
    DEVICE void add_pair(int step, const uint32_t (&low)[2][4], const uint32_t (&last)[4], const Bands& bands, const Done& done,
                         const Next& next) {
#pragma unroll
        for (int e = 0; e < 2; e++) {
#pragma unroll
            for (int n = 0; n < QUERY_TAPS; n++) {
                const uint32_t(&band)[EIGHTS] = bands.pairs[QUERY_TAPS - 1 - n];
                multiply<ELEMENT>(sums[(step + e + n) % QUERY_TAPS], low[e], band[0], band[1]);
            }
            next(e);
            multiply_8<ELEMENT>(sums[step], last[2 * e], last[2 * e + 1], bands.pairs[e ? 0 : QUERY_TAPS - 1][2]);
            if (e) next(2);
            if (e == 0)
#pragma unroll
                for (int n = 1; n < QUERY_TAPS; n++)
                    multiply<ELEMENT>(sums[(step + n) % QUERY_TAPS], last, bands.pairs[QUERY_TAPS - 1 - n][2],
                                      bands.pairs[QUERY_TAPS - n][2]);
            done(step + e);
        }
    }
    DEVICE void clear(int step) {
#pragma unroll
        for (int i = 0; i < 4; i++) sums[step][i] = 0;
    }
};
