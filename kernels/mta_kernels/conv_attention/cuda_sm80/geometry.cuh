// The tiles of forward and backward: their warps, rows of scores in shared memory, and the band in eights of columns.
//
// The including file defines COLUMN_GROUPS, warps that share rows, and ABOVE, the rows of zeros above a tile.
#pragma once
#include <exact.cuh>
#include <mma.cuh>
#include <swizzle.cuh>

constexpr int THREADS = 32 * WARPS, WARP_ROWS = 16 * ROW_TILES, TILE_ROWS = WARPS / COLUMN_GROUPS * WARP_ROWS;
constexpr int DEPTH_STEPS = (HEAD_DIM + 15) / 16;  // products are 16 deep
constexpr int DEPTH = 16 * DEPTH_STEPS;            // columns of a tile of q, k or v in shared memory
static_assert(HEAD_DIM % 8 == 0, "copies are of 16 bytes");
static_assert(ROW_TILES == 1 || ROW_TILES == 2, "the rows above a tile are a whole number of rows of each set");
static_assert(QUERY_TAPS >= 1 && QUERY_TAPS <= 8 && KEYS % 32 == 0, "eight rows lie above the first of a tile");
static_assert(KEYS / COLUMN_GROUPS % CHUNK == 0 && CHUNK % 16 == 0, "c is computed CHUNK columns at a time");

// Eights of columns: eight columns of c read EIGHTS eights of scores, and KEYS columns of c read WINDOW. The columns of c
// that a tile of KEYS scores finishes begin LEFT columns before it, so BESIDE eights come from the tile before.
constexpr int LEFT_EIGHTS = (PAD + 7) / 8, BESIDE = LEFT_EIGHTS + LEFT / 8, EIGHTS = BESIDE + 1;
constexpr int STEP = KEYS / 8, WINDOW = STEP + BESIDE;
static_assert(EIGHTS <= 3, "up to 17 key taps");

// Scores in fp16, for the convolution. Row r of a tile is row r / ROW_TILES of class r % ROW_TILES, below rows above the tile,
// which are zeros. A product of matrices, whose rows are ROW_TILES apart, so reads rows that lie one after the other, in other
// banks. A shift by any number of rows is another address.
constexpr int PITCH = (WINDOW | 1) * 16;  // bytes of a row: an odd number of chunks
constexpr int CLASS = (TILE_ROWS + ABOVE) / ROW_TILES * PITCH;
DEVICE constexpr int row_place(int row) { return (row + ABOVE) % ROW_TILES * CLASS + (row + ABOVE) / ROW_TILES * PITCH; }
constexpr int SCORE_BYTES = ROW_TILES * CLASS + 16;  // a pair of chunks may end behind the last row

constexpr int QUERY_BYTES = TILE_ROWS * DEPTH * 2, TILE_BYTES = KEYS * DEPTH * 2, TAP_BYTES = QUERY_TAPS * EIGHTS * 128;
constexpr int aligned(int bytes) { return (bytes + 127) / 128 * 128; }
