// Tiles of 16-bit numbers in shared memory, laid out such that no load has bank conflicts.
#pragma once
#include <mma.cuh>

// Tiles lie in shared memory row by row, in chunks of 16 bytes. Groups of WAYS chunks are permuted, differently in each
// of eight successive rows, so that a column of chunks covers all banks: neither `ldmatrix` nor copies have bank
// conflicts.
template <int Columns> constexpr int WAYS = Columns % 64 == 0 ? 8 : Columns % 32 == 0 ? 4 : 2;
template <int Columns> DEVICE uint32_t in_tile(int row, int chunk) {
    return row * Columns * 2 + (chunk ^ row % 8 * WAYS<Columns> / 8) * 16;
}
// The address of the chunk 2 `step` after the one at `address`, which is the first or second of its row.
template <int Columns> DEVICE uint32_t at_step(uint32_t address, int step) {
    constexpr int permuted = 16 * WAYS<Columns>;
    return (address ^ 32 * step % permuted) + 32 * step / permuted * permuted;
}

// By all threads of a block: zeros in the columns that pad a row to a multiple of 16.
template <int Numbers, int Columns, int Threads> DEVICE void clear_rest(uint32_t tile, int rows) {
    if constexpr (Numbers < Columns)
        for (int row = threadIdx.x; row < rows; row += Threads)
            store_shared(tile + in_tile<Columns>(row, Numbers / 8), uint4{0, 0, 0, 0});
}
