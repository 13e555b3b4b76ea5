// Constants of the forward, its shared memory, and what the host passes.
#pragma once
#include <positions.cuh>

constexpr int COLUMN_GROUPS = 1, ABOVE = 8;
#include "geometry.cuh"

constexpr int BLOCK_ROWS = TILE_ROWS - HALO;  // the first HALO rows of a tile only feed the convolution
constexpr int VALUE_PARTS = 1, VALUE_DIM = HEAD_DIM;

// Shared memory, in bytes from its start. Scores take the place of queries that are in registers.
constexpr int QUERIES = 0, SCORES = OPERANDS_IN_REGISTERS ? 0 : QUERY_BYTES;
constexpr int KEYS_AT = SCORES + (OPERANDS_IN_REGISTERS && QUERY_BYTES > SCORE_BYTES ? QUERY_BYTES : aligned(SCORE_BYTES));
constexpr int VALUES_AT = KEYS_AT + TILE_BYTES, TAPS = VALUES_AT + TILE_BYTES;
static_assert(TAPS + TAP_BYTES == SHARED_BYTES, "as in forward.py");

struct Arguments {
    Positions at;
    Inputs inputs;
    float scale_log2;  // scale * log2(e)
    uint16_t* out;     // [B, Hq, M, HEAD_DIM]
    float* logsumexp;  // [B, Hq, M], natural units
    int row_blocks, work_tiles;
    int heads_in_l2;  // heads that are scheduled together, the longest work tiles first
};
