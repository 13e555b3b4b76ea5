// The window's queries, the newest keys of few_heads.cu and the weight, in flight from global to shared memory.
//
// fold.cuh and queries.cuh define their order there. Row r of the window is query r % QUERY_ROWS / INNER of head
// r / QUERY_ROWS * INNER + r % INNER. There are WINDOW_ROWS of them, and newest keys behind them. The weight is
// [heads / INNER, QUERY_TAPS, KEY_TAPS, INNER].
#pragma once
#include "stream.cuh"

constexpr int WINDOW_CHUNKS = (WINDOW_ROWS + (FEW_HEADS ? NEWEST : 0)) * CHUNKS;
constexpr int WEIGHTS = ALL_HEADS * QUERY_TAPS * KEY_TAPS;
// Chunks, and weights, that a thread reads before the first keys; the others follow them.
constexpr int EARLY_CHUNKS = WINDOW_CHUNKS > 7 * THREADS ? 8 : (WINDOW_CHUNKS + THREADS - 1) / THREADS;
constexpr int EARLY_WEIGHTS = WEIGHTS > 7 * THREADS ? 8 : (WEIGHTS + THREADS - 1) / THREADS;

struct Window {
    uint4 chunks[EARLY_CHUNKS];
    float weights[EARLY_WEIGHTS];
    const char* q;  // of the first head
    int heads;      // that there are

    DEVICE uint4 chunk(const Arguments& args, const Segment& segment, const Cache& cache, int i) const {
        const int row = i / CHUNKS, chunk = i % CHUNKS;
        if (row < WINDOW_ROWS) {  // before the first token there is no query, whatever the window holds there
            const int head = row / QUERY_ROWS * INNER + row % INNER, tap = row % QUERY_ROWS / INNER;
            const int held = args.window - QUERY_TAPS + tap;
            const bool inside = head < heads && tap < QUERY_TAPS && held >= 0 && tap >= QUERY_TAPS - segment.length;
            const int64_t at = head * args.q.stride_head + held * args.q.stride_row;
            return load_chunk(q + at + chunk_offset(args.q, chunk), args.q.stride_number, HEAD_DIM - chunk * 8, inside);
        }
        const int key = segment.length - 1 - (row - WINDOW_ROWS);  // the last one first
        if (i >= WINDOW_CHUNKS || key < 0 || !reads_newest(segment)) return {0, 0, 0, 0};
        const int page = PAGED ? cache.page_of(args, key) : 0;
        const int64_t at = row_offset(args.k, key, page, args.page_bits) + chunk_offset(args.k, chunk);
        return load_chunk(cache.keys + at, args.k.stride_number, HEAD_DIM - chunk * 8, true);
    }
    DEVICE float weight(const Arguments& args, int first_head, int i) const {
        const int head = i / (INNER * KEY_TAPS * QUERY_TAPS) * INNER + i % INNER, tap = i / INNER / KEY_TAPS % QUERY_TAPS;
        if (i >= WEIGHTS || head >= heads) return 0;
        const Weight& weight = args.weight;
        const int64_t at = (first_head + head) * weight.stride_head + tap * weight.stride_query +
                           i / INNER % KEY_TAPS * weight.stride_key;
        return weight.is_float ? ((const float*)weight.start)[at] : to_float(((const ELEMENT*)weight.start)[at]);
    }

    // Heads from `first_head` of the KV head's on.
    DEVICE void load(const Arguments& args, const Segment& segment, const Cache& cache, int first_head) {
        const int query_head = segment.kv_head * args.group + first_head;
        q = args.q.start + segment.sequence * args.q.stride_batch + query_head * args.q.stride_head;
        heads = args.group - first_head;
        const int thread = thread_index();
#pragma unroll
        for (int i = 0; i < EARLY_CHUNKS; i++) chunks[i] = chunk(args, segment, cache, thread + i * THREADS);
#pragma unroll
        for (int i = 0; i < EARLY_WEIGHTS; i++) weights[i] = weight(args, query_head, thread + i * THREADS);
    }
    DEVICE void store(const Arguments& args, const Segment& segment, const Cache& cache, int first_head,
                      uint32_t shared) const {
        const int thread = thread_index();
        const auto store_chunk = [&](int i, uint4 values) {
            if (i < WINDOW_CHUNKS) store_shared(shared + WINDOW_AT + i / CHUNKS * Q_PITCH + i % CHUNKS * 16, values);
        };
        const auto store_weight = [&](int i, float value) {
            if (i < WEIGHTS) store_shared(shared + weight_place(i), FEW_HEADS ? value : value * args.factor);
        };
#pragma unroll
        for (int i = 0; i < EARLY_CHUNKS; i++) store_chunk(thread + i * THREADS, chunks[i]);
#pragma unroll
        for (int i = 0; i < EARLY_WEIGHTS; i++) store_weight(thread + i * THREADS, weights[i]);
#pragma unroll 1
        for (int i = thread + EARLY_CHUNKS * THREADS; i < WINDOW_CHUNKS; i += THREADS)
            store_chunk(i, chunk(args, segment, cache, i));
#pragma unroll 1
        for (int i = thread + EARLY_WEIGHTS * THREADS; i < WEIGHTS; i += THREADS)
            store_weight(i, weight(args, segment.kv_head * args.group + first_head, i));
    }
};
