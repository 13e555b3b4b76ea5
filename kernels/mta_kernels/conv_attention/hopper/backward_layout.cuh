// Constants of the backward, its shared memory, and what the host passes.
#pragma once
#include <pipeline.cuh>
#include <tiles.cuh>

constexpr int PLACES = 256;   // numbers of a scratch row that a block of products reads: 128 a warp group
constexpr int ROW_STEP = 64;  // rows of one of its iterations
#include <backward_scheduler.cuh>

constexpr int TILE_ROWS = WARPGROUPS * ROWS, BLOCK_ROWS = TILE_ROWS - 2 * HALO;
constexpr int LAG = LEFT + LEFT_BACK;
static_assert(WARPGROUPS == 2, "the second has its rows above from the first");
static_assert(HEAD_DIM % 8 == 0 && HEAD_DIM <= 128, "accumulators must fit the registers");

constexpr int CLEARING_WARPS = 2;  // of the producer warp group

// Shared memory of row blocks, in bytes from its start. Products have theirs in the same place.
//
// Scores and dc: 8 columns a slab, 16 bytes a row; the last 16 columns of the tile before, and 64. Above the second
// warpgroup's rows lie the first's last ones, above the first's zeros. The weight's gradient begins HALO rows above, and
// reads scores from seven rows higher.
constexpr int SCORES_ABOVE = 16, GRADS_ABOVE = 8;
static_assert(HALO + 7 <= SCORES_ABOVE && HALO <= GRADS_ABOVE, "rows above");
constexpr int PITCH = (SCORES_ABOVE + ROWS) * 16, GRAD_PITCH = (GRADS_ABOVE + ROWS) * 16;
constexpr int BUFFER = (2 + 8) * PITCH, GRAD_BUFFER = (2 + 8) * GRAD_PITCH;
// The weight gradient's last products of a tile run during the next one, whose scores have a second buffer if it fits.
constexpr int LATE_SLABS = 2, SCORE_BUFFERS = HEAD_DIM <= 64 ? 2 : 1;
constexpr int PRODUCT_STAGE = (PLACES / 64 + SLABS) * SLAB;
constexpr int QUERIES = 0;
constexpr int GRADS = QUERIES + WARPGROUPS * SLABS * SLAB;
constexpr int KEYS_AT = GRADS + WARPGROUPS * SLABS * SLAB;
constexpr int VALUES = KEYS_AT + STAGES * SLABS * SLAB;
constexpr int LATE_KEYS = VALUES + STAGES * SLABS * SLAB;  // the keys of ds's columns
constexpr int SCORES = LATE_KEYS + STAGES * SLABS * SLAB;
constexpr int SCORE_GRADS = SCORES + WARPGROUPS * SCORE_BUFFERS * BUFFER;
constexpr int SCORES_DOWN = SCORE_GRADS + WARPGROUPS * GRAD_BUFFER;  // the first warpgroup's last rows of a tile
constexpr int GRADS_DOWN = SCORES_DOWN + 8 * SCORES_ABOVE * 16;
constexpr int TAPS = GRADS_DOWN + 8 * GRADS_ABOVE * 16;
constexpr int TAPS_BACK = TAPS + QUERY_TAPS * TAP;
constexpr int BARRIERS = TAPS_BACK + QUERY_TAPS * TAP;
constexpr int PRODUCT_STAGES = BARRIERS / PRODUCT_STAGE < 4 ? BARRIERS / PRODUCT_STAGE : 4;  // in the place of the rows'
static_assert(PRODUCT_STAGES >= 2, "products are copied ahead");
constexpr int WORK = BARRIERS + (2 * STAGES + 2 * PRODUCT_STAGES + 12) * 8;  // two work tiles, 16 bytes each
static_assert(WORK + 32 <= 227 * 1024, "shared memory of a block");

// The next tile's scores are computed during this one's softmax if registers hold both them and dq.
constexpr bool SCORES_EARLY = HEAD_DIM <= 64;
// Rows without a shift come from registers, unless the registers that hold a row's span leave none.
constexpr int FIRST_SHIFT = SPANS && HEAD_DIM > 64 ? 0 : 1;
constexpr int ALIGNED = 128;  // rows, and keys, of the blocks that `seen_by` counts

struct Arguments {
    Positions at;
    const uint16_t *taps, *taps_back;  // [Hq, QUERY_TAPS, 512] fp16: T, and T' backwards, weights over a power of two
    const float* weight_scale;         // [Hq]: |scale| * log2(e) * that power; T has the sign
    const float *value_norms, *grad_norms;  // [B * heads, NORM_PARTS]: maxima of squared norms;
                                            // with SPANS see `document_factor`
    const float *logsumexp, *delta;    // [B, Hq, M]
    uint16_t *p, *ds;                  // [slots, pitch / 32, chunk_rows, 32]: tiles of 64 keys, in the order that threads hold
    float* ds_unit;                    // [B * Hq]: the factor of ds, with SPANS over its document's factor
    float *dk, *dv;                    // [B * Hq, N, HEAD_DIM]: sums of the chunks so far
    uint16_t *dk_rounded, *dv_rounded;  // the same shape, or null: for the final sums, except of heads with `exact_rows`
    const int* exact_rows;             // [B * Hq]: whether a head has rows that backward_exact.cu will add
    const int* seen_by;                // [2, blocks of ALIGNED keys] or null: rows that see a block, from a multiple of ALIGNED
                                       // to before another
    uint16_t* dq;                      // [B, Hq, M, HEAD_DIM]
    float* dweight;                    // [B * Hq, all row blocks, WARPGROUPS, QUERY_TAPS * KEY_TAPS], sums of rows
    float scale;
    int chunk_rows, pitch;
    Chunks chunks;
};

// How many blocks of products a chunk has, of p and of ds.
DEVICE auto products_of(const Arguments& args) {
    return [&](int chunk) {
        const int keys = chunk_keys<BLOCK_ROWS>(args.chunks, args.at, chunk);
        return place_blocks(keys, LEFT) + place_blocks(keys, LAG);
    };
}

// Shared memory of a block: its pipelines and its other mbarriers.
struct Block {
    uint32_t shared;
    Pipeline<STAGES> pipeline;
    Pipeline<PRODUCT_STAGES> products;
    uint32_t rows_full, rows_empty;                               // queries, output gradients and taps
    uint32_t scores_full, scores_empty, grads_full, grads_empty;  // the halo rows that warp group 0 hands to 1
    uint32_t work_tiles;                                          // see `PipelineState`

    DEVICE explicit Block(uint32_t shared)
        : shared(shared), pipeline(shared + BARRIERS), products(pipeline.empty + 8 * STAGES) {
        rows_full = products.empty + 8 * PRODUCT_STAGES, rows_empty = rows_full + 8;
        scores_full = rows_empty + 8, scores_empty = scores_full + 8;
        grads_full = scores_empty + 8, grads_empty = grads_full + 8;
        work_tiles = grads_empty + 8;
    }

    // By one thread, before a __syncthreads of the block.
    DEVICE void init_barriers() const {
        pipeline.init(WARPGROUPS), products.init(WARPGROUPS);
        barrier_init(rows_full, 1), barrier_init(rows_empty, 4 * WARPGROUPS);  // by each warp
        barrier_init(scores_full, 32), barrier_init(grads_full, 32);  // by each thread of a warp, for what it wrote
        barrier_init(scores_empty, 1), barrier_init(grads_empty, 8 * GRADS_ABOVE);  // by each thread that read
        for (int stage = 0; stage < 2; stage++) {
            const uint32_t full = work_tiles + 8 * stage, stored = full + 16, reported = stored + 16;
            barrier_init(full, 1), barrier_init(stored, 128 * WARPGROUPS + 32 * CLEARING_WARPS), barrier_init(reported, 1);
        }
    }
};

// A work tile of a block, and the positions of its pipelines, which continue from one work tile to the next.
struct BlockWork : WorkTile {
    int iteration;  // of the pipeline of its kind: how many there were before
    bool odd_rows;  // row blocks before

    DEVICE BlockWork(const WorkTile& tile, int iteration, bool odd_rows)
        : WorkTile(tile), iteration(iteration), odd_rows(odd_rows) {}
};

// Work tiles have a pipeline of two stages, with three mbarriers each. `full` completes a phase when the work tile is
// written, `stored` when all its results are, `reported` when other blocks can read them.
struct PipelineState {
    int number = 0;

    DEVICE int stage() const { return number % 2; }
    DEVICE int phase() const { return number / 2 & 1; }
    DEVICE uint32_t full(const Block& block) const { return block.work_tiles + 8 * stage(); }
    DEVICE uint32_t stored(const Block& block) const { return block.work_tiles + 16 + 8 * stage(); }
    DEVICE uint32_t reported(const Block& block) const { return block.work_tiles + 32 + 8 * stage(); }
    DEVICE uint32_t work(const Block& block) const { return block.shared + WORK + 16 * stage(); }

    DEVICE void write(const Block& block, const BlockWork& tile) const {
        store_shared(work(block), (uint32_t)tile.stage);
        store_shared(work(block) + 4, (uint32_t)tile.part);
        store_shared(work(block) + 8, (uint32_t)tile.iteration);
        store_shared(work(block) + 12, (uint32_t)(tile.of_rows | tile.odd_rows << 1));
        barrier_arrive(full(block));
    }
    DEVICE BlockWork read(const Block& block, const Chunks& chunks) const {
        const auto word = [&](int at) { return (int)load_shared(work(block) + 4 * at); };
        return {{word(0), chunks.chunk_of(word(0)), word(1), (word(3) & 1) != 0}, word(2), (word(3) & 2) != 0};
    }
};

// The head and the chunk of a work tile, and of row blocks the rows.
struct RowBlock {
    int batch_head, head, batch, kv_head, slot;
    int first_row_block;  // of the chunk
    int first_row, end_row, first_tile, end_tile;

    DEVICE RowBlock(const Arguments& args, const WorkTile& work) {
        batch_head = work.stage % args.chunks.batch_heads, slot = work.stage % args.chunks.slots;
        head = batch_head % args.at.heads, batch = batch_head / args.at.heads;
        kv_head = head / args.at.group;
        first_row_block = work.chunk * args.chunks.row_blocks;
        first_row = (first_row_block + work.part) * BLOCK_ROWS;
        end_row = min(first_row + BLOCK_ROWS, args.at.query_rows);
        if (!work.of_rows) return;
        first_tile = keys_begin(args.at, first_row) / KEYS;
        end_tile = max((keys_end(args.at, end_row - 1) + CARRIED + KEYS - 1) / KEYS, first_tile + 1);
    }
    DEVICE bool holds(int row) const { return row >= first_row && row < end_row; }
    // One past the last row whose dc the block computes.
    DEVICE int end_of_c(const Positions& at) const { return min(first_row + TILE_ROWS - HALO, at.query_rows); }
    // Where 32 places of a row begin in the scratch: eight rows of them, which a warp stores at once, follow one another.
    DEVICE int64_t in_scratch(const Arguments& args, int row, int place = 0) const {
        return ((int64_t)slot * args.pitch + place) * args.chunk_rows + (row - first_row_block * BLOCK_ROWS) * 32;
    }
};
