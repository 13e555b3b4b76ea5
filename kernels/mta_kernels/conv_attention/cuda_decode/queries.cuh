// Shared memory of many_heads.cu, and what a segment loads there before its keys: the window's queries, the weight.
#pragma once
#include "layout.cuh"

constexpr int RUN = 2 * BLOCK;                      // keys of a lane
constexpr int FAR = TAIL > RUN ? TAIL - RUN : 0;    // scores after the next run too that a run's columns add to
constexpr int QUERY_ROWS = (QUERY_TAPS + 1) / 2 * 16;  // of a warp: products of 16 rows are two queries of 8 heads
constexpr int TAP_CHUNKS = (KEY_TAPS + 3) / 4;      // of four taps
static_assert(HEADS == 8 && BLOCK % 2 == 0 && TAIL <= 2 * RUN, "a run carries on into two more");

constexpr int TAPS_AT = TEAMS * 2 * RING;
constexpr int TAPS = QUERY_TAPS * TAP_CHUNKS * 8 * 16;  // of a warp: [QUERY_TAPS, TAP_CHUNKS, 8 heads, 4]
constexpr int QUERIES_AT = TAPS_AT + SHARING * TAPS, QUERIES = QUERY_ROWS * Q_PITCH;
constexpr int SCRATCH_AT = QUERIES_AT, SCRATCH = SCRATCH_OUT;  // of a warp, instead of the queries
constexpr int STATISTICS_AT = SCRATCH_AT + larger(WARPS * SCRATCH, SHARING * QUERIES);  // maximum and sum
constexpr int CARRIED_AT = STATISTICS_AT + (WARPS * HEADS * 8 + 15) / 16 * 16;
// Of a warp: what its columns add to the next tile's first scores.
constexpr int TAIL_CHUNKS = (TAIL + 3) / 4, CARRIED = TAIL_CHUNKS * 8 * 16;
static_assert(CARRIED_AT + 2 * WARPS * CARRIED == SHARED_BYTES, "as in plan.py");
// Barriers of some warps: of a team, and of a team and the next one.
constexpr int OF_TEAM = 1, OF_NEXT = SHARING > 1 ? 1 + TEAMS : 1;
static_assert(OF_NEXT + TEAMS <= 16);

constexpr int INNER = HEADS, WINDOW_ROWS = SHARING * QUERY_ROWS, WINDOW_AT = QUERIES_AT;  // see window.cuh
DEVICE bool reads_newest(const Segment&) { return false; }
DEVICE uint32_t weight_place(int i) {
    const int tap = i / HEADS % KEY_TAPS, chunk = i / HEADS / KEY_TAPS * TAP_CHUNKS + tap / 4;
    return TAPS_AT + (chunk * HEADS + i % HEADS) * 16 + tap % 4 * 4;
}

#include "window.cuh"
