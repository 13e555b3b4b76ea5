// Shared memory of few_heads.cu, and what a segment prepares there before its keys: the folded queries, and the newest
// keys' columns of r.
#pragma once
#include "layout.cuh"

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
constexpr int INNER = 1, QUERY_ROWS = QUERY_TAPS, WINDOW_ROWS = HEADS * QUERY_TAPS, WINDOW_AT = SCRATCH_AT;  // see window.cuh
DEVICE uint32_t weight_place(int i) { return SCRATCH_AT + WEIGHT + i * 4; }

DEVICE bool reads_newest(const Segment& segment) {
    return NEWEST > 0 && segment.stop - PAD + KEY_TAPS - 1 > segment.length - NEWEST;
}

#include "window.cuh"

DEVICE float dot(uint32_t a, uint32_t b) {
    return to_float(ELEMENT{(uint16_t)a}) * to_float(ELEMENT{(uint16_t)b}) +
           to_float(ELEMENT{(uint16_t)(a >> 16)}) * to_float(ELEMENT{(uint16_t)(b >> 16)});
}

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
