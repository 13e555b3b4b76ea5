// The convolution of one head of a step as banded products on the tensor cores.
//
//   c[i, j] = sum over t, y of s[i - t, y] T[t][y, j],   T[t][y, j] = weight[QUERY_TAPS-1-t, y-j+PAD]
//
// T is banded and the same at all columns: eight columns of c read EIGHTS eights of s, so a product's B is a register of T
// an eight, which a warp keeps. A is rows of s; a shift by t is an address t rows higher. Rows of A are INTERLEAVE apart:
// rows INTERLEAVE m + e (m from 0 to 15) are set e of INTERLEAVE + HALO sets, and results INTERLEAVE m + c read the sets
// c + HALO - t. So a set is loaded once for all taps: at 2 rows and 6 taps 7 loads in place of 12.
//
// A load gives two eights side by side, which a product 16 deep takes as they are. Where the third of three begins or
// ends such a pair, a product 8 deep takes it: to move it beside another would take as many instructions as products.
#pragma once
#include "steps.cuh"

constexpr int PAIRS = (WINDOW + 1) / 2;              // a load has two eights of columns
constexpr int KEPT = EIGHTS == 3 ? 4 : EIGHTS;       // of T, a tap: the middle one of three twice, for both its neighbours

struct Taps {
    uint32_t pairs[QUERY_TAPS][KEPT];

    DEVICE void load(const Arguments& args, int head, int lane) {
#pragma unroll
        for (int t = 0; t < QUERY_TAPS; t++)
#pragma unroll
            for (int i = 0; i < KEPT; i++) {
                const int eight = KEPT == 4 ? (i + 1) / 2 : i;
                uint32_t both[2];
#pragma unroll
                for (int e = 0; e < 2; e++) {
                    const int tap = 8 * (eight - LEFT) + lane % 4 * 2 + e - lane / 4 + PAD;
                    const bool inside = tap >= 0 && tap < KEY_TAPS;
                    both[e] = inside ? args.taps[(head * QUERY_TAPS + QUERY_TAPS - 1 - t) * KEY_TAPS + tap].bits : 0;
                }
                pairs[t][i] = another(both[1] << 16 | both[0]);
            }
    }
    DEVICE uint32_t eight(int t, int i, bool second) const {  // of a pair
        return pairs[t][KEPT < 4 ? i : i == 1 ? (second ? 1 : 2) : i / 2 * 3];
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
struct AllRows {
    int rows[INTERLEAVE][2];
};

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

// Eight columns of results += those of a set's rows, t above: `rows` has two eights of columns an element.
template <bool BOUNDS>
DEVICE void add_tap(float (&sums)[4], const uint32_t (&rows)[PAIRS][4], int n, const Taps& taps, int t,
                    const int (&reach)[2]) {
#pragma unroll
    for (int i = 0; i < EIGHTS; i++) {
        const bool first = (n + i) % 2 == 0;
        const uint32_t(&pair)[4] = rows[(n + i) / 2];
        uint32_t a[4];
#pragma unroll
        for (int j = 0; j < 4; j++) a[j] = BOUNDS && t > reach[j % 2] ? 0 : pair[j];  // zeros for other documents
        if (first && i + 1 < EIGHTS)
            multiply<ELEMENT>(sums, a, taps.eight(t, i, false), taps.eight(t, i + 1, true));
        else if (first || i == 0)
            multiply_8<ELEMENT>(sums, a[first ? 0 : 2], a[first ? 1 : 3], taps.eight(t, i, true));
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
    __syncwarp();  // one thread may have thought longer
#pragma unroll
    for (int set = 0; set < SETS; set++) {
        uint32_t rows[PAIRS][4];
#pragma unroll
        for (int i = 0; i < PAIRS; i++) load_matrices(rows[i], columns[i] + row_place(set));
#pragma unroll
        for (int c = 0; c < INTERLEAVE; c++) {
            const int t = c + HALO - set;
            if (t < 0 || t >= QUERY_TAPS) continue;
#pragma unroll
            for (int n = 0; n < STEP; n++) add_tap<BOUNDS>(sums[c][n], rows, n, taps, t, reach.rows[c]);
        }
    }
    store_result(sums, result, lane);
}
