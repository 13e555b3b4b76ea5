// Which keys a row sees, and small helpers, for all kernels of the banded convolution.
//
// Constants come from the compiler's command line: QUERY_TAPS, KEY_TAPS, PAD, and CAUSAL, SPANS, which are 0 or 1.
#pragma once
#include <common.cuh>

constexpr int HALO = QUERY_TAPS - 1;
constexpr int LEFT = (KEY_TAPS - 1 - PAD + 7) / 8 * 8;  // columns of c left of a block of scores that it touches

struct Positions {
    const int* spans;          // [2, N] or null
    int heads, group;          // query heads, and of them those that share a KV head
    int query_rows, key_rows;  // M, N: the queries are the last M positions
};

// The row of out `[B, Hq, M, HEAD_DIM]` that row `row` of q gives.
DEVICE int64_t out_row(const Positions& at, int batch_head, int row) { return (int64_t)batch_head * at.query_rows + row; }

DEVICE int clamp_row(const Positions& at, int row) { return row < 0 ? 0 : row < at.query_rows ? row : at.query_rows - 1; }

// The keys that row `row` sees; rows outside are as the nearest.
DEVICE int keys_begin(const Positions& at, int row) { return SPANS ? at.spans[clamp_row(at, row)] : 0; }
DEVICE int keys_end(const Positions& at, int row) {
    int end = CAUSAL ? row + (at.key_rows - at.query_rows) + 1 : at.key_rows;
    if (SPANS) end = min(end, at.spans[at.key_rows + clamp_row(at, row)]);
    return end;
}

DEVICE float warp_max(float value) {
    for (int lane = 1; lane < 32; lane *= 2) value = fmaxf(value, __shfl_xor_sync(~0u, value, lane));
    return value;
}

DEVICE float warp_sum(float value) {
    for (int lane = 1; lane < 32; lane *= 2) value += __shfl_xor_sync(~0u, value, lane);
    return value;
}

// The lowest bit of a logsumexp is set if the forward computed its row exactly, in float32. The backward computes such rows
// exactly, too, and rows whose logsumexp is so large that its rounding changes probabilities by half a percent.
constexpr float LARGE_LOGSUMEXP = 32768;
DEVICE float marked(float logsumexp, bool is_exact) {
    return __uint_as_float((__float_as_uint(logsumexp) & ~1u) | (uint32_t)is_exact);
}
DEVICE bool is_exact(float logsumexp) { return __float_as_uint(logsumexp) & 1 || fabsf(logsumexp) > LARGE_LOGSUMEXP; }
