// The convolution of a warp's rows of scores as banded products on the tensor cores.
//
//   c[i, j] = sum over t, y of s[i - t, y] T[t][y, j]
//
// A warp's rows are ROW_TILES sets of 16, ROW_TILES apart: set e has the rows ROW_TILES m + e. Results of set e read scores of
// set e - t, which lie t rows higher. So neighbouring sets share what is loaded: two sets of 6 taps load 7 sets, not 12.
#pragma once
#include "geometry.cuh"

constexpr int SETS = ROW_TILES + HALO, PAIRS = (CHUNK / 8 + BESIDE + 1) / 2;  // a load has two eights of columns

// CHUNK columns of scores or of c: of each set of 16 rows, four numbers of every eight columns.
using Columns = float[ROW_TILES][CHUNK / 2];

using Numbers = uint32_t[ROW_TILES][CHUNK / 4];  // the same in 16 bits, two in a word

template <class Element> DEVICE void pack_columns(Numbers& packed, const Columns& columns, float factor = 1) {
#pragma unroll
    for (int e = 0; e < ROW_TILES; e++)
#pragma unroll
        for (int i = 0; i < CHUNK / 4; i++) packed[e][i] = pack<Element>(columns[e][2 * i] * factor, columns[e][2 * i + 1] * factor);
}

// A thread's four numbers of 16 rows and eight columns, in the layout of products.
template <int Numbers> DEVICE float (&eight_columns(float (&all)[Numbers], int eight))[4] {
    return *(float(*)[4])(all + 4 * eight);
}

// Eight columns of c += their part in a pair of eights of scores. A pair's second eight goes with a product 8 deep where the
// first lies outside the columns' window, and the other way around.
DEVICE void add_pair(float (&c)[4], const uint32_t (&pair)[4], int first, const uint32_t (&taps)[4]) {
    if (first == 0 && EIGHTS > 1) multiply<Half>(c, pair, taps[0], taps[1]);
    else if (first == 1 && EIGHTS > 2) multiply<Half>(c, pair, taps[2], taps[3]);
    else if (first == EIGHTS - 1) multiply_8<Half>(c, pair[0], pair[1], taps[first == 0 ? 0 : first == 1 ? 1 : 3]);
    else if (first == -1) multiply_8<Half>(c, pair[2], pair[3], taps[0]);
}

// This lane's address for `load_matrices` of a tap's T, or T': matrices 0, 1, 1 and 2, since a product 16 deep takes two
// neighbours.
template <bool Back> DEVICE uint32_t taps_at(uint32_t taps) {
    const unsigned lane = thread_index() % 32, matrix = (lane / 8 + 1) / 2, last = EIGHTS - 1;
    const unsigned inside = matrix < last ? matrix : last;
    return taps + (Back ? last - inside : inside) * 128 + lane % 8 * 16;
}

// CHUNK columns of c of this warp's rows, or of ds with `Back`. `scores` is this lane's address for `load_matrices`, without the
// place of a set.
template <bool Back = false> DEVICE void convolve(Columns& c, uint32_t scores, uint32_t taps) {
    const uint32_t own_taps = taps_at<Back>(taps);
    uint32_t of_set[2][4];  // T of the tap by which set e reads the set that is loaded: e and set, even or odd
    uint32_t pairs[2][4];
    auto load = [&](int i) {
        load_matrices(pairs[i % 2], scores + row_place(i / PAIRS - HALO) + i % PAIRS * 32);
    };
    load(0);
#pragma unroll
    for (int i = 0; i < SETS * PAIRS; i++) {
        const int set = i / PAIRS, pair = i % PAIRS;
        if (pair == 0) {
            const int tap = HALO - set;  // of set 0; set 1's tap was loaded before
            if (tap >= 0 && Back) load_matrices_transposed(of_set[set % 2], own_taps + (HALO - tap) * EIGHTS * 128);
            if (tap >= 0 && !Back) load_matrices(of_set[set % 2], own_taps + tap * EIGHTS * 128);
        }
        if (i + 1 < SETS * PAIRS) load(i + 1);
#pragma unroll
        for (int e = 0; e < ROW_TILES; e++) {
            const int tap = e + HALO - set;
            if (tap < 0 || tap >= QUERY_TAPS) continue;
#pragma unroll
            for (int n = 0; n < CHUNK / 8; n++) add_pair(eight_columns(c[e], n), pairs[i % 2], 2 * pair - n, of_set[(set + e) % 2]);
        }
    }
}
