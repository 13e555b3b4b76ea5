// The convolution of 64 columns of scores as banded products: c += sum over taps t of shift_rows(s, t) @ T[t].
//
// Columns of c that even and odd blocks of 16 scores touch go to two arrays: windows that overlap in one would make the
// compiler run one product at a time. README.md says more.
#pragma once
#include <tiles.cuh>

// The 32 columns of c that a block touches.
using Window = float[16];
DEVICE Window& window_of(int block, float (&even)[32], float (&odd)[32]) {
    return *(Window*)((block % 2 ? odd : even) + block / 2 * 16);
}

// Rows as they are, the tap 0, scores in registers: the first product of every window. Only that of block 0 holds anything
// yet, what the tile before left.
DEVICE void convolve_own(float (&even)[32], float (&odd)[32], const uint32_t (&rows)[4][4], uint64_t taps) {
    products_begin();
#pragma unroll
    for (int block = 0; block < 4; block++)
        Product<16, Half>::run_fragments(window_of(block, even, odd), rows[block], taps, block == 0);
    products_commit();
}

// Rows shifted by First taps and more, scores in shared memory: eight columns a slab of `pitch` bytes, 16 bytes a row, so
// that a shift is a start address 16 bytes a row lower. `rows` is Above rows above the first. Neither begins nor commits.
template <int First, int Above = 0>
DEVICE void convolve_shifted(float (&even)[32], float (&odd)[32], uint64_t rows, int pitch, uint64_t taps) {
#pragma unroll
    for (int block = 0; block < 4; block++)
#pragma unroll
        for (int tap = First; tap < QUERY_TAPS; tap++)
            Product<16, Half>::run(window_of(block, even, odd), rows + bytes_on(block * 2 * pitch + (Above - tap) * 16),
                                   taps + bytes_on(tap * TAP), block == 0 || tap > 0);
}

#ifndef MODE
#define MODE 0
#endif
DEVICE constexpr bool by_registers(int tap) { return MODE == 1 ? tap >= 3 && tap % 2 : MODE == 2 ? tap >= 2 && tap % 2 == 0 : MODE == 4 ? tap >= 2 : false; }
template <int Above>
DEVICE void convolve_rest(float (&even)[32], float (&odd)[32], uint32_t (&own)[4][4], uint64_t rows, uint32_t named, int pitch, uint64_t taps) {
    if constexpr (MODE == 3) {
        uint32_t far[4][4];
#pragma unroll
        for (int tap = 1; tap < QUERY_TAPS; tap++) {
            auto& a = tap % 2 ? far : own;
            if (tap > 1) products_wait<1>();
#pragma unroll
            for (int block = 0; block < 4; block++) load_matrices(a[block], named + block * 2 * pitch - tap * 16);
            products_begin();
#pragma unroll
            for (int block = 0; block < 4; block++)
                Product<16, Half>::run_fragments(window_of(block, even, odd), a[block], taps + bytes_on(tap * TAP), true);
            products_commit();
        }
    } else {
#pragma unroll
        for (int tap = 1; tap < QUERY_TAPS; tap++) {
            if (by_registers(tap)) {
                if (by_registers(tap - 1)) products_wait<0>(); else products_wait<1>();
#pragma unroll
                for (int block = 0; block < 4; block++) load_matrices(own[block], named + block * 2 * pitch - tap * 16);
            }
            if (tap == 1 || by_registers(tap) || by_registers(tap - 1)) products_begin();
#pragma unroll
            for (int block = 0; block < 4; block++) {
                if (by_registers(tap))
                    Product<16, Half>::run_fragments(window_of(block, even, odd), own[block], taps + bytes_on(tap * TAP), true);
                else
                    Product<16, Half>::run(window_of(block, even, odd), rows + bytes_on(block * 2 * pitch + (Above - tap) * 16), taps + bytes_on(tap * TAP), true);
            }
            if (tap + 1 == QUERY_TAPS || by_registers(tap) || by_registers(tap + 1)) products_commit();
        }
    }
}
