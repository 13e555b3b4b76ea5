// The arguments of the decode kernels, and tiles of keys in shared memory.
#pragma once
#include <sm80_decode.cuh>
#include "work.cuh"

constexpr int THREADS = 32 * WARPS;
constexpr int TEAMS = WARPS / SHARING;              // warps of a team share tiles, and have HEADS query heads each
constexpr int ALL_HEADS = HEADS * SHARING;
constexpr int DEPTH = (HEAD_DIM + 15) / 16 * 16;    // products are 16 deep
constexpr int STEPS = DEPTH / 16, CHUNKS = DEPTH / 8;  // a chunk is 16 bytes
constexpr int Q_PITCH = (CHUNKS + 1) * 16;          // of a row of the window
constexpr int KEYS = 8 * BLOCK;                     // of a tile
constexpr int TAIL = KEY_TAPS - 1;  // scores after a tile's own that its columns add to
constexpr int NEWEST = QUERY_TAPS - 1;              // keys that some queries of the window do not see
constexpr int larger(int a, int b) { return a > b ? a : b; }

// The online softmax, in powers of two.
constexpr float LEAST = -3.402823466e38f;  // subtracted from scores while there are none
constexpr float MOST = 8;  // probabilities are up to 2^8: the subtracted maximum may lag by that much

// In fp16, folded queries and their products are in units of their head, which are powers of two.
template <class Element> constexpr bool IN_UNITS = false;
template <> constexpr bool IN_UNITS<Half> = true;
DEVICE float inverse_of(float unit) { return __uint_as_float((254u << 23) - __float_as_uint(unit)); }

// Eight rows that one load reads must cover all banks: neighbours with few heads, a row of each block with many.
constexpr int PITCH = (CHUNKS + FEW_HEADS) * 16, BLOCK_BYTES = BLOCK * PITCH + (FEW_HEADS ? 0 : 16);
constexpr int TILE = 8 * BLOCK_BYTES, RING = STAGES * TILE;  // of a team: a ring of keys, then one of values
DEVICE uint32_t place(int row, int chunk) { return row / BLOCK * BLOCK_BYTES + row % BLOCK * PITCH + chunk * 16; }

constexpr int OUT_PITCH = (DEPTH + 4) * 4, SCRATCH_OUT = HEADS * OUT_PITCH;  // of a warp: its part of out

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
    int* arrived;        // [B, Hkv, HEAD_BLOCKS], zeros before and after; none if merge.cu follows
};
