// What is made for a segment before its keys: the folded queries, and the newest keys' columns of r.
#pragma once
#include "stream.cuh"

constexpr int COLUMNS = NEWEST > 0 ? NEWEST : 1;  // to divide by
constexpr int WINDOW_ROWS = HEADS * QUERY_TAPS, WEIGHTS = WINDOW_ROWS * KEY_TAPS;
constexpr int EARLY = 4;  // chunks, and weights, that a thread reads before the first keys, else behind them

DEVICE bool reads_newest(const Segment& segment) {
    return NEWEST > 0 && segment.stop - PAD + KEY_TAPS - 1 > segment.length - NEWEST;
}

DEVICE float dot(uint32_t a, uint32_t b) {
    return to_float(ELEMENT{(uint16_t)a}) * to_float(ELEMENT{(uint16_t)b}) +
           to_float(ELEMENT{(uint16_t)(a >> 16)}) * to_float(ELEMENT{(uint16_t)(b >> 16)});
}

// The last QUERY_TAPS queries of one pass's heads, below them the newest keys, the last one first, and the weights: on
// their way from global memory to `scratch`.
struct Window {
    uint4 chunks[EARLY];
    float weights[EARLY];
    const char* q;  // of the first head
    int heads;      // that there are

    DEVICE uint4 chunk(const Arguments& args, const Segment& segment, const Cache& cache, int i) const {
        const int row = i / CHUNKS, chunk = i % CHUNKS;
        if (row < WINDOW_ROWS) {  // before the first token there is no query, whatever the window holds there
            const int head = row / QUERY_TAPS, tap = row % QUERY_TAPS, held = args.window - QUERY_TAPS + tap;
            const bool inside = head < heads && held >= 0 && tap >= QUERY_TAPS - segment.length;
            const int64_t at = head * args.q.stride_head + held * args.q.stride_row;
            return load_chunk(q + at + chunk_offset(args.q, chunk), args.q.stride_number, HEAD_DIM - chunk * 8, inside);
        }
        const int key = segment.length - 1 - (row - WINDOW_ROWS);
        if (row >= WINDOW_ROWS + NEWEST || key < 0 || !reads_newest(segment)) return {0, 0, 0, 0};
        const int page = PAGED ? cache.page_of(args, key) : 0;
        const int64_t at = row_offset(args.k, key, page, args.page_bits) + chunk_offset(args.k, chunk);
        return load_chunk(cache.keys + at, args.k.stride_number, HEAD_DIM - chunk * 8, true);
    }
    DEVICE float weight(const Arguments& args, int first_head, int i) const {
        const int head = i / (QUERY_TAPS * KEY_TAPS), tap = i / KEY_TAPS % QUERY_TAPS;
        if (i >= WEIGHTS || head >= heads) return 0;
        const Weight& weight = args.weight;
        const int64_t at = (first_head + head) * weight.stride_head + tap * weight.stride_query +
                           i % KEY_TAPS * weight.stride_key;
        return weight.is_float ? ((const float*)weight.start)[at] : to_float(((const ELEMENT*)weight.start)[at]);
    }

    // Heads from `first_head` of the KV head's on.
    DEVICE void load(const Arguments& args, const Segment& segment, const Cache& cache, int first_head) {
        const int query_head = segment.kv_head * args.group + first_head;
        q = args.q.start + segment.sequence * args.q.stride_batch + query_head * args.q.stride_head;
        heads = args.group - first_head;
        const int thread = thread_index();
#pragma unroll
        for (int i = 0; i < EARLY; i++) {
            if (i * THREADS < (WINDOW_ROWS + NEWEST) * CHUNKS)
                chunks[i] = chunk(args, segment, cache, thread + i * THREADS);
            if (i * THREADS < WEIGHTS) weights[i] = weight(args, query_head, thread + i * THREADS);
        }
    }
    DEVICE void store(const Arguments& args, const Segment& segment, const Cache& cache, int first_head,
                      uint32_t scratch) const {
        const int thread = thread_index();
#pragma unroll
        for (int i = 0; i < EARLY; i++) {
            const int at = thread + i * THREADS;
            if (at < (WINDOW_ROWS + NEWEST) * CHUNKS)
                store_shared(scratch + at / CHUNKS * PITCH + at % CHUNKS * 16, chunks[i]);
            if (at < WEIGHTS) store_shared(scratch + WEIGHT + at * 4, weights[i]);
        }
#pragma unroll 1
        for (int at = thread + EARLY * THREADS; at < (WINDOW_ROWS + NEWEST) * CHUNKS; at += THREADS)
            store_shared(scratch + at / CHUNKS * PITCH + at % CHUNKS * 16, chunk(args, segment, cache, at));
#pragma unroll 1
        for (int at = thread + EARLY * THREADS; at < WEIGHTS; at += THREADS)
            store_shared(scratch + WEIGHT + at * 4, weight(args, segment.kv_head * args.group + first_head, at));
    }
};

// Folds the taps: [ROWS, DEPTH], row (head, key tap); and the newest keys' columns of r: [ROWS, NEWEST].
DEVICE void fold(const Arguments& args, const Segment& segment, uint32_t scratch, uint32_t folded, uint32_t newest) {
    const int thread = thread_index();
#pragma unroll 1
    for (int i = thread; i < ROWS * DEPTH / 2; i += THREADS) {
        const int pair = i % (DEPTH / 2), row = i / (DEPTH / 2), head = row / KEY_TAPS, key_tap = row % KEY_TAPS;
        float low = 0, high = 0;
#pragma unroll
        for (int tap = 0; tap < QUERY_TAPS; tap++) {
            const int window_row = head * QUERY_TAPS + tap;
            const float weight = load_shared_float(scratch + WEIGHT + (window_row * KEY_TAPS + key_tap) * 4);
            const uint32_t numbers = load_shared(scratch + window_row * PITCH + pair * 4);
            low += weight * to_float(ELEMENT{(uint16_t)numbers});
            high += weight * to_float(ELEMENT{(uint16_t)(numbers >> 16)});
        }
        store_shared(folded + row * PITCH + pair * 4, pack<ELEMENT>(low * args.factor, high * args.factor));
    }
    if (reads_newest(segment)) {
        // Four lanes a product of a query and a key. A query sees the key if it is not older.
        const int quarter = thread % 4;
#pragma unroll 1
        for (int i = thread / 4; i < (WINDOW_ROWS * NEWEST + 7) / 8 * 8; i += THREADS / 4) {
            const int back = i % COLUMNS, row = i / COLUMNS;
            const bool visible = row < WINDOW_ROWS && row % QUERY_TAPS >= NEWEST - back && back < segment.length;
            float sum = 0;
            for (int chunk = quarter; visible && chunk < CHUNKS; chunk += 4) {
                const uint4 a = load_shared_16(scratch + row * PITCH + chunk * 16);
                const uint4 b = load_shared_16(scratch + (WINDOW_ROWS + back) * PITCH + chunk * 16);
                sum += dot(a.x, b.x) + dot(a.y, b.y) + dot(a.z, b.z) + dot(a.w, b.w);
            }
            sum += __shfl_xor_sync(~0u, sum, 1);
            sum += __shfl_xor_sync(~0u, sum, 2);
            if (quarter == 0 && row < WINDOW_ROWS) store_shared(scratch + NEWEST_SCORES + i * 4, sum * args.factor);
        }
        __syncthreads();
#pragma unroll 1
        for (int i = thread; i < ROWS * NEWEST; i += THREADS) {
            const int back = i % COLUMNS, row = i / COLUMNS, head = row / KEY_TAPS, key_tap = row % KEY_TAPS;
            float sum = 0;
#pragma unroll
            for (int tap = 0; tap < QUERY_TAPS; tap++) {
                const int window_row = head * QUERY_TAPS + tap;
                sum += load_shared_float(scratch + WEIGHT + (window_row * KEY_TAPS + key_tap) * 4) *
                       load_shared_float(scratch + NEWEST_SCORES + (window_row * NEWEST + back) * 4);
            }
            store_shared(newest + i * 4, sum);
        }
    }
}
