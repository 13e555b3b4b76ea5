// What decode.cu is given, and what is where in shared memory.
#pragma once
#include <sm80_decode.cuh>
#include "work.cuh"

constexpr int THREADS = 32 * WARPS;
constexpr int KEYS = 32;                            // of a warp's tile: a lane each
constexpr int DEPTH = (HEAD_DIM + 15) / 16 * 16;    // products are 16 deep
constexpr int CHUNKS = DEPTH / 8;                   // 16 bytes
constexpr int PITCH = (CHUNKS + 1) * 16;            // of a row in shared memory: odd chunks, so no bank conflicts
constexpr int ALL_HEADS = HEADS * PASSES;
constexpr bool IN_TURN = PASSES == 1;               // warps take tiles so; else each has a part of the keys
constexpr int OUT_TILES = (ALL_HEADS + 7) / 8;      // of heads, for the second product
constexpr int OUT_HEADS = ALL_HEADS < 8 ? ALL_HEADS : 8;
constexpr int ROWS = KEY_TAPS * HEADS;              // of folded queries, a pass: row tap * HEADS + head
constexpr int TAPS_A_TILE = 8 / HEADS;
constexpr int ROW_TILES = (ROWS + 7) / 8, ROW_PAIRS = (ROW_TILES + 1) / 2;
constexpr int MOST_PAIRS = OUT_TILES * DEPTH > 128 ? 2 : 3;  // at once, else registers spill
constexpr int PAIRS_AT_ONCE = ROW_PAIRS < MOST_PAIRS ? ROW_PAIRS : MOST_PAIRS;
constexpr int NEWEST = QUERY_TAPS - 1;              // keys that some queries of the window do not see
static_assert(8 % HEADS == 0 && HEADS <= 4 && KEY_TAPS <= KEYS, "a tile carries on into the next one alone");

// Shared memory, in bytes from its start.
constexpr int larger(int a, int b) { return a > b ? a : b; }
constexpr int TILE = KEYS * PITCH, RING = STAGES * TILE;  // of a warp: a ring of keys, then one of values
constexpr int FOLDED_AT = WARPS * 2 * RING, FOLDED = ROW_PAIRS * 16 * PITCH;
constexpr int SCRATCH_AT = FOLDED_AT + PASSES * FOLDED;
// Of a warp, in the loop: r of one pass, where the column y of a tap b is at y - b of KEYS, so that a score's numbers
// are at one place of all taps; and the probabilities, [OUT_TILES, KEYS, 8 heads]. Then its part of out, 8 heads.
constexpr int R_KEY = HEADS * 4, R_PITCH = KEYS * R_KEY + R_KEY + HEADS * 16;  // of a tap: no bank conflicts
constexpr int OUT_PITCH = (DEPTH + 4) * 4;
constexpr int PROBABILITIES = larger(ROW_TILES * TAPS_A_TILE * R_PITCH, OUT_HEADS * OUT_PITCH);
constexpr int SCRATCH = PROBABILITIES + OUT_TILES * KEYS * 16;
// Of all, before the loop: the window, the newest keys, the weight and the newest keys' scores.
constexpr int WEIGHT = (ALL_HEADS * QUERY_TAPS + NEWEST) * PITCH;
constexpr int NEWEST_SCORES = WEIGHT + ALL_HEADS * QUERY_TAPS * KEY_TAPS * 4;
constexpr int PREPARATION = NEWEST_SCORES + ALL_HEADS * QUERY_TAPS * NEWEST * 4;
constexpr int NEWEST_AT = SCRATCH_AT + (larger(WARPS * SCRATCH, PREPARATION) + 15) / 16 * 16;
constexpr int STATISTICS_AT = NEWEST_AT + (PASSES * ROWS * NEWEST + 1) / 2 * 8;  // maximum and sum
constexpr int CARRIED_AT = (STATISTICS_AT + WARPS * ALL_HEADS * 8 + 15) / 16 * 16;
constexpr int CARRIED = KEY_TAPS * R_KEY;  // of a tile: what its columns add to the next tile's first scores; two a warp
constexpr int FLAG_AT = IN_TURN ? CARRIED_AT + 2 * WARPS * CARRIED : STATISTICS_AT + WARPS * ALL_HEADS * 8;
static_assert(FLAG_AT + 4 == SHARED_BYTES, "as in plan.py");

struct Rows {  // [B, heads, rows, numbers], or of pages in place of sequences; strides in bytes
    const char* start;
    int64_t stride_batch, stride_head, stride_row, stride_number;
};
struct Weight {  // [Hq, QUERY_TAPS, KEY_TAPS], float32 or as q
    const void* start;
    int64_t stride_head, stride_query, stride_key;
    int is_float;
};
struct Arguments {
    Rows q, k, v;
    Weight weight;
    int window;  // rows of q
    const int* table;  // [B, pages of a sequence]
    int64_t table_stride_batch, table_stride_page;
    int page_bits;
    Lengths lengths;
    int group;             // query heads of a KV head
    int programs, splits;  // each HEAD_BLOCKS times, for ALL_HEADS query heads of a KV head each
    float factor;
    uint16_t* out;       // [B, Hq, HEAD_DIM]
    float* parts;        // [2 programs, ALL_HEADS, DEPTH]: a program's first head, if others began it, and its last
    float2* statistics;  // [2 programs, ALL_HEADS]
    int* arrived;        // [B, Hkv, HEAD_BLOCKS], zeros before and after
};
