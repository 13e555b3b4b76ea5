// Shared memory of many_heads.cu, and what a segment loads there before its keys: the window's queries, the weight.
#pragma once
#include "stream.cuh"

constexpr int RUN = 2 * BLOCK;                      // keys of a lane
constexpr int FAR = TAIL > RUN ? TAIL - RUN : 0;    // scores after the next run too that a run's columns add to
constexpr int QUERY_ROWS = (QUERY_TAPS + 1) / 2 * 16;  // of a warp: products of 16 rows are two queries of 8 heads
constexpr int TAP_CHUNKS = (KEY_TAPS + 3) / 4;      // of four taps
static_assert(HEADS == 8 && BLOCK % 2 == 0 && TAIL <= 2 * RUN, "a run carries on into two more");

constexpr int TAPS_AT = TEAMS * 2 * RING;
constexpr int TAPS = QUERY_TAPS * TAP_CHUNKS * 8 * 16;  // of a warp: [QUERY_TAPS, TAP_CHUNKS, 8 heads, 4]
constexpr int QUERIES_AT = TAPS_AT + SHARING * TAPS, Q_PITCH = DEPTH * 2 + 16, QUERIES = QUERY_ROWS * Q_PITCH;
constexpr int SCRATCH_AT = QUERIES_AT, SCRATCH = SCRATCH_OUT;  // of a warp, instead of the queries
constexpr int STATISTICS_AT = SCRATCH_AT + larger(WARPS * SCRATCH, SHARING * QUERIES);  // maximum and sum
constexpr int CARRIED_AT = STATISTICS_AT + (WARPS * HEADS * 8 + 15) / 16 * 16;
// Of a warp: what its columns add to the next tile's first scores.
constexpr int TAIL_CHUNKS = (TAIL + 3) / 4, CARRIED = TAIL_CHUNKS * 8 * 16;
static_assert(CARRIED_AT + 2 * WARPS * CARRIED == SHARED_BYTES, "as in plan.py");
// Barriers of some warps: of a team, and of a team and the next one.
constexpr int OF_TEAM = 1, OF_NEXT = SHARING > 1 ? 1 + TEAMS : 1;
static_assert(OF_NEXT + TEAMS <= 16);

constexpr int QUERY_CHUNKS = SHARING * QUERY_ROWS * CHUNKS, WEIGHTS = SHARING * QUERY_TAPS * KEY_TAPS * 8;
// Chunks, and weights, that a thread reads before the first keys; the others follow them.
constexpr int EARLY_CHUNKS = QUERY_CHUNKS > 7 * THREADS ? 8 : (QUERY_CHUNKS + THREADS - 1) / THREADS;
constexpr int EARLY_WEIGHTS = WEIGHTS > 7 * THREADS ? 8 : (WEIGHTS + THREADS - 1) / THREADS;

// In flight from global to shared memory. Row r of a warp is query r / 8 of head r % 8.
struct Window {
    uint4 chunks[EARLY_CHUNKS];
    float weights[EARLY_WEIGHTS];
    const char* q;  // of the first head
    int heads;      // that there are

    DEVICE uint4 chunk(const Arguments& args, const Segment& segment, int i) const {
        const int row = i / CHUNKS, chunk = i % CHUNKS, of_warp = row % QUERY_ROWS;
        const int head = row / QUERY_ROWS * HEADS + of_warp % HEADS, tap = of_warp / HEADS;
        const int held = args.window - QUERY_TAPS + tap;
        // Before the first token there is no query, whatever the window holds there.
        const bool inside = i < QUERY_CHUNKS && head < heads && tap < QUERY_TAPS && held >= 0 &&
                            tap >= QUERY_TAPS - segment.length;
        const int64_t at = head * args.q.stride_head + held * args.q.stride_row;
        return load_chunk(q + at + chunk_offset(args.q, chunk), args.q.stride_number, HEAD_DIM - chunk * 8, inside);
    }
    DEVICE float weight(const Arguments& args, int first_head, int i) const {  // i: [SHARING, QUERY_TAPS, KEY_TAPS, 8]
        const int head = i / (8 * KEY_TAPS * QUERY_TAPS) * HEADS + i % 8, tap = i / 8 / KEY_TAPS % QUERY_TAPS;
        if (i >= WEIGHTS || head >= heads) return 0;
        const Weight& weight = args.weight;
        const int64_t at = (first_head + head) * weight.stride_head + tap * weight.stride_query +
                           i / 8 % KEY_TAPS * weight.stride_key;
        return weight.is_float ? ((const float*)weight.start)[at] : to_float(((const ELEMENT*)weight.start)[at]);
    }

    // Heads from `first_head` of the KV head's on.
    DEVICE void load(const Arguments& args, const Segment& segment, int first_head) {
        const int query_head = segment.kv_head * args.group + first_head;
        q = args.q.start + segment.sequence * args.q.stride_batch + query_head * args.q.stride_head;
        heads = args.group - first_head;
        const int thread = thread_index();
#pragma unroll
        for (int i = 0; i < EARLY_CHUNKS; i++) chunks[i] = chunk(args, segment, thread + i * THREADS);
#pragma unroll
        for (int i = 0; i < EARLY_WEIGHTS; i++) weights[i] = weight(args, query_head, thread + i * THREADS);
    }
    DEVICE void store(const Arguments& args, const Segment& segment, int first_head, uint32_t shared) const {
        const int thread = thread_index();
        const auto store_chunk = [&](int i, uint4 values) {
            if (i < QUERY_CHUNKS) store_shared(shared + QUERIES_AT + i / CHUNKS * Q_PITCH + i % CHUNKS * 16, values);
        };
        const auto store_weight = [&](int i, float value) {
            const int tap = i / 8 % KEY_TAPS, chunk = i / 8 / KEY_TAPS * TAP_CHUNKS + tap / 4;
            if (i < WEIGHTS) store_shared(shared + TAPS_AT + (chunk * 8 + i % 8) * 16 + tap % 4 * 4, value * args.factor);
        };
#pragma unroll
        for (int i = 0; i < EARLY_CHUNKS; i++) store_chunk(thread + i * THREADS, chunks[i]);
#pragma unroll
        for (int i = 0; i < EARLY_WEIGHTS; i++) store_weight(thread + i * THREADS, weights[i]);
#pragma unroll 1
        for (int i = thread + EARLY_CHUNKS * THREADS; i < QUERY_CHUNKS; i += THREADS)
            store_chunk(i, chunk(args, segment, i));
#pragma unroll 1
        for (int i = thread + EARLY_WEIGHTS * THREADS; i < WEIGHTS; i += THREADS)
            store_weight(i, weight(args, segment.kv_head * args.group + first_head, i));
    }
};
