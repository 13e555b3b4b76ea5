// What decode.cu is given, and what is where in shared memory.
#pragma once
#include <sm80_decode.cuh>
#include "work.cuh"

constexpr int THREADS = 32 * WARPS;
constexpr int KEYS = 32;                            // of a warp's tile: a lane each where there is one head
constexpr int DEPTH = (HEAD_DIM + 15) / 16 * 16;    // products are 16 deep
constexpr int CHUNKS = DEPTH / 8;                   // 16 bytes
constexpr int PITCH = (CHUNKS + 1) * 16;            // of a row in shared memory: odd chunks, so no bank conflicts
constexpr int ALL_HEADS = HEADS * PASSES;
constexpr int ROWS = HEADS * KEY_TAPS;              // of folded queries, a pass
constexpr int ROW_TILES = (ROWS + 7) / 8, ROW_PAIRS = (ROW_TILES + 1) / 2;
constexpr int CHUNKS_AT_ONCE = CHUNKS <= 16 ? CHUNKS : 8;   // whose addresses fit into the registers
constexpr int PAIRS_AT_ONCE = PASSES == 1 && DEPTH <= 128 && ROW_PAIRS <= 6 ? ROW_PAIRS : 3;  // else registers spill
constexpr int NEWEST = QUERY_TAPS - 1;              // keys that some queries of the window do not see
constexpr bool IN_REGISTERS = PASSES * ROW_PAIRS * DEPTH / 16 * 4 <= 64;  // the folded queries

// A lane has the scores of one head, for the keys x = first + LANES i.
constexpr int HEADS_2 = HEADS > 4 ? 8 : HEADS > 2 ? 4 : HEADS;
constexpr int LANES = 32 / HEADS_2, KEYS_A_LANE = HEADS_2;
constexpr int CARRIES = (KEY_TAPS - 1 + LANES - 1) / LANES;
static_assert(HEADS <= 8 && KEY_TAPS <= KEYS && CARRIES <= KEYS_A_LANE, "a tile carries on into the next one alone");

// Shared memory, in bytes from its start.
constexpr int larger(int a, int b) { return a > b ? a : b; }
constexpr int TILE = KEYS * PITCH, STAGE = 2 * TILE, RING = STAGES * STAGE;  // of a warp: keys, then values
constexpr int FOLDED_AT = WARPS * RING, FOLDED = ROW_PAIRS * 16 * PITCH;
constexpr int SCRATCH_AT = FOLDED_AT + PASSES * FOLDED;
// Of a warp, in the loop: r of one pass, and its probabilities. Then its part of out.
constexpr int R_PITCH = (KEYS + 4) * 4, P_PITCH = KEYS * 2 + 16;
constexpr int PROBABILITIES = larger(ROW_PAIRS * 16 * R_PITCH, HEADS * DEPTH * 4);
constexpr int SCRATCH = PROBABILITIES + 8 * P_PITCH;
// Of all, before the loop: the window, the newest keys, the weight and the newest keys' scores of one pass.
constexpr int WEIGHT = (HEADS * QUERY_TAPS + NEWEST) * PITCH;
constexpr int NEWEST_SCORES = WEIGHT + HEADS * QUERY_TAPS * KEY_TAPS * 4;
constexpr int PREPARATION = NEWEST_SCORES + HEADS * QUERY_TAPS * NEWEST * 4;
constexpr int NEWEST_AT = SCRATCH_AT + (larger(WARPS * SCRATCH, PREPARATION) + 15) / 16 * 16;
constexpr int STATISTICS_AT = NEWEST_AT + PASSES * ROWS * NEWEST * 4;  // maximum and sum
constexpr int FLAG_AT = STATISTICS_AT + WARPS * HEADS * 8;
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
