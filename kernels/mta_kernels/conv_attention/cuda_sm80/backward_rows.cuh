// The blocks of the backward that compute rows: p and ds to scratch, and the weight's gradient.
#pragma once
#include "backward_weight.cuh"
#include "taps.cuh"

struct RowScales {
    float unit;  // the factor of c
    float factor[ROW_TILES][2], reference[ROW_TILES][2], delta[ROW_TILES][2];  // factor: of dc
};

// p, and dc in `dp`, which holds grad_out v^T.
DEVICE void softmax_backward(const Columns& c, Columns& dp, const RowScales& of, Numbers& p) {
#pragma unroll
    for (int e = 0; e < ROW_TILES; e++)
#pragma unroll
        for (int i = 0; i < CHUNK / 2; i += 2) {
            const int h = i / 2 % 2;
            const float first = exp2_fast(fmaf(c[e][i], of.unit, -of.reference[e][h]));
            const float second = exp2_fast(fmaf(c[e][i + 1], of.unit, -of.reference[e][h]));
            p[e][i / 2] = pack<ELEMENT>(first, second);
            dp[e][i] = first * fmaf(dp[e][i], of.factor[e][h], -of.delta[e][h]);
            dp[e][i + 1] = second * fmaf(dp[e][i + 1], of.factor[e][h], -of.delta[e][h]);
        }
}

// CHUNK columns of the block's rows of p or ds: four lanes write 64 bytes of a row at once.
DEVICE void store_numbers(uint16_t* row_0, int pitch, const RowBlock& block, const WarpRows& rows, const Numbers& numbers) {
#pragma unroll
    for (int e = 0; e < ROW_TILES; e++)
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const int row = rows.row(e, h);
            if (!block.holds(row)) continue;
            uint16_t* const to = row_0 + (int64_t)(row - block.first_row) * pitch + rows.lane() % 4 * 8;
#pragma unroll
            for (int i = 0; i < CHUNK / 32; i++) {
                const uint32_t* const of = numbers[e] + 8 * i + h;
                store_global(to + 32 * i, uint4{of[0], of[2], of[4], of[6]});
            }
        }
}

DEVICE void compute_rows(const Arguments& args, const ChunkOfHead& of, int row_block, uint32_t shared) {
    const RowBlock block(args.at, row_block);
    const int warp = threadIdx.x / 32, group = warp / COLUMN_GROUPS, own_column = warp % COLUMN_GROUPS * COLUMNS;
    const int tile_row = block.first_row - HALO;
    const uint16_t* const keys = row_of(args.inputs.k, of.batch, of.kv_head, 0);
    const uint16_t* const values = row_of(args.inputs.v, of.batch, of.kv_head, 0);
    copy_rows(shared + QUERIES, args.inputs.q, of.batch, of.head, tile_row, args.at.query_rows);
    copy_rows(shared + GRADS, args.grad_out, of.batch, of.head, tile_row, args.at.query_rows);
    clear_rest<HEAD_DIM, DEPTH, THREADS>(shared + QUERIES, TILE_ROWS);
    clear_rest<HEAD_DIM, DEPTH, THREADS>(shared + GRADS, TILE_ROWS);
    clear_rest<HEAD_DIM, DEPTH, THREADS>(shared + KEYS_AT, KEYS);
    clear_rest<HEAD_DIM, DEPTH, THREADS>(shared + VALUES_AT, KEYS);
    copy_tile(shared + KEYS_AT, keys, args.inputs.k, block.first_place, args.at.key_rows);

    RowScales scales;
    scales.unit = write_taps(args.inputs.weight, args.scale_log2, of.head, shared + TAPS);
    const WarpRows rows{args.at, tile_row + group * WARP_ROWS}, ds_rows{args.at, rows.first - HALO};
    struct { int first_row, batch_head, batch, kv_head; } scaled = {block.first_row, of.batch_head, of.batch, of.kv_head};
    const GradScales grad_scales(args, scaled, rows.lane(), scales.unit, min(tile_row + TILE_ROWS, args.at.query_rows));
    if (threadIdx.x == 0) args.ds_unit[of.batch_head] = grad_scales.ds_unit;  // every block of the head writes the same
#pragma unroll
    for (int e = 0; e < ROW_TILES; e++)
#pragma unroll
        for (int h = 0; h < 2; h++) {
            // p and dc are zero where there is no row, where its c is not complete, and where backward_exact.cu computes it.
            const int row = rows.row(e, h);
            const int64_t of_row = out_row(args.at, of.batch_head, row);
            const bool inside = row >= block.first_row && row < args.at.query_rows && !is_exact(args.logsumexp[of_row]);
            scales.reference[e][h] = inside ? args.logsumexp[of_row] * LOG2_E : 1e30f;
            scales.factor[e][h] = SPANS ? document_factor(args, of.batch_head, row) : grad_scales.of_block;
            scales.delta[e][h] = inside ? args.delta[of_row] * scales.factor[e][h] : 0.f;
        }

    Operand queries, grads;
    if (OPERANDS_IN_REGISTERS) {
        copies_wait<0>();
        __syncthreads();
#pragma unroll
        for (int step = 0; step < DEPTH_STEPS; step++) {
            load_operand(queries[OPERANDS_IN_REGISTERS ? step : 0], rows_at(shared + QUERIES, group * WARP_ROWS), step);
            load_operand(grads[OPERANDS_IN_REGISTERS ? step : 0], rows_at(shared + GRADS, group * WARP_ROWS), step);
        }
        __syncthreads();
    }
    for (int i = threadIdx.x; i < (BUFFERS_END - SCORES) / 16; i += THREADS) store_shared(shared + SCORES + i * 16, uint4{0, 0, 0, 0});
    copy_tile(shared + VALUES_AT, values, args.inputs.v, block.first_place - LEFT, args.at.key_rows);

    const int64_t kept = of.in_scratch(args, block.first_row - of.first_row());
    WeightGrads dweight = {};
    const int end_of_c = min(tile_row + TILE_ROWS, args.at.query_rows);
    const float weight_factor =
        SPANS ? least_factor(args, of.batch_head, block.first_row, end_of_c, rows.lane()) : grad_scales.of_block;
    const bool is_mixed = SPANS && keys_begin(args.at, block.first_row) != keys_begin(args.at, end_of_c - 1);
    // The weight's gradient sums dc of several documents: scale dc to the least of their factors.
    const auto level = [&](int e, uint32_t (&dc)[PAIRS][4]) {
        if (!is_mixed) return;
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int row = ds_rows.first + e + ROW_TILES * (rows.lane() % 4 * 2 + 8 * half);
            const float low = weight_factor * document_unit(args, of.batch_head, row);
            const float high = weight_factor * document_unit(args, of.batch_head, row + ROW_TILES);
#pragma unroll
            for (int i = 0; i < 2 * PAIRS; i++) dc[i / 2][i % 2 * 2 + half] = scale_halves(dc[i / 2][i % 2 * 2 + half], low, high);
        }
    };
#pragma unroll 1
    for (int first_key = block.first_place; first_key < block.end_place; first_key += KEYS) {
        const bool is_last = first_key + KEYS == block.end_place;
        copies_wait<1>();
        __syncthreads();  // the keys have come; the scores and dc of the tile before are not read any more
        if (own_column == KEYS - COLUMNS) {
            move_window(shared + SCORES);
            move_window(shared + SCORE_GRADS);
        }
#pragma unroll
        for (int from = 0; from < COLUMNS; from += CHUNK) {
            const int chunk = own_column + from;
            Numbers halves = {};
            if (rows.sees_some(first_key + chunk)) {
                Columns scores = {};
                multiply_rows(scores, queries, rows_at(shared + QUERIES, group * WARP_ROWS), keys_at(shared + KEYS_AT) + chunk * DEPTH * 2);
                rows.mask_scores(scores, first_key + chunk);
                pack_columns<Half>(halves, scores);
#pragma unroll
                for (int e = 0; e < ROW_TILES; e++)
#pragma unroll
                    for (int i = 0; i < CHUNK / 4; i++) halves[e][i] = finite(halves[e][i]);
            }
            store_scores(shared + SCORES, halves, chunk);
        }
        copies_wait<0>();
        __syncthreads();  // the values have come, the scores of all warps are stored; the keys are not read any more
        if (!is_last) copy_tile(shared + KEYS_AT, keys, args.inputs.k, first_key + KEYS, args.at.key_rows);
#pragma unroll
        for (int from = 0; from < COLUMNS; from += CHUNK) {
            const int chunk = own_column + from;
            const int first_column = first_key - LEFT + chunk;
            Numbers p = {}, halves = {};
            if (rows.sees_some(first_column)) {
                Columns c = {}, dc = {};
                convolve(c, scores_at(shared + SCORES) + chunk / 8 * 16, shared + TAPS);
                rows.replace_unseen(c, first_column, MINUS_INFINITY);
                multiply_rows(dc, grads, rows_at(shared + GRADS, group * WARP_ROWS), keys_at(shared + VALUES_AT) + chunk * DEPTH * 2);
                if (SPANS) rows.replace_unseen(dc, first_column, 0);  // another document's may be infinite
                softmax_backward(c, dc, scales, p);
                pack_columns<Half>(halves, dc);
            }
            store_scores(shared + SCORE_GRADS, halves, chunk);
            store_numbers(args.p + kept + first_key + chunk, args.pitch, block, rows, p);
        }
        __syncthreads();  // the dc of all warps are stored; the values are not read any more
        if (!is_last) copy_tile(shared + VALUES_AT, values, args.inputs.v, first_key + KEYS - LEFT, args.at.key_rows);
#pragma unroll
        for (int from = 0; from < COLUMNS; from += CHUNK) {
            const int chunk = own_column + from;
            const int first_column = first_key - LAG + chunk;
            Numbers numbers = {};
            if (ds_rows.sees_some(first_column)) {
                Columns ds = {};
                convolve<true>(ds, scores_at(shared + SCORE_GRADS) + chunk / 8 * 16, shared + TAPS);
                ds_rows.mask_scores(ds, first_column);
                pack_columns<ELEMENT>(numbers, ds, grad_scales.to_ds);
            }
            store_numbers(args.ds + kept + first_key + chunk, args.pitch, block, ds_rows, numbers);
            if (ds_rows.sees_some(first_column - LEFT, CHUNK + LAG))
                add_weight_grads(dweight, shared + SCORES, shared + SCORE_GRADS, chunk, level);
        }
    }
    __syncthreads();
    if (threadIdx.x == 0) rows_are_done(args.chunks, (int)load_shared(shared + WORK), products_of(args));
    float* const sums = args.dweight + ((int64_t)of.batch_head * args.chunks.all_row_blocks + row_block) * (QUERY_TAPS * KEY_TAPS);
    write_weight_grads(dweight, shared, sums, args.scale / weight_factor);
}
