// Shared memory of few_heads.cu, and what a segment prepares there before its keys: the folded queries, and the newest
// keys' columns of r.
#pragma once
#include "stream.cuh"

constexpr int ROWS = KEY_TAPS * HEADS;              // of folded queries: row tap * HEADS + head
constexpr int TAPS_A_TILE = 8 / HEADS;
constexpr int ROW_TILES = (ROWS + 7) / 8, ROW_PAIRS = (ROW_TILES + 1) / 2;
constexpr int MOST_PAIRS = DEPTH > 128 ? 2 : 3;     // at once, else registers spill
constexpr int PAIRS_AT_ONCE = ROW_PAIRS < MOST_PAIRS ? ROW_PAIRS : MOST_PAIRS;
static_assert(8 % HEADS == 0 && HEADS <= 4 && SHARING == 1 && KEYS == 32 && KEY_TAPS <= KEYS, "a lane a key");

constexpr int FOLDED_AT = WARPS * 2 * RING, SCRATCH_AT = FOLDED_AT + ROW_PAIRS * 16 * PITCH;
// Of a warp, in the loop: r, where column y of tap b is at y - b of KEYS, so that a score's numbers are at the same
// place of all taps. And the probabilities, [KEYS, 8 heads]. After the loop its part of out.
constexpr int R_KEY = HEADS * 4, R_PITCH = KEYS * R_KEY + R_KEY + HEADS * 16;  // of a tap: no bank conflicts
constexpr int PROBABILITIES = larger(ROW_TILES * TAPS_A_TILE * R_PITCH, SCRATCH_OUT);
constexpr int SCRATCH = PROBABILITIES + KEYS * 16;
// Of all, before the loop: the window, the newest keys, the weight and the newest keys' scores.
constexpr int WEIGHT = (HEADS * QUERY_TAPS + NEWEST) * PITCH;
constexpr int NEWEST_SCORES = WEIGHT + HEADS * QUERY_TAPS * KEY_TAPS * 4;
constexpr int PREPARATION = NEWEST_SCORES + HEADS * QUERY_TAPS * NEWEST * 4;
constexpr int NEWEST_AT = SCRATCH_AT + (larger(WARPS * SCRATCH, PREPARATION) + 15) / 16 * 16;
constexpr int STATISTICS_AT = NEWEST_AT + (ROWS * NEWEST + 1) / 2 * 8;  // maximum and sum
constexpr int CARRIED_AT = (STATISTICS_AT + WARPS * HEADS * 8 + 15) / 16 * 16;
constexpr int CARRIED = KEY_TAPS * R_KEY;  // of a tile: what its columns add to the next tile's first scores; two a warp
constexpr int FLAG_AT = CARRIED_AT + 2 * WARPS * CARRIED;
static_assert(FLAG_AT + 4 == SHARED_BYTES, "as in plan.py");

constexpr int COLUMNS = NEWEST > 0 ? NEWEST : 1;  // to divide by
constexpr int WINDOW_ROWS = HEADS * QUERY_TAPS, WEIGHTS = WINDOW_ROWS * KEY_TAPS;
constexpr int WINDOW_CHUNKS = (WINDOW_ROWS + NEWEST) * CHUNKS;
// Chunks, and weights, that a thread reads before the first keys; the others follow them.
constexpr int EARLY_CHUNKS = WINDOW_CHUNKS > 7 * THREADS ? 8 : (WINDOW_CHUNKS + THREADS - 1) / THREADS;
constexpr int EARLY_WEIGHTS = WEIGHTS > 7 * THREADS ? 8 : (WEIGHTS + THREADS - 1) / THREADS;

DEVICE bool reads_newest(const Segment& segment) {
    return NEWEST > 0 && segment.stop - PAD + KEY_TAPS - 1 > segment.length - NEWEST;
}

DEVICE float dot(uint32_t a, uint32_t b) {
    return to_float(ELEMENT{(uint16_t)a}) * to_float(ELEMENT{(uint16_t)b}) +
           to_float(ELEMENT{(uint16_t)(a >> 16)}) * to_float(ELEMENT{(uint16_t)(b >> 16)});
}

// The last QUERY_TAPS queries of all heads, then the newest keys, the last one first, and the weights: in flight from
// global memory to `scratch`.
struct Window {
    uint4 chunks[EARLY_CHUNKS];
    float weights[EARLY_WEIGHTS];
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
        for (int i = 0; i < EARLY_CHUNKS; i++) chunks[i] = chunk(args, segment, cache, thread + i * THREADS);
#pragma unroll
        for (int i = 0; i < EARLY_WEIGHTS; i++) weights[i] = weight(args, query_head, thread + i * THREADS);
    }
    DEVICE void store(const Arguments& args, const Segment& segment, const Cache& cache, int first_head,
                      uint32_t scratch) const {
        const int thread = thread_index();
#pragma unroll
        for (int i = 0; i < EARLY_CHUNKS; i++) {
            const int at = thread + i * THREADS;
            if (at < WINDOW_CHUNKS) store_shared(scratch + at / CHUNKS * PITCH + at % CHUNKS * 16, chunks[i]);
        }
#pragma unroll
        for (int i = 0; i < EARLY_WEIGHTS; i++) {
            const int at = thread + i * THREADS;
            if (at < WEIGHTS) store_shared(scratch + WEIGHT + at * 4, weights[i]);
        }
#pragma unroll 1
        for (int at = thread + EARLY_CHUNKS * THREADS; at < WINDOW_CHUNKS; at += THREADS)
            store_shared(scratch + at / CHUNKS * PITCH + at % CHUNKS * 16, chunk(args, segment, cache, at));
#pragma unroll 1
        for (int at = thread + EARLY_WEIGHTS * THREADS; at < WEIGHTS; at += THREADS)
            store_shared(scratch + WEIGHT + at * 4, weight(args, segment.kv_head * args.group + first_head, at));
    }
};

DEVICE float of_head(const float (&numbers)[HEADS], int head) {  // without an array in memory
    float number = numbers[0];
#pragma unroll
    for (int i = 1; i < HEADS; i++)
        if (head == i) number = numbers[i];
    return number;
}

// In these units no sum of taps times queries exceeds the queries, as with `fold_unit` of Triton's kernels.
// A lane has a key tap.
DEVICE void find_units(const Arguments& args, uint32_t weights, float (&units)[HEADS]) {
    const int lane = thread_index() % 32;
#pragma unroll
    for (int head = 0; head < HEADS; head++) {
        float taps = 0;
#pragma unroll
        for (int tap = 0; tap < QUERY_TAPS; tap++)
            if (lane < KEY_TAPS)
                taps += fabsf(load_shared_float(weights + ((head * QUERY_TAPS + tap) * KEY_TAPS + lane) * 4));
        taps = __uint_as_float(__reduce_max_sync(~0u, __float_as_uint(taps)));
        const float bound = fmaxf(taps, 0x1p-40f) * fabsf(args.factor);
        units[head] = __uint_as_float((__float_as_uint(fminf(fmaxf(bound, 0x1p-100f), 0x1p120f)) & 0x7F800000) + (1 << 23));
    }
}

// Folds the taps; and the newest keys' columns of r: [ROWS, NEWEST]. Both are in units of their head.
DEVICE void fold(const Arguments& args, const Segment& segment, uint32_t scratch, uint32_t folded, uint32_t newest,
                 float (&units)[HEADS]) {
    const int thread = thread_index();
    if (IN_UNITS<ELEMENT>) find_units(args, scratch + WEIGHT, units);
#pragma unroll 1
    for (int i = thread; i < HEADS * DEPTH / 2; i += THREADS) {
        const int pair = i % (DEPTH / 2), head = i / (DEPTH / 2);
        const float factor = IN_UNITS<ELEMENT> ? args.factor * inverse_of(of_head(units, head)) : args.factor;
        float low[QUERY_TAPS], high[QUERY_TAPS];
#pragma unroll
        for (int tap = 0; tap < QUERY_TAPS; tap++) {
            const uint32_t numbers = load_shared(scratch + (head * QUERY_TAPS + tap) * PITCH + pair * 4);
            low[tap] = to_float(ELEMENT{(uint16_t)numbers}) * factor;
            high[tap] = to_float(ELEMENT{(uint16_t)(numbers >> 16)}) * factor;
        }
        const uint32_t weights = scratch + WEIGHT + head * QUERY_TAPS * KEY_TAPS * 4;
        const uint32_t to = folded + head * PITCH + pair * 4;
#pragma unroll 4
        for (int key_tap = 0; key_tap < KEY_TAPS; key_tap++) {
            float low_sum = 0, high_sum = 0;
#pragma unroll
            for (int tap = 0; tap < QUERY_TAPS; tap++) {
                const float weight = load_shared_float(weights + (tap * KEY_TAPS + key_tap) * 4);
                low_sum += weight * low[tap], high_sum += weight * high[tap];
            }
            store_shared(to + key_tap * HEADS * PITCH, pack<ELEMENT>(low_sum, high_sum));
        }
    }
    if (reads_newest(segment)) {
        // Four lanes compute a product of a query and a key. A query sees the key if it is not older.
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
            const int back = i % COLUMNS, row = i / COLUMNS, key_tap = row / HEADS, head = row % HEADS;
            float sum = 0;
#pragma unroll
            for (int tap = 0; tap < QUERY_TAPS; tap++) {
                const int window_row = head * QUERY_TAPS + tap;
                sum += load_shared_float(scratch + WEIGHT + (window_row * KEY_TAPS + key_tap) * 4) *
                       load_shared_float(scratch + NEWEST_SCORES + (window_row * NEWEST + back) * 4);
            }
            store_shared(newest + i * 4, IN_UNITS<ELEMENT> ? sum * inverse_of(of_head(units, head)) : sum);
        }
    }
}
