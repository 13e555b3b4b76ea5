// Constants of the forward, its shared memory, and what the host passes.
#pragma once
#include <exact.cuh>
#include <tiles.cuh>
#include <pipeline.cuh>

constexpr int VALUE_SLABS = (VALUE_DIM + 63) / 64;
// k16 steps of the queries that a thread keeps in registers as A fragments. Three consumers have room for one.
constexpr int STEPS_IN_REGISTERS = WARPGROUPS == 3 ? 1 : HEAD_DIM <= 128 ? DEPTH_STEPS : 0;
constexpr bool QUERIES_IN_REGISTERS = STEPS_IN_REGISTERS == DEPTH_STEPS;
// Two consumers alternate: one convolves while the other runs its softmax. Three are slower with it.
constexpr bool PINGPONG = WARPGROUPS == 2;
// Consumer 0 stores its last scores as consumer 1's halo rows, so that consumer 1 computes none.
constexpr bool SHARED_HALO = PINGPONG && HALO > 0;
constexpr int WARPGROUP_STRIDE = SHARED_HALO ? ROWS : ROWS - HALO;  // rows from a consumer's first to the next one's
constexpr int BLOCK_ROWS = (WARPGROUPS - 1) * WARPGROUP_STRIDE + ROWS - HALO;
constexpr int CONSUMER_REGISTERS = WARPGROUPS == 3 ? 160 : 240, PRODUCER_REGISTERS = WARPGROUPS == 3 ? 32 : 24;
constexpr int SLOTS = 2;           // work tiles in flight: the current one and the next
constexpr int PREFETCH_TILES = 6;  // key tiles before its end at which a block requests its next work tile
// Three consumers read their queries from shared memory until a work tile ends, so that the next ones need a slot of their own.
constexpr int QUERY_SLOTS = WARPGROUPS == 3 ? SLOTS : 1;
static_assert(VALUE_DIM % 8 == 0 && VALUE_DIM <= 128, "accumulators must fit the registers");

// Shared memory, in bytes from its start.
constexpr int PITCH = (8 + ROWS) * 16;  // 8 columns of scores: 16 bytes a row, below eight rows of zeros
constexpr int QUERIES = 0;
constexpr int QUERY_BYTES = WARPGROUPS * SLABS * SLAB;
constexpr int KEYS_AT = QUERIES + QUERY_SLOTS * QUERY_BYTES;
constexpr int VALUES = KEYS_AT + STAGES * SLABS * SLAB;
constexpr int SCORES = VALUES + STAGES * VALUE_SLABS * SLAB;
constexpr int SCORE_TILE = 8 * PITCH;
constexpr int TAPS = SCORES + 2 * WARPGROUPS * SCORE_TILE;
constexpr int BARRIERS = TAPS + SLOTS * QUERY_TAPS * TAP;
constexpr int WORK_TILES = BARRIERS + (2 * STAGES + 8) * 8;
constexpr int WORK_TILE = 48;  // bytes of a slot: a work tile, and the factor of its c
static_assert(WORK_TILES + SLOTS * WORK_TILE <= 227 * 1024, "shared memory of a block");

struct Arguments {
    Positions at;
    const uint16_t* taps;       // [Hq, QUERY_TAPS, 512] fp16: T of each tap as wgmma reads it; weights over a power of two
    const float* weight_scale;  // [Hq]: |scale| * log2(e) * that power; T has the sign
    uint16_t* out;              // [B, Hq, M, HEAD_DIM]
    float* logsumexp;           // [B, Hq, M], natural units
    int* tile_counter;          // work tiles that blocks took after their first
    int row_blocks, work_tiles, blocks;
    int heads_in_l2;  // heads that are scheduled together, the longest work tiles first
    Inputs inputs;    // for rows that are computed again
};

// Shared memory of one block: its pipeline, and the mbarriers of the two slots of work tiles.
struct Block {
    uint32_t shared;
    Pipeline<STAGES> pipeline;
    uint32_t prefetch;                             // the producer requests the next work tile of the query loader
    uint32_t tile_full, queries_full, tile_empty;  // a slot each; queries_full also counts the bytes of T
    uint32_t queries_empty;

    DEVICE explicit Block(uint32_t shared) : shared(shared), pipeline(shared + BARRIERS) {
        prefetch = pipeline.empty + 8 * STAGES;
        tile_full = prefetch + 8, queries_full = tile_full + 16, tile_empty = queries_full + 16;
        queries_empty = tile_empty + 16;
    }

    // By one thread, before the block's first __syncthreads.
    DEVICE void init_barriers() const {
        pipeline.init(WARPGROUPS);
        barrier_init(prefetch, 1);
        for (int slot = 0; slot < 2; slot++) {
            barrier_init(tile_full + 8 * slot, 1);
            barrier_init(queries_full + 8 * slot, 1);
            barrier_init(tile_empty + 8 * slot, WARPGROUPS);
        }
        barrier_init(queries_empty, WARPGROUPS);
        barrier_init_done();
    }

    // By all threads: the eight rows of zeros above each buffer of scores.
    DEVICE void clear_rows_above() const {
        for (int i = threadIdx.x; i < 2 * WARPGROUPS * 8 * 32; i += blockDim.x)
            store_shared(shared + SCORES + i / 32 * PITCH + i % 32 * 4, 0u);
        fence_async_proxy();
    }
};

// The addresses of a thread's part of what its warp group shares.
struct ConsumerThread {
    int warpgroup, thread, lane, local_row, column;
    uint32_t queries_at;
    uint64_t first_queries, first_keys, first_values, score_tiles, first_taps;
    int matrix_row;     // the row of an 8 x 8 matrix that this lane addresses for ldmatrix and stmatrix
    uint32_t store_at;  // of scores
    bool stores_halo;   // the last eight rows of this warp are the next warp group's halo
    uint32_t halo_at;

    DEVICE ConsumerThread(const Block& block, int warpgroup, int thread) : warpgroup(warpgroup), thread(thread) {
        lane = thread % 32, local_row = thread / 32 * 16 + lane / 4, column = lane % 4 * 2;
        const uint32_t shared = block.shared, scores_at = shared + SCORES + 2 * warpgroup * SCORE_TILE;
        queries_at = shared + QUERIES + warpgroup * SLABS * SLAB;
        first_queries = operand(queries_at, 16, 1024, SWIZZLE_128);
        first_keys = moved(operand(shared + KEYS_AT, 16, 1024, SWIZZLE_128), 0);
        first_values = moved(operand(shared + VALUES, SLAB, 1024, SWIZZLE_128), 0);
        score_tiles = moved(operand(scores_at, PITCH, 128, NO_SWIZZLE), 0);
        first_taps = operand(shared + TAPS, 512, 128, NO_SWIZZLE);
        matrix_row = thread / 32 * 16 + lane % 16;
        store_at = scores_at + (8 + matrix_row) * 16 + lane / 16 * PITCH;
        stores_halo = SHARED_HALO && warpgroup == 0 && __shfl_sync(~0u, thread / 32, 0) == 3;
        halo_at = scores_at + 2 * SCORE_TILE + lane / 8 * PITCH + lane % 8 * 16;
    }
};
