// The arguments of logits.cu, the distribution of its work, and the layout of shared memory.
//
// Constants come from the compiler's command line: HEADS up to 16, HEAD_DIM a multiple of 16, BUFFERS of scores. A cluster has
// TILES tiles of 64 rows, all of which take the same keys, and SPLIT blocks a tile, each with its part of the heads' queries.
#pragma once
#include <mix_instructions.cuh>
#include <matrix.cuh>

using Element = Bfloat16;
constexpr int TILE_ROWS = 64, CLUSTER_ROWS = TILES * TILE_ROWS, BLOCK_KEYS = 64, STEP_KEYS = 32;
constexpr int SCORE_GROUPS = 2, MIX_WARPS = 4;  // warp groups that multiply, and warps that mix
constexpr int COPY_WARP = 4 * SCORE_GROUPS + MIX_WARPS, THREADS = 32 * (COPY_WARP + 4);
constexpr int SCORE_REGISTERS = SPLIT == 1 ? 184 : 176, MIX_REGISTERS = 120;  // all begin with 128
constexpr int COPY_REGISTERS = 512 - 2 * SCORE_REGISTERS - MIX_REGISTERS;
constexpr int DEPTH_STEPS = HEAD_DIM / 16, SLABS = (HEAD_DIM + 63) / 64;
constexpr int OWN_HEADS = (HEADS + SCORE_GROUPS * SPLIT - 1) / (SCORE_GROUPS * SPLIT);  // of a warp group
constexpr int BLOCK_ROWS = TILE_ROWS / SPLIT, MIX_ROWS = BLOCK_ROWS / MIX_WARPS;  // that a block and a warp mix
constexpr int ROW_GROUPS = BLOCK_ROWS / 16;  // rows that one warp of a warp group multiplies
static_assert(CLUSTER == SPLIT * TILES && TILES <= SCORE_GROUPS, "a block copies for all tiles the keys of one warp group's heads");
static_assert(HEADS <= 16 && HEAD_DIM % 16 == 0 && OWN_HEADS * DEPTH_STEPS <= 32, "queries lie in registers");

// Shared memory, in bytes from its start. A plane has a step's scores of a head: 32 keys of the block's rows. Its size puts
// the same 16 bytes of eight planes into different banks.
// Each warp group has a stage for each of its heads, with keys or with 32 rows of queries.
constexpr int SLAB = STEP_KEYS * 128, STAGE = SLABS * SLAB;
constexpr int PLANE = BLOCK_ROWS * STEP_KEYS * 2 + 16, PLANES = 16 * PLANE;
constexpr int STAGES_AT = 0;
constexpr int STAGES = SCORE_GROUPS * OWN_HEADS;
constexpr int PLANES_AT = STAGES_AT + STAGES * STAGE;
constexpr int REFERENCES_AT = PLANES_AT + BUFFERS * PLANES;  // [BLOCK_ROWS, 8] pairs: heads h and h + 8
constexpr int SUMS_AT = REFERENCES_AT + BLOCK_ROWS * 64;  // the same of sums
constexpr int COME_AT = SUMS_AT + BLOCK_ROWS * 64;              // [SCORE_GROUPS, OWN_HEADS]: a stage is full
constexpr int USED_AT = COME_AT + STAGES * 8;  // the same: it may be filled
constexpr int FULL_AT = USED_AT + STAGES * 8;  // [BUFFERS, ROW_GROUPS]: scores have arrived
constexpr int EMPTY_AT = FULL_AT + BUFFERS * ROW_GROUPS * 8;               // [BUFFERS, 4]: scores may come
constexpr int SHARED_BYTES = EMPTY_AT + BUFFERS * 4 * 8;
static_assert(SHARED_BYTES == BYTES, "as in logits.py");

struct Arguments {
    Matrix pre;            // [out, in]
    uint16_t* kept;        // [B, HEADS, rows, pitch]: exponentials over the row's reference
    float2* parts;         // [most_parts, B, HEADS, rows]: reference and sum of each piece of a row
    float* scales;         // [B, HEADS, rows]: 1 / sum
    float* logsumexp;      // [B, HEADS, rows]
    int64_t sums_batch, sums_head, sums_row;  // its strides
    int64_t pitch;
    float scale;
    int units;             // blocks of keys of all tiles
    int batch, rows, first_row, first_position, keys, causal, group, most_blocks, workers, most_parts;
};

// All blocks of keys of all tiles are distributed evenly over clusters, in order; a tile here is a cluster's rows.

DEVICE int blocks_of(const Arguments& args, int tile) {
    const int seen = (args.first_position + tile * CLUSTER_ROWS + CLUSTER_ROWS - 1) / BLOCK_KEYS + 1;
    return args.causal ? min(seen, args.most_blocks) : args.most_blocks;
}
DEVICE int first_unit(const Arguments& args, int worker) { return (int)((int64_t)worker * args.units / args.workers); }
DEVICE int worker_of(const Arguments& args, int unit) {
    return (int)((((int64_t)unit + 1) * args.workers - 1) / args.units);
}

// A cluster's part of a tile.
struct Piece {
    int unit, stop;      // its first unit, and one past the cluster's last
    int sequence, tile;
    int first, end;      // blocks of keys
    int part;            // pieces of the tile before it

    DEVICE Piece(const Arguments& args, int worker) : unit(first_unit(args, worker)), stop(first_unit(args, worker + 1)) {
        find(args, worker);
    }
    DEVICE bool any() const { return unit < stop; }
    DEVICE void next(const Arguments& args, int worker) {
        unit += end - first;
        if (any()) find(args, worker);
    }
    DEVICE void find(const Arguments& args, int worker) {
        const int of_sequence = args.units / args.batch;
        sequence = unit / of_sequence, tile = 0, first = unit - sequence * of_sequence;
        int blocks = blocks_of(args, 0);
        while (first >= blocks) first -= blocks, blocks = blocks_of(args, ++tile);
        end = min(blocks, first + stop - unit);
        part = worker - worker_of(args, unit - first);
    }
    // All pieces of a row have one reference, from its first keys: a piece without these keys computes them first.
    DEVICE int steps() const { return (end - first) * (BLOCK_KEYS / STEP_KEYS) + (first > 0); }
    DEVICE int key(int step) const {
        return first > 0 ? (step == 0 ? 0 : first * BLOCK_KEYS + (step - 1) * STEP_KEYS) : step * STEP_KEYS;
    }
};

DEVICE int head_of(int i, int group, int part) { return (i * SCORE_GROUPS + group) * SPLIT + part; }
DEVICE bool is_head(int head) { return HEADS % (SCORE_GROUPS * SPLIT) == 0 || head < HEADS; }

// A block's shared memory and its mbarriers.
struct Block {
    uint32_t shared;
    int tile, part, worker;  // its tile of the cluster's, and its part of this tile's heads and rows

    DEVICE Block() : shared(shared_memory()) {
        tile = (int)blockIdx.x % CLUSTER / SPLIT, part = (int)blockIdx.x % SPLIT, worker = (int)blockIdx.x / CLUSTER;
    }
    DEVICE int first_row(const Piece& piece) const { return piece.tile * CLUSTER_ROWS + tile * TILE_ROWS; }
    static DEVICE int rank(int tile, int part) { return tile * SPLIT + part; }  // a block's rank in its cluster
    DEVICE uint16_t of_all_tiles() const {  // one bit a block: the blocks with this part of the heads
        uint16_t blocks = 0;
        for (int i = 0; i < TILES; i++) blocks |= 1 << rank(i, part);
        return blocks;
    }

    DEVICE uint32_t stage(int group, int i) const { return shared + STAGES_AT + (group * OWN_HEADS + i) * STAGE; }
    DEVICE uint32_t come(int group, int i) const { return shared + COME_AT + (group * OWN_HEADS + i) * 8; }
    DEVICE uint32_t used(int group, int i) const { return shared + USED_AT + (group * OWN_HEADS + i) * 8; }
    DEVICE uint32_t planes(int buffer) const { return shared + PLANES_AT + buffer * PLANES; }
    DEVICE uint32_t full(int buffer, int rows) const { return shared + FULL_AT + (buffer * ROW_GROUPS + rows) * 8; }
    DEVICE uint32_t empty(int buffer, int warp) const { return shared + EMPTY_AT + (buffer * 4 + warp) * 8; }

    DEVICE void prepare() const {  // by all threads
        if (threadIdx.x == 0) {
            for (int i = 0; i < STAGES; i++) barrier_init(shared + COME_AT + i * 8, 1), barrier_init(shared + USED_AT + i * 8, 4 * TILES);
            for (int i = 0; i < BUFFERS * ROW_GROUPS; i++) barrier_init(shared + FULL_AT + i * 8, SCORE_GROUPS * SPLIT);
            for (int i = 0; i < BUFFERS * 4; i++) barrier_init(shared + EMPTY_AT + i * 8, 16 / MIX_ROWS);
            barrier_init_done();
        }
        for (int i = threadIdx.x; i < BUFFERS * PLANES / 16; i += THREADS)  // planes past the heads stay zeros
            store_shared(shared + PLANES_AT + i * 16, uint4{0, 0, 0, 0});
        __syncthreads();
#if CLUSTER > 1
        cluster_barrier();
#endif
    }
};
