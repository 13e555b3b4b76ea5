// Constants of the backward, its shared memory, and what the host passes.
#pragma once
#include <backward_products.cuh>
#include <pipeline.cuh>

constexpr int TILE_ROWS = WARPGROUPS * ROWS, BLOCK_ROWS = TILE_ROWS - 2 * HALO;
constexpr int LAG = LEFT + LEFT_BACK;
static_assert(WARPGROUPS == 2, "the second has its rows above from the first");
static_assert(HEAD_DIM % 8 == 0 && HEAD_DIM <= 128, "accumulators must fit the registers");

// Shared memory, in bytes from its start.
//
// Scores and dc: 8 columns a slab, 16 bytes a row; the last 16 columns of the tile before, and 64. Above the second
// warpgroup's rows lie the first's last ones, above the first's zeros. The weight's gradient begins HALO rows above, and
// reads scores from seven rows higher.
constexpr int SCORES_ABOVE = 16, GRADS_ABOVE = 8;
static_assert(HALO + 7 <= SCORES_ABOVE && HALO <= GRADS_ABOVE, "rows above");
constexpr int PITCH = (SCORES_ABOVE + ROWS) * 16, GRAD_PITCH = (GRADS_ABOVE + ROWS) * 16;
constexpr int BUFFER = (2 + 8) * PITCH, GRAD_BUFFER = (2 + 8) * GRAD_PITCH;
constexpr int QUERIES = 0;
constexpr int GRADS = QUERIES + WARPGROUPS * SLABS * SLAB;
constexpr int KEYS_AT = GRADS + WARPGROUPS * SLABS * SLAB;
constexpr int VALUES = KEYS_AT + STAGES * SLABS * SLAB;
constexpr int LATE_KEYS = VALUES + STAGES * SLABS * SLAB;  // those of ds's columns
constexpr int SCORES = LATE_KEYS + STAGES * SLABS * SLAB;
constexpr int SCORE_GRADS = SCORES + WARPGROUPS * BUFFER;
constexpr int SCORES_DOWN = SCORE_GRADS + WARPGROUPS * GRAD_BUFFER;  // the first warpgroup's last rows of a tile
constexpr int GRADS_DOWN = SCORES_DOWN + 8 * SCORES_ABOVE * 16;
constexpr int TAPS = GRADS_DOWN + 8 * GRADS_ABOVE * 16;
constexpr int TAPS_BACK = TAPS + QUERY_TAPS * TAP;
constexpr int BARRIERS = TAPS_BACK + QUERY_TAPS * TAP;
constexpr int WORK = BARRIERS + (2 * STAGES + 5) * 8;  // its number; then stage and row block, for which registers are short
constexpr int PRODUCT_STAGES = BARRIERS / PRODUCT_STAGE < 4 ? BARRIERS / PRODUCT_STAGE : 4;
static_assert(PRODUCT_STAGES >= 2, "products are copied ahead");
static_assert(2 * PRODUCT_STAGES <= 2 * STAGES + 5, "their barriers take the place of the rows'");
static_assert(WORK + 16 <= 227 * 1024, "shared memory of a block");

// The next tile's scores are computed during this one's softmax where registers hold them beside dq.
constexpr bool SCORES_EARLY = HEAD_DIM <= 64;
// Rows as they are come from registers, but where those that hold a row's span leave none.
constexpr int FIRST_SHIFT = SPANS && HEAD_DIM > 64 ? 0 : 1;
constexpr int ALIGNED = 128;  // rows, and keys, of the blocks that `seen_by` counts

struct Arguments {
    Positions at;
    const uint16_t *taps, *taps_back;  // [Hq, QUERY_TAPS, 512] fp16: T, and T' backwards, weights over a power of two
    const float* weight_scale;         // [Hq]: |scale| * log2(e) * that power; T has the sign
    const float *value_norms, *grad_norms;  // [B * heads, NORM_PARTS]: maxima of squared norms; with MARGINS those of out follow
    const float *logsumexp, *delta;    // [B, Hq, M]
    uint16_t *p, *ds;                  // [slots, chunk_rows, pitch]: tiles of 64 keys, in the order in which threads hold them
    float* ds_unit;                    // [B * Hq]: what ds is to be multiplied by
    float *dk, *dv;                    // [B * Hq, N, HEAD_DIM]: sums of the chunks so far
    uint16_t *dk_rounded, *dv_rounded;  // the same shape, or null: instead of whole sums, but of heads with `exact_rows`
    const int* exact_rows;             // [B * Hq]: whether a head has rows that backward_exact.cu will add
    const int* seen_by;                // [2, blocks of ALIGNED keys] or null: a block is seen by rows from one multiple of ALIGNED
                                       // to before another
    uint16_t* dq;                      // [B, Hq, M, HEAD_DIM]
    float* dweight;                    // [B * Hq, all row blocks, WARPGROUPS, QUERY_TAPS * KEY_TAPS], sums of rows
    float scale;
    int chunk_rows, pitch;
    Chunks chunks;
};

// Shared memory of one block that computes rows: its pipeline and its other mbarriers.
struct Block {
    uint32_t shared;
    Pipeline<STAGES> pipeline;
    uint32_t rows_full;                                       // queries and output gradients
    uint32_t scores_full, scores_empty, grads_full, grads_empty;  // the halo rows that warp group 0 hands to 1

    DEVICE explicit Block(uint32_t shared) : shared(shared), pipeline(shared + BARRIERS) {
        rows_full = pipeline.empty + 8 * STAGES;
        scores_full = rows_full + 8, scores_empty = scores_full + 8;
        grads_full = scores_empty + 8, grads_empty = grads_full + 8;
    }

    // By one thread, before a __syncthreads of the block.
    DEVICE void init_barriers() const {
        pipeline.init(WARPGROUPS);
        barrier_init(rows_full, 1);
        barrier_init(scores_full, 32), barrier_init(grads_full, 32);  // by each thread of a warp, for what it wrote
        barrier_init(scores_empty, 1), barrier_init(grads_empty, 8 * GRADS_ABOVE);  // by each thread that read
    }
};

// The rows of a head that a block computes.
struct RowBlock {
    int batch_head, head, batch, kv_head, slot;
    int first_row_block;  // of the chunk
    int first_row, end_row, first_tile, end_tile;

    DEVICE bool holds(int row) const { return row >= first_row && row < end_row; }
    // Where a row begins in the scratch.
    DEVICE int64_t in_scratch(const Arguments& args, int row) const {
        return ((int64_t)slot * args.chunk_rows + row - first_row_block * BLOCK_ROWS) * args.pitch;
    }
};
