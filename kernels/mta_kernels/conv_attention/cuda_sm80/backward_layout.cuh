// Constants of the backward, its shared memory, and what the host passes.
#pragma once
#include <backward_scale.cuh>
#include <exact.cuh>

constexpr int ABOVE = 16;  // the weight's gradient reads scores from up to 2 HALO + 1 rows higher
#include "geometry.cuh"

constexpr int LEFT_BACK = 8 * LEFT_EIGHTS;  // columns of ds left of a block of dc
constexpr int LAG = LEFT + LEFT_BACK;       // columns by which ds's tiles begin before the score tiles
constexpr int BLOCK_ROWS = TILE_ROWS - 2 * HALO;
constexpr int COLUMNS = KEYS / COLUMN_GROUPS;  // of a tile, that a warp computes
static_assert(ROW_TILES == 2, "32 rows a warp");
static_assert(HEAD_DIM <= 256, "accumulators must fit the registers");
static_assert(CHUNK % 32 == 0, "four lanes store 32 numbers of a row");

// Two taps and eight columns of scores are the rows of a product that gives the weight's gradient.
constexpr int TAP_PAIRS = (QUERY_TAPS + 1) / 2, WEIGHT_NUMBERS = TAP_PAIRS * 2 * 8 * 8 * EIGHTS;

// Products: a warp computes 64 places (or rows of dq) of PART_STEPS times 16 columns, PRODUCT_DEPTH rows (or places) at a time.
constexpr int PARTS = HEAD_DIM > 128 ? 4 : HEAD_DIM > 64 ? 2 : 1, PART_STEPS = (DEPTH_STEPS + PARTS - 1) / PARTS;
constexpr int PLACES = 64 * WARPS / PARTS, PRODUCT_DEPTH = HEAD_DIM > 64 ? 64 : 32;
static_assert(WARPS % PARTS == 0, "a warp has one part");
constexpr int LEFT_BYTES = PRODUCT_DEPTH * PLACES * 2, PRODUCT_STAGE = LEFT_BYTES + PRODUCT_DEPTH * DEPTH * 2;
#include <backward_scheduler.cuh>

// Shared memory, in bytes from its start. Scores and dc take the place of rows that are in registers.
constexpr int QUERIES = 0, GRADS = QUERY_BYTES, SCORES = OPERANDS_IN_REGISTERS ? 0 : 2 * QUERY_BYTES;
constexpr int SCORE_GRADS = SCORES + aligned(SCORE_BYTES);
constexpr int BUFFERS_END = SCORE_GRADS + aligned(SCORE_BYTES);
constexpr int KEYS_AT = BUFFERS_END > 2 * QUERY_BYTES ? BUFFERS_END : 2 * QUERY_BYTES;
constexpr int VALUES_AT = KEYS_AT + TILE_BYTES, TAPS = VALUES_AT + TILE_BYTES, ROWS_END = TAPS + TAP_BYTES;
static_assert(WARPS * WEIGHT_NUMBERS * 4 <= ROWS_END, "sums of the weight's gradient take the place of all else");
constexpr int WORK = SHARED_BYTES - 16;  // the block's work tile
static_assert(ROWS_END <= WORK && 2 * PRODUCT_STAGE <= WORK, "as in backward.py");
constexpr int PRODUCT_STAGES = WORK / PRODUCT_STAGE < 4 ? WORK / PRODUCT_STAGE : 4;

struct Arguments {
    Positions at;
    Inputs inputs;
    Rows grad_out;
    const float *value_norms, *grad_norms;  // [B * heads, NORM_PARTS]: maxima of squared norms; see `document_factor`
    const float *logsumexp, *delta;         // [B, Hq, M]
    uint16_t *p, *ds;                       // [slots, chunk_rows, pitch], in the order in which threads hold them
    float* ds_unit;                         // [B * Hq]: the factor of ds, with SPANS over its document's factor
    float *dk, *dv;                         // [B * Hq, N, HEAD_DIM]
    const int* seen_by;                     // [2, blocks of ALIGNED keys] or null: the rows that see a block, first and one past last
    uint16_t* dq;                           // [B, Hq, M, HEAD_DIM]
    float* dweight;                         // [B * Hq, all row blocks, QUERY_TAPS * KEY_TAPS], sums of rows
    float scale, scale_log2;
    int chunk_rows, pitch;
    Chunks chunks;
};
constexpr int ALIGNED = 128;

// Blocks of products of a chunk, in this order: of p, of ds, and of rows.
struct ProductCounts {
    int keys, of_values, of_keys, of_queries;

    DEVICE ProductCounts(const Arguments& args, int chunk) {
        keys = chunk_keys<BLOCK_ROWS>(args.chunks, args.at, chunk);
        of_values = place_blocks(keys, LEFT), of_keys = place_blocks(keys, LAG);
        const int rows = min(args.chunk_rows, args.at.query_rows - chunk * args.chunk_rows);
        of_queries = (rows + PLACES - 1) / PLACES;
    }
    DEVICE int all() const { return of_values + of_keys + of_queries; }
};
DEVICE auto products_of(const Arguments& args) {
    return [&](int chunk) { return ProductCounts(args, chunk).all(); };
}

// The head of a work tile, its part of the scratch and its chunk of rows.
struct ChunkOfHead {
    int batch_head, head, batch, kv_head, slot, first_row_block;

    DEVICE ChunkOfHead(const Arguments& args, const WorkTile& work) {
        batch_head = work.stage % args.chunks.batch_heads, slot = work.stage % args.chunks.slots;
        head = batch_head % args.at.heads, batch = batch_head / args.at.heads, kv_head = head / args.at.group;
        first_row_block = work.chunk * args.chunks.row_blocks;
    }
    DEVICE int first_row() const { return first_row_block * BLOCK_ROWS; }
    // Where a row of the chunk begins in the scratch.
    DEVICE int64_t in_scratch(const Arguments& args, int row_of_chunk) const {
        return ((int64_t)slot * args.chunk_rows + row_of_chunk) * args.pitch;
    }
};

// BLOCK_ROWS rows of a head, and the tiles of keys for which they have p and ds.
struct RowBlock {
    int first_row, end_row, first_place, end_place;

    DEVICE RowBlock(const Positions& at, int row_block) {
        first_row = row_block * BLOCK_ROWS, end_row = min(first_row + BLOCK_ROWS, at.query_rows);
        first_place = keys_begin(at, first_row) / KEYS * KEYS;
        end_place = max((keys_end(at, end_row - 1) + LAG + KEYS - 1) / KEYS * KEYS, first_place + KEYS);
    }
    DEVICE bool holds(int row) const { return row >= first_row && row < end_row; }
};
