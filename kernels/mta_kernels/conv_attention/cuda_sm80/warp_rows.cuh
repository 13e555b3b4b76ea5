// A warp's rows: which keys they see, the masks of their scores and of c, and their scores in shared memory.
#pragma once
#include "products.cuh"

// An infinite score makes c infinite where T has numbers, and NaN where it has zeros. Masked columns may hide the NaN, so
// infinities of c become NaN where a mask is or begins.
struct WarpRows {
    const Positions& at;
    int first;  // of row 0 of set 0, among the queries

    DEVICE int lane() const { return (unsigned)thread_index() % 32; }
    DEVICE int last() const { return first + WARP_ROWS - 1; }
    DEVICE bool all_see(int first_key, int keys) const {
        return first_key >= keys_begin(at, last()) && first_key + keys <= keys_end(at, first);
    }
    // Of this thread: set e, half h.
    DEVICE int row(int e, int h) const { return first + ROW_TILES * (lane() / 4 + 8 * h) + e; }
    DEVICE bool sees_some(int first_key, int keys = CHUNK) const {
        return first_key < keys_end(at, last()) && first_key + keys > keys_begin(at, first);
    }

    // CHUNK columns of scores from `first_key` on: those that a row does not see become zeros for the convolution. Beyond the
    // last key they are zeros already.
    DEVICE void mask_scores(Columns& scores, int first_key) const {
        if (CAUSAL || SPANS) replace_unseen(scores, first_key, 0);
    }
    DEVICE void replace_unseen(Columns& numbers, int first_key, float by) const {
        if (all_see(first_key, CHUNK)) return;
        mask(numbers, first_key, [by](float number, bool seen) { return seen ? number : by; });
    }
    DEVICE void mask_convolved(Columns& c, int first_key) const {
        if (all_see(first_key - 1, CHUNK + 2)) return;
        mask(c, first_key, [](float number, bool seen) { return seen ? fmaf(number, 0, number) : MINUS_INFINITY; });
    }

  private:
    template <class Masked> DEVICE void mask(Columns& numbers, int first_key, Masked masked) const {
        const int column = lane() % 4 * 2;
#pragma unroll
        for (int e = 0; e < ROW_TILES; e++)
#pragma unroll
            for (int h = 0; h < 2; h++) {
                const int begin = keys_begin(at, row(e, h)), end = keys_end(at, row(e, h));
#pragma unroll
                for (int i = 0; i < CHUNK / 4; i++) {
                    const int key = first_key + i / 2 * 8 + column + i % 2;
                    float& number = numbers[e][i / 2 * 4 + 2 * h + i % 2];
                    number = masked(number, key >= begin && key < end);
                }
            }
    }
};

// A warp's rows in a buffer of scores, without the place of a set. COLUMN_GROUPS warps share them.
DEVICE uint32_t score_rows(uint32_t buffer, unsigned thread) { return buffer + thread / (32 * COLUMN_GROUPS) * 16 * PITCH; }

// The last BESIDE eights of a tile are the first of the next one's window.
DEVICE void move_window(uint32_t buffer) {
    if constexpr (BESIDE > 0) {
        const unsigned thread = thread_index(), lane = thread % 32;
        const uint32_t at = score_rows(buffer, thread) + row_place(lane % WARP_ROWS);
        if (lane < WARP_ROWS) {
#pragma unroll
            for (int i = 0; i < BESIDE; i++) store_shared(at + i * 16, load_shared_16(at + (STEP + i) * 16));
        }
        __syncwarp();
    }
}

// Store scores in fp16; `column` is the tile's column of the first of CHUNK columns.
DEVICE void store_scores(uint32_t buffer, const Numbers& halves, int column) {
    const unsigned thread = thread_index(), lane = thread % 32;
    const uint32_t at = score_rows(buffer, thread) + lane / 4 * PITCH + (BESIDE + column / 8) * 16 + lane % 4 * 4;
#pragma unroll
    for (int e = 0; e < ROW_TILES; e++)
#pragma unroll
        for (int i = 0; i < CHUNK / 4; i++) store_shared(at + row_place(e) + i % 2 * 8 * PITCH + i / 2 * 16, halves[e][i]);
}

// This lane's address for `load_matrices`, without the place of a set.
DEVICE uint32_t scores_at(uint32_t buffer) {
    const unsigned thread = thread_index();
    return score_rows(buffer, thread) + thread % 16 * PITCH + thread % 32 / 16 * 16;
}
