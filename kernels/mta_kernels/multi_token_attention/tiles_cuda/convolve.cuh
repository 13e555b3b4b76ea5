// The convolution of one head of a step as banded products on the tensor cores.
//
//   c[i, j] = sum over t, y of s[i - t, y] T[t][y, j],   T[t][y, j] = weight[QUERY_TAPS-1-t, y-j+PAD]
//
// T is banded and the same at all columns: eight columns of c read EIGHTS eights of s, so a product's B is a register of T
// an eight, which a warp keeps. A is rows of s; a shift by t is an address t rows higher. Rows of A are INTERLEAVE apart:
// rows INTERLEAVE m + e (m from 0 to 15) are set e of INTERLEAVE + HALO sets, and results INTERLEAVE m + c read the sets
// c + HALO - t. So a set is loaded once for all taps: at 2 rows and 6 taps 7 loads in place of 12.
#pragma once
#include "steps.cuh"

constexpr int EVEN_TAPS = (QUERY_TAPS + 1) / 2 * 2;  // products are of 16 numbers: of two taps where EIGHTS is odd
constexpr int PAIRS = (WINDOW + 1) / 2;              // a load has two eights of columns

struct Taps {
    uint32_t pairs[EVEN_TAPS][EIGHTS];

    DEVICE void load(const Arguments& args, int head, int lane) {
#pragma unroll
        for (int t = 0; t < EVEN_TAPS; t++)
#pragma unroll
            for (int eight = 0; eight < EIGHTS; eight++) {
                uint32_t both[2];
#pragma unroll
                for (int e = 0; e < 2; e++) {
                    const int tap = 8 * (eight - LEFT) + lane % 4 * 2 + e - lane / 4 + PAD;
                    const bool inside = t < QUERY_TAPS && tap >= 0 && tap < KEY_TAPS;
                    both[e] = inside ? args.taps[(head * QUERY_TAPS + QUERY_TAPS - 1 - t) * KEY_TAPS + tap].bits : 0;
                }
                pairs[t][eight] = both[1] << 16 | both[0];
            }
    }
};

// Rows above that the results of a lane may read: those of their document. Two rows of each set of results.
struct Reach {
    int rows[INTERLEAVE][2];
    bool unbounded;  // of all lanes

    DEVICE Reach(const Arguments& args, const Tick& tick, int lane) {
        bool bounded = false;
#pragma unroll
        for (int i = 0; i < INTERLEAVE * 2; i++) {
            const int row = (lane / 4 + i % 2 * 8) * INTERLEAVE + i / 2;
            const int position = args.first_position + tick.row_block * ROWS + row;
            const bool exists = position >= args.first_query && position < args.keys;
            rows[i / 2][i % 2] = exists ? position - args.documents[position] : HALO;
            bounded |= rows[i / 2][i % 2] < HALO;
        }
        unbounded = !__any_sync(~0u, bounded);
    }
};

// Two eights of a set's columns, of tap t1 and t2, as A. With BOUNDS rows of other documents are zeros.
template <bool BOUNDS>
DEVICE void multiply_eights(float (&sums)[4], const uint32_t* first, int t1, const uint32_t* second, int t2,
                            uint32_t taps1, uint32_t taps2, const int (&reach)[2]) {
    uint32_t a[4] = {first[0], first[1], second[0], second[1]};
    if (BOUNDS) {
#pragma unroll
        for (int i = 0; i < 4; i++)
            if ((i < 2 ? t1 : t2) > reach[i % 2]) a[i] = 0;
    }
    multiply<ELEMENT>(sums, a, taps1, taps2);
}

// Pair p of a row's pairs of columns goes to chunk p % STEP, pair p / STEP there: then a lane of the mixing has STEP
// pairs that follow one another, and with STEP = 4 a lane here has four that lie together.
DEVICE void store_result(const float (&sums)[INTERLEAVE][STEP][4], uint32_t result, int lane) {
#pragma unroll
    for (int i = 0; i < INTERLEAVE * 2; i++) {
        const int slot = i / 2 * 16 + i % 2 * 8 + lane / 4;
        const uint32_t row = result + slot * COLUMNS * 2;
        uint32_t pairs[STEP];
#pragma unroll
        for (int n = 0; n < STEP; n++) pairs[n] = pack<ELEMENT>(sums[i / 2][n][i % 2 * 2], sums[i / 2][n][i % 2 * 2 + 1]);
        if constexpr (STEP == 4) {
            store_shared(row + lane % 4 * 16, uint4{pairs[0], pairs[1], pairs[2], pairs[3]});
        } else {
#pragma unroll
            for (int n = 0; n < STEP; n++) {
                const int pair = 4 * n + lane % 4;
                store_shared(row + pair % STEP * 16 + pair / STEP * 4, pairs[n]);
            }
        }
    }
}

template <bool BOUNDS, class OfRows>
DEVICE void convolve(const Tick& tick, uint32_t ring, uint32_t result, const Taps& taps, const OfRows& reach) {
    const int lane = thread_index() % 32;
    uint32_t columns[PAIRS];  // where this lane's row of each load is
#pragma unroll
    for (int i = 0; i < PAIRS; i++) {
        const int chunk = min(2 * i + lane / 16, WINDOW - 1);
        columns[i] = ring + lane % 16 * PITCH + ring_wrap(ring_wrap(tick.ring + RING - BESIDE) + chunk) * 16;
    }
    float sums[INTERLEAVE][STEP][4] = {};
    uint32_t rows[2][PAIRS][4];  // of this set and of the one before it
#pragma unroll
    for (int set = 0; set < SETS; set++) {
#pragma unroll
        for (int i = 0; i < PAIRS; i++) load_matrices(rows[set % 2][i], columns[i] + row_place(set));
        const auto now = [&](int eight) { return &rows[set % 2][eight / 2][eight % 2 * 2]; };
        const auto before = [&](int eight) { return &rows[(set + 1) % 2][eight / 2][eight % 2 * 2]; };
#pragma unroll
        for (int c = 0; c < INTERLEAVE; c++) {
            const int t = c + HALO - set;
            if (t < 0 || t >= QUERY_TAPS || t % 2) continue;
            const bool two = t + 1 < QUERY_TAPS;
#pragma unroll
            for (int n = 0; n < STEP; n++) {
                auto& sum = sums[c][n];
                const auto& bounds = reach.rows[c];
                if (EIGHTS > 1) {
                    multiply_eights<BOUNDS>(sum, now(n), t, now(n + 1), t, taps.pairs[t][0], taps.pairs[t][1], bounds);
                    if (two)
                        multiply_eights<BOUNDS>(sum, before(n), t + 1, before(n + 1), t + 1, taps.pairs[t + 1][0],
                                                taps.pairs[t + 1][1], bounds);
                }
                if (EIGHTS % 2) {
                    const uint32_t* second = two ? before(n + EIGHTS - 1) : now(n + EIGHTS - 1);
                    multiply_eights<BOUNDS>(sum, now(n + EIGHTS - 1), t, second, t + 1, taps.pairs[t][EIGHTS - 1],
                                            taps.pairs[t + 1][EIGHTS - 1], bounds);
                }
            }
        }
    }
    store_result(sums, result, lane);
}
