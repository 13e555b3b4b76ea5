// The convolution of 64 columns of scores as banded products: c += sum over taps t of shift_rows(s, t) @ T[t].
//
// Columns of c that even and odd blocks of 16 scores touch go to two arrays. Windows that overlap in one would make the
// compiler run one product at a time. See docs/design/hopper-forward.md.
#pragma once
#include <tiles.cuh>

// The 32 columns of c that a block touches.
using Window = float[16];
DEVICE Window& window_of(int block, float (&even)[32], float (&odd)[32]) {
    return *(Window*)((block % 2 ? odd : even) + block / 2 * 16);
}

// Tap 0: rows without a shift, scores in registers, the first product of every window. Only the window of block 0 holds
// numbers already, carried over from the previous tile.
DEVICE void convolve_own(float (&even)[32], float (&odd)[32], const uint32_t (&rows)[4][4], uint64_t taps) {
    products_begin();
#pragma unroll
    for (int block = 0; block < 4; block++)
        Product<16, Half>::run_fragments(window_of(block, even, odd), rows[block], taps, block == 0);
    products_commit();
}

// Rows shifted by First taps and more, scores in shared memory: eight columns a slab of `pitch` bytes, 16 bytes a row.
// A shift by a row is a start address 16 bytes lower. `rows` is Above rows above the first. Neither begins nor commits.
template <int First, int Above = 0>
DEVICE void convolve_shifted(float (&even)[32], float (&odd)[32], uint64_t rows, int pitch, uint64_t taps) {
#pragma unroll
    for (int block = 0; block < 4; block++)
#pragma unroll
        for (int tap = First; tap < QUERY_TAPS; tap++)
            Product<16, Half>::run(window_of(block, even, odd), rows + bytes_on(block * 2 * pitch + (Above - tap) * 16),
                                   taps + bytes_on(tap * TAP), block == 0 || tap > 0);
}
