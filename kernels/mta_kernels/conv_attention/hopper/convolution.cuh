// The convolution of 64 columns of scores as banded products: c += sum over taps t of shift_rows(s, t) @ T[t].
//
// A product takes a slab, 8 columns of scores, under two taps, 16 numbers deep, and touches three blocks of 8 columns of c, from
// the slab's own on. README.md says more.
#pragma once
#include <tiles.cuh>

constexpr int BLOCKS = 8;  // of a tile's 64 columns; slabs as well
using Window = float[12];  // the three blocks of a slab

// `sums` are blocks 0 to 9; of the last nothing was summed before.
DEVICE void add_window(float (&sums)[40], const Window& window, int slab) {
#pragma unroll
    for (int i = 0; i < 8; i++) sums[4 * slab + i] += window[i];
#pragma unroll
    for (int i = 8; i < 12; i++) sums[4 * slab + i] = 0 + window[i];  // a sum, so that it is no name for the window
}

// Rows of scores, eight columns a slab of `pitch` bytes, 16 bytes a row.
struct ScoreRows {
    uint64_t pairs;  // an operand whose core matrices are a row apart
    uint64_t first_pair;  // and one for the first pair, see `first_rows`
    uint32_t named;  // where this lane names a row when its warp loads or stores two slabs
    int pitch;

    DEVICE ScoreRows on(int bytes) const { return {pairs + bytes_on(bytes), first_pair + bytes_on(bytes), named + bytes, pitch}; }
};
constexpr int FAR_ROWS = far_tap(0) > 0 ? far_tap(0) : 1;  // between the rows of the first pair; of an odd count T has zeros for these
DEVICE ScoreRows score_rows(uint32_t first_row, uint32_t named, int pitch) {
    return {moved(operand(first_row, 16, 128, NO_SWIZZLE), 0),
            moved(operand(first_row - FAR_ROWS * 16, FAR_ROWS * 16, 128, NO_SWIZZLE), 0), named, pitch};
}

// Adds what a tile's scores give to `sums`, of which blocks 0 and 1 hold what the tile before gave. `own`: the rows as they are.
// Products of a slab have a window of their own, since overlapping ones would make the compiler run one product at a time: three take
// turns, and while the next slabs are multiplied, a slab's window is added, which completes its first block, and
// `completed(block)` called. `behind` issues what is to be multiplied after the convolution, in Behind groups.
template <bool FromRegisters, int Behind = 0, class Issue, class Completed>
DEVICE void convolve(float (&sums)[40], const uint32_t (&own)[4][4], const ScoreRows& rows, uint64_t taps, Issue behind,
                     Completed completed) {
    constexpr bool HAS_FAR = QUERY_TAPS % 2 == 0;
    Window windows[3];
    uint32_t far[2][4];
    auto load_far = [&](int slab) {
        if (FromRegisters && HAS_FAR) load_matrices(far[slab / 2 % 2], rows.named + slab * rows.pitch - FAR_ROWS * 16);
    };
    auto end = [&](int slab) {
        add_window(sums, windows[slab % 3], slab);
        completed(slab);
    };
    load_far(0);
#pragma unroll
    for (int slab = 0; slab < BLOCKS; slab++) {
        Window& window = windows[slab % 3];
        products_begin();
#pragma unroll
        for (int pair = 1; pair < TAP_PAIRS; pair++)
            Product<12, Half>::run(window, rows.pairs + bytes_on(slab * rows.pitch - far_tap(pair) * 16),
                                   taps + bytes_on(pair * TAP_PAIR), pair > 1);
        const int i = slab / 2, j = slab % 2 * 2;
        const uint32_t* up = HAS_FAR ? far[i % 2] : own[i];
        if (FromRegisters)
            Product<12, Half>::run_fragments(window, {up[j], up[j + 1], own[i][j], own[i][j + 1]}, taps, TAP_PAIRS > 1);
        else
            Product<12, Half>::run(window, rows.first_pair + bytes_on(slab * rows.pitch), taps, TAP_PAIRS > 1);
        products_commit();
        if (slab % 2 && slab + 1 < BLOCKS) load_far(slab + 1);
        if (slab < 2) continue;
        products_wait<2>();
        end(slab - 2);
    }
    behind();
    products_wait<Behind + 1>();
    end(BLOCKS - 2);
    products_wait<Behind>();
    end(BLOCKS - 1);
}

struct Columns {
    float a[36], b[36], c[24];
};
DEVICE Window& window_of(int slab, Columns& x) {
    return *(Window*)((slab % 3 == 0 ? x.a : slab % 3 == 1 ? x.b : x.c) + slab / 3 * 12);
}
DEVICE float column_of(const Columns& x, int block, int i) {
    float sum = 0;
    if (block < 9) sum = x.a[4 * block + i];
    if (block > 0) sum = block < 9 ? sum + x.b[4 * block - 4 + i] : x.b[4 * block - 4 + i];
    if (block > 1 && block < 8) sum += x.c[4 * block - 8 + i];
    return sum;
}
#ifndef OWN_FIRST
#define OWN_FIRST 0
#endif
template <bool FromRegisters, class Issue>
DEVICE void convolve_at_once(float (&sums)[40], const uint32_t (&own)[4][4], const ScoreRows& rows, uint64_t taps, Issue behind) {
    constexpr bool HAS_FAR = QUERY_TAPS % 2 == 0;
    Columns x;
#pragma unroll
    for (int i = 0; i < 8; i++) x.a[i] = sums[i];
#pragma unroll
    for (int i = 8; i < 12; i++) x.a[i] = 0;
    uint32_t far[4][4];
    auto load = [&] {
        if (FromRegisters && HAS_FAR)
#pragma unroll
            for (int i = 0; i < 4; i++) load_matrices(far[i], rows.named + i * 2 * rows.pitch - FAR_ROWS * 16);
    };
    auto pairs = [&](int slab) {
#pragma unroll
        for (int pair = 1; pair < TAP_PAIRS; pair++)
            Product<12, Half>::run(window_of(slab, x), rows.pairs + bytes_on(slab * rows.pitch - far_tap(pair) * 16),
                                   taps + bytes_on(pair * TAP_PAIR), slab == 0 || OWN_FIRST || pair > 1);
    };
    auto first = [&](int slab) {
        const int i = slab / 2, j = slab % 2 * 2;
        const uint32_t* up = HAS_FAR ? far[i] : own[i];
        if (FromRegisters)
            Product<12, Half>::run_fragments(window_of(slab, x), {up[j], up[j + 1], own[i][j], own[i][j + 1]}, taps, slab == 0 || (!OWN_FIRST && TAP_PAIRS > 1));
        else
            Product<12, Half>::run(window_of(slab, x), rows.first_pair + bytes_on(slab * rows.pitch), taps, slab == 0 || (!OWN_FIRST && TAP_PAIRS > 1));
    };
    if constexpr (OWN_FIRST == 2 && FromRegisters && TAP_PAIRS > 2) {
        // The last pair's A in registers, too, loaded where the first's was, when its products have ended.
        uint32_t near[4][4];
#pragma unroll
        for (int i = 0; i < 4; i++)
#pragma unroll
            for (int j = 0; j < 4; j++) near[i][j] = own[i][j];
        load();
        products_begin();
#pragma unroll
        for (int slab = 0; slab < 8; slab++) first(slab);
        products_commit();
        products_begin();
#pragma unroll
        for (int slab = 0; slab < 8; slab++)
#pragma unroll
            for (int pair = 1; pair < TAP_PAIRS - 1; pair++)
                Product<12, Half>::run(window_of(slab, x), rows.pairs + bytes_on(slab * rows.pitch - far_tap(pair) * 16),
                                       taps + bytes_on(pair * TAP_PAIR), true);
        products_commit();
        products_wait<1>();
        constexpr int last = TAP_PAIRS - 1;
#pragma unroll
        for (int i = 0; i < 4; i++) {
            load_matrices(far[i], rows.named + i * 2 * rows.pitch - far_tap(last) * 16);
            load_matrices(near[i], rows.named + i * 2 * rows.pitch - near_tap(last) * 16);
        }
        products_begin();
#pragma unroll
        for (int slab = 0; slab < 8; slab++) {
            const int i = slab / 2, j = slab % 2 * 2;
            Product<12, Half>::run_fragments(window_of(slab, x), {far[i][j], far[i][j + 1], near[i][j], near[i][j + 1]},
                                             taps + bytes_on(last * TAP_PAIR), true);
        }
    } else if (OWN_FIRST) {
        load();
        products_begin();
#pragma unroll
        for (int slab = 0; slab < 8; slab++) first(slab);
#pragma unroll
        for (int slab = 0; slab < 8; slab++) pairs(slab);
    } else {
        products_begin();
#pragma unroll
        for (int slab = 0; slab < 6; slab++) pairs(slab);
        load();
#pragma unroll
        for (int slab = 6; slab < 8; slab++) pairs(slab);
        if (FromRegisters && HAS_FAR) products_commit(), products_begin();
#pragma unroll
        for (int slab = 0; slab < 8; slab++) first(slab);
    }
    products_commit();
    behind();
    products_wait<0>();
#pragma unroll
    for (int i = 0; i < 40; i++) sums[i] = column_of(x, i / 4, i % 4);
}
