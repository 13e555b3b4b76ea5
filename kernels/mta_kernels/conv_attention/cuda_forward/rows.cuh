// A warp's rows: which keys they see, their scores on the way to the convolution, and c on its way to the softmax.
#pragma once
#include "products.cuh"

// An infinite score makes c infinite where T has numbers, and NaN where it has zeros. Masked columns may hide the NaN, so
// infinities of c become NaN where a mask is or begins.
struct WarpRows {
    const Positions& at;
    int first;  // of row 0 of set 0, among the queries

    DEVICE int lane() const { return thread_index() % 32; }
    DEVICE int last() const { return first + WARP_ROWS - 1; }
    DEVICE bool all_see(int first_key, int keys) const {
        return first_key >= keys_begin(at, last()) && first_key + keys <= keys_end(at, first);
    }
    // Of this thread: set e, half h.
    DEVICE int row(int e, int h) const { return first + ROW_TILES * (lane() / 4 + 8 * h) + e; }
    DEVICE bool sees_some(int first_key) const { return first_key < keys_end(at, last()) && first_key + KEYS > keys_begin(at, first); }

    // Scores that a row does not see are zeros to the convolution. Beyond the last key they are so already.
    DEVICE void mask_scores(Scores& scores, int first_key) const {
        if (!(CAUSAL || SPANS) || all_see(first_key, KEYS)) return;
        const int column = lane() % 4 * 2;
#pragma unroll
        for (int e = 0; e < ROW_TILES; e++)
#pragma unroll
            for (int h = 0; h < 2; h++) {
                const int begin = keys_begin(at, row(e, h)), end = keys_end(at, row(e, h));
#pragma unroll
                for (int i = 0; i < KEYS / 4; i++) {
                    const int key = first_key + i / 2 * 8 + column + i % 2;
                    if (key < begin || key >= end) scores[e][i / 2 * 4 + 2 * h + i % 2] = 0;
                }
            }
    }

    // `first_key` is that of the first column of c.
    DEVICE void mask_convolved(Scores& c, int first_key) const {
        if (all_see(first_key - 1, KEYS + 2)) return;
        const int column = lane() % 4 * 2;
#pragma unroll
        for (int e = 0; e < ROW_TILES; e++)
#pragma unroll
            for (int h = 0; h < 2; h++) {
                const int begin = keys_begin(at, row(e, h)), end = keys_end(at, row(e, h));
#pragma unroll
                for (int i = 0; i < KEYS / 4; i++) {
                    const int key = first_key + i / 2 * 8 + column + i % 2;
                    float& number = c[e][i / 2 * 4 + 2 * h + i % 2];
                    number = key < begin || key >= end ? MINUS_INFINITY : fmaf(number, 0, number);
                }
            }
    }
};

// Scores in shared memory, as the lanes of a warp address them.
struct ScoreTile {
    uint32_t stores_at;  // of rows lane / 4 of a set, columns 2 (lane % 4) of an eight, without the place of the set
    uint32_t loads_at;   // for `load_matrices`, without the place of the set
    uint32_t moves_at;   // row `lane` of the warp

    DEVICE ScoreTile(uint32_t scores, int thread) {
        const int lane = thread % 32;
        const uint32_t of_warp = scores + thread / 32 * 16 * PITCH;
        stores_at = of_warp + lane / 4 * PITCH + BESIDE * 16 + lane % 4 * 4;
        loads_at = of_warp + lane % 16 * PITCH + lane / 16 * 16;
        moves_at = of_warp + row_place(lane % WARP_ROWS);
    }

    // The last BESIDE eights of a tile are the first of the next one's window.
    DEVICE void move_window() const {
        const int lane = threadIdx.x % 32;
        if constexpr (BESIDE > 0) {
            if (lane < WARP_ROWS) {
#pragma unroll
                for (int i = 0; i < BESIDE; i++)
                    store_shared(moves_at + i * 16, load_shared_16(moves_at + (STEP + i) * 16));
            }
            __syncwarp();
        }
    }
    DEVICE void store(const Scores& scores) const {
#pragma unroll
        for (int e = 0; e < ROW_TILES; e++)
#pragma unroll
            for (int i = 0; i < KEYS / 4; i++)
                store_shared(stores_at + row_place(e) + i % 2 * 8 * PITCH + i / 2 * 16,
                             pack<Half>(scores[e][2 * i], scores[e][2 * i + 1]));
    }
};
