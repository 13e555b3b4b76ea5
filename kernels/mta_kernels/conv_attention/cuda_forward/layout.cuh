// Constants of the forward, its shared memory, and what the host passes.
#pragma once
#include <exact.cuh>
#include <mma.cuh>
#include <swizzle.cuh>

constexpr int THREADS = 32 * WARPS, WARP_ROWS = 16 * ROW_TILES, TILE_ROWS = WARPS * WARP_ROWS;
constexpr int BLOCK_ROWS = TILE_ROWS - HALO;  // the first HALO rows of a tile only feed the convolution
constexpr int VALUE_PARTS = 1, VALUE_DIM = HEAD_DIM;
constexpr int DEPTH_STEPS = (HEAD_DIM + 15) / 16;  // products are 16 deep
constexpr int DEPTH = 16 * DEPTH_STEPS;            // columns of a tile of q, k or v in shared memory
static_assert(HEAD_DIM % 8 == 0, "copies are of 16 bytes");
static_assert(ROW_TILES == 1 || ROW_TILES == 2, "eight rows above a tile are a whole number of rows of each set");
static_assert(QUERY_TAPS >= 1 && QUERY_TAPS <= 8 && KEYS % 32 == 0, "eight rows lie above the first of a tile");
static_assert(KEYS % CHUNK == 0 && CHUNK % 16 == 0, "c is computed CHUNK columns at a time");

// Eights of columns: those of scores that eight columns of c read, and those that KEYS columns of c read. The columns of c
// that a tile of KEYS scores finishes begin LEFT columns before it, so BESIDE eights come from the tile before.
constexpr int LEFT_EIGHTS = (PAD + 7) / 8, BESIDE = LEFT_EIGHTS + LEFT / 8, EIGHTS = BESIDE + 1;
constexpr int STEP = KEYS / 8, WINDOW = STEP + BESIDE;
static_assert(EIGHTS <= 3, "up to 17 key taps");

// Scores in fp16, for the convolution. Row r of a tile is row r / ROW_TILES of class r % ROW_TILES, below the last eight rows
// above the tile, which are zeros. So a product of matrices, whose rows are ROW_TILES apart, reads rows that lie one after the
// other, in other banks, and a shift by any number of rows is another address.
constexpr int PITCH = (WINDOW | 1) * 16;  // bytes of a row: an odd number of chunks
constexpr int CLASS = (TILE_ROWS + 8) / ROW_TILES * PITCH;
DEVICE constexpr int row_place(int row) { return (row + 8) % ROW_TILES * CLASS + (row + 8) / ROW_TILES * PITCH; }

// Shared memory, in bytes from its start. Scores take the place of queries that are in registers.
constexpr int QUERY_BYTES = TILE_ROWS * DEPTH * 2, TILE_BYTES = KEYS * DEPTH * 2;
constexpr int SCORE_BYTES = ROW_TILES * CLASS + 16;  // a pair of chunks may end behind the last row
constexpr int QUERIES = 0, SCORES = QUERIES_IN_REGISTERS ? 0 : QUERY_BYTES;
constexpr int KEYS_AT = SCORES + (QUERIES_IN_REGISTERS && QUERY_BYTES > SCORE_BYTES ? QUERY_BYTES : (SCORE_BYTES + 127) / 128 * 128);
constexpr int VALUES_AT = KEYS_AT + TILE_BYTES, TAPS = VALUES_AT + TILE_BYTES;
static_assert(TAPS + QUERY_TAPS * 512 == SHARED_BYTES, "as in forward.py");

struct Arguments {
    Positions at;
    Inputs inputs;
    float scale_log2;  // scale * log2(e)
    uint16_t* out;     // [B, Hq, M, HEAD_DIM]
    float* logsumexp;  // [B, Hq, M], natural units
    int row_blocks, work_tiles;
    int heads_in_l2;  // heads that are scheduled together, the longest work tiles first
};
