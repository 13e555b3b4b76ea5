// A consumer warp group of the backward: c and dc of 64 rows, ds and dq of the 64 rows that begin HALO earlier.
//
// Arrays of registers are variables of `consume`, not members of one struct with others. The compiler would keep such a struct
// in memory until it has unrolled all loops. A tile's arrays are variables of its loop. As locals of an inlined function they
// would be new in each iteration, and the compiler would recompute other addresses.
#pragma once
#include <backward_epilogue.cuh>
#include <backward_products.cuh>
#include <backward_scale.cuh>
#include <backward_scratch.cuh>
#include <convolution.cuh>

// Products of 64 rows with 64 rows, HEAD_DIM deep: `queries` and `keys` are operands of swizzled tiles.
DEVICE void multiply_rows(float (&scores)[32], uint64_t queries, uint64_t keys) {
#pragma unroll
    for (int step = 0; step < DEPTH_STEPS; step++) {
        const uint64_t on = bytes_on(step / 4 * SLAB + step % 4 * 32);
        Product<32, ELEMENT>::run(scores, queries + on, keys + on, step > 0);
    }
}

// The rows of a consumer thread, and which keys its warp group sees.
struct ConsumerRows {
    int warpgroup, thread, lane, local_row, column;
    int tile_row;                    // the query of local row 0 of scores, c and dc
    int ds_row;                      // the query of local row 0 of ds and dq
    int tile_position, ds_position;  // the same among the keys
    int seen_by_all, end_seen_by_all;

    DEVICE ConsumerRows(const Positions& at, const RowBlock& rows, int warpgroup, int thread)
        : warpgroup(warpgroup), thread(thread) {
        lane = thread % 32, local_row = thread / 32 * 16 + lane / 4, column = lane % 4 * 2;
        tile_row = rows.first_row + warpgroup * ROWS - HALO;
        ds_row = tile_row - HALO;
        tile_position = tile_row + (at.key_rows - at.query_rows);
        ds_position = tile_position - HALO;
        seen_by_all = keys_begin(at, tile_row + ROWS - 1), end_seen_by_all = keys_end(at, tile_row);
    }
};

// The addresses of a consumer thread's part of shared memory.
struct Operands {
    uint32_t scores_at, score_grads_at;
    uint64_t queries, grads, first_keys, first_values, first_late_keys;
    uint64_t scores_by_rows, score_grads_by_rows;
    uint64_t scores_by_columns, score_grads_by_columns;  // of ds's rows: eight row shifts of eight columns of scores, and dc
    uint64_t toeplitz, toeplitz_back;
    uint32_t store_scores_at, store_grads_at;  // behind the first 16 columns of a buffer, as stmatrix addresses rows

    DEVICE Operands(uint32_t shared, int warpgroup, int thread) {
        const int lane = thread % 32;
        const uint32_t queries_at = shared + QUERIES + warpgroup * SLABS * SLAB;
        scores_at = shared + SCORES + warpgroup * SCORE_BUFFERS * BUFFER;
        score_grads_at = shared + SCORE_GRADS + warpgroup * GRAD_BUFFER;
        queries = operand(queries_at, 16, 1024, SWIZZLE_128);
        grads = operand(shared + GRADS + warpgroup * SLABS * SLAB, 16, 1024, SWIZZLE_128);
        first_keys = operand(shared + KEYS_AT, 16, 1024, SWIZZLE_128);
        first_values = operand(shared + VALUES, 16, 1024, SWIZZLE_128);
        first_late_keys = operand(shared + LATE_KEYS, SLAB, 1024, SWIZZLE_128);
        scores_by_rows = operand(scores_at + 2 * PITCH + SCORES_ABOVE * 16, PITCH, 128, NO_SWIZZLE);
        score_grads_by_rows = operand(score_grads_at + 2 * GRAD_PITCH + GRADS_ABOVE * 16, GRAD_PITCH, 128, NO_SWIZZLE);
        scores_by_columns = operand(scores_at + (SCORES_ABOVE - HALO - 7) * 16, 128, 16, NO_SWIZZLE);
        score_grads_by_columns = operand(score_grads_at + (GRADS_ABOVE - HALO) * 16, 128, GRAD_PITCH, NO_SWIZZLE);
        toeplitz = operand(shared + TAPS, 512, 128, NO_SWIZZLE);
        toeplitz_back = operand(shared + TAPS_BACK, 512, 128, NO_SWIZZLE);
        const int named_row = thread / 32 * 16 + lane % 16;
        store_scores_at = scores_at + (2 + lane / 16) * PITCH + (SCORES_ABOVE + named_row) * 16;
        store_grads_at = score_grads_at + (2 + lane / 16) * GRAD_PITCH + (GRADS_ABOVE + named_row) * 16;
    }
};

// Rows of warp group 0 that warp group 1 needs above its own. Their last 16 columns of the tile before, which lies `before` bytes
// on, come to the front.
DEVICE void take_halo(uint32_t from, uint32_t buffer, int before, int rows_above, int pitch, int thread) {
    if (thread >= 8 * rows_above) return;
    const int slab = thread / rows_above;
    const uint32_t to = buffer + (2 + slab) * pitch + thread % rows_above * 16;
    const uint4 numbers = load_shared_16(from + thread * 16);
    if (slab >= 6) store_shared(to - 8 * pitch, load_shared_16(to + before));
    store_shared(to, numbers);
}

// What a consumer thread holds of a tile; `even` and `odd` are sums of a convolution.
struct TileRegisters {
    float even[32], odd[32], dp[32], even_back[32], odd_back[32];
    uint32_t halves[4][4], p[4][4], ds[4][4];
};

// An iteration of the main loop over the tiles of keys.
struct Mainloop {
    const Arguments& args;
    const Block& block;
    const RowBlock& rows;
    const ConsumerRows& own;
    const Operands& at;
    const GradScales& scales;
    const float (&factor)[2];  // the factor of dc
    float unit;        // the factor of c
    int64_t kept_at;   // this thread's first number in scratch
    int first_iteration;  // of the pipeline, if the row block began with tile 0
    int odd_rows;      // an odd number of row blocks came before, each with an iteration more than tiles; + 2 if `is_mixed`
    const float (&reference)[2], (&delta)[2];
    float (&dq)[HEAD_DIM / 2], (&dweight)[12], (&carried)[8], (&carried_back)[8], (&scores)[32];
    uint32_t (&last_scores)[4], (&last_grads)[4];  // the tile before's last 16 columns, which the weight's gradient needs

    // Where a tile's scores are, in bytes from `Operands::scores_at`.
    static DEVICE int scores_buffer(int next) { return next % SCORE_BUFFERS * BUFFER; }

    DEVICE void multiply_keys(int stage) {
        products_begin();
        multiply_rows(scores, at.queries, at.first_keys + bytes_on(stage * SLABS * SLAB));
        products_commit();
    }

    DEVICE void mask_causal(float (&values)[32], int first_key, int position) const {
        if (CAUSAL && first_key + KEYS - 1 > position) {
#pragma unroll
            for (int i = 0; i < 32; i++) {
                const int key = first_key + i / 4 * 8 + own.column + i % 2;
                if (key > position + own.local_row + i / 2 % 2 * 8) values[i] = 0;
            }
        }
    }

    // The last columns of the tile before come to the front.
    static DEVICE void store_columns(uint32_t at, int pitch, const uint32_t (&last)[4], const uint32_t (&halves)[4][4]) {
        store_matrices(at - 2 * pitch, last);
#pragma unroll
        for (int slabs = 0; slabs < 4; slabs++) store_matrices(at + slabs * 2 * pitch, halves[slabs]);
    }

    // Store a tile's scores with their halo rows. `passed`: the parity of the halo's mbarriers.
    DEVICE void store_scores(const uint32_t (&halves)[4][4], int passed, int next) {
        const int buffer = scores_buffer(next), before = scores_buffer(next + 1) - buffer;
        store_columns(at.store_scores_at + buffer, PITCH, last_scores, halves);
        if (own.warpgroup == 0 && own.thread / 32 == 3) {  // the warp with the last 16 rows
            barrier_wait(block.scores_empty, passed ^ 1);
#pragma unroll
            for (int slabs = 0; slabs < 4; slabs++)
                store_matrices(block.shared + SCORES_DOWN + ((slabs * 2 + own.lane / 16) * SCORES_ABOVE + own.lane % 16) * 16,
                               halves[slabs]);
            barrier_arrive(block.scores_full);
        } else if (own.warpgroup == 1) {
            barrier_wait(block.scores_full, passed);
            take_halo(block.shared + SCORES_DOWN, at.scores_at + buffer, before, SCORES_ABOVE, PITCH, own.thread);
        }
        fence_async_proxy();
    }

    DEVICE void store_grads(const uint32_t (&halves)[4][4], int passed) {
        store_columns(at.store_grads_at, GRAD_PITCH, last_grads, halves);
        if (own.warpgroup == 0 && own.thread / 32 == 3) {  // the warp with the last 16 rows
            barrier_wait(block.grads_empty, passed ^ 1);
#pragma unroll
            for (int slab = 0; slab < 8; slab++)  // the last eight rows
                store_shared(block.shared + GRADS_DOWN + slab * GRADS_ABOVE * 16 + own.lane * 4, halves[slab / 2][slab % 2 * 2 + 1]);
            barrier_arrive(block.grads_full);
        } else if (own.warpgroup == 1 && own.thread < 8 * GRADS_ABOVE) {  // a thread that only waits could miss the phase
            barrier_wait(block.grads_full, passed);
            take_halo(block.shared + GRADS_DOWN, at.score_grads_at, 0, GRADS_ABOVE, GRAD_PITCH, own.thread);
            barrier_arrive(block.grads_empty);
        }
        fence_async_proxy();
    }

    // Columns of c that no score of a row's keys reaches are masked, and so is `dp`: another document's may be infinite.
    DEVICE void mask_convolved(float (&c)[32], float (&dp)[32], int first_key) const {
        if (first_key - LEFT < own.seen_by_all || first_key + KEYS - LEFT > own.end_seen_by_all) {
#pragma unroll
            for (int h = 0; h < 2; h++) {
                const int row = own.tile_row + own.local_row + 8 * h;
                const int begin = keys_begin(args.at, row), end = keys_end(args.at, row);
#pragma unroll
                for (int b = 0; b < 16; b++) {
                    const int key = first_key - LEFT + b / 2 * 8 + own.column + b % 2;
                    if (key < begin || key >= end) c[b / 2 * 4 + 2 * h + b % 2] = MINUS_INFINITY;
                    if (SPANS && (key < begin || key >= end)) dp[b / 2 * 4 + 2 * h + b % 2] = 0;
                }
            }
        }
    }

    // c, and `dp` = grad_out v^T of the same 64 columns; `halves` are the scores in fp16.
    DEVICE void convolve_scores(float (&even)[32], float (&odd)[32], float (&dp)[32], uint32_t (&halves)[4][4], int tile) {
        const int next = first_iteration + tile + 1, passed = (next + odd_rows + 1) & 1, next_stage = next % STAGES;
        const int first_key = tile * KEYS;
        const uint64_t of_stage = bytes_on(next_stage * SLABS * SLAB);
#pragma unroll
        for (int i = 0; i < 8; i++) even[i] = carried[i], even[8 + i] = 0;
        mask_causal(scores, first_key, own.tile_position);
#pragma unroll
        for (int i = 0; i < 32; i += 2) halves[i / 8][i / 2 % 4] = finite(pack<Half>(scores[i], scores[i + 1]));
        if constexpr (SCORE_BUFFERS == 1) products_wait<0>();  // late products read the tile before
        store_scores(halves, passed, next);
        const bool next_is_full = block.pipeline.is_full(next);
        warpgroup_barrier(own.warpgroup + 1);
        if (own.warpgroup == 1 && own.thread == 0) barrier_arrive(block.scores_empty);
        if (!next_is_full) block.pipeline.wait(next);
        products_begin();
        multiply_rows(dp, at.grads, at.first_values + of_stage);
        products_commit();
        // After the stores, which was faster than before them: products with A in registers stall their warp.
        if constexpr (FIRST_SHIFT == 1) convolve_own(even, odd, halves, at.toeplitz);
        products_begin();
        convolve_shifted<FIRST_SHIFT>(even, odd, at.scores_by_rows + bytes_on(scores_buffer(next)), PITCH, at.toeplitz);
        products_commit();
        products_wait<0>();
#pragma unroll
        for (int i = 0; i < 4; i++) last_scores[i] = halves[3][i];

        if constexpr (SCORES_EARLY) multiply_keys(next_stage);  // during the softmax; unused after the last tile
#pragma unroll
        for (int i = 8; i < 32; i++) even[i] += odd[i - 8];
#pragma unroll
        for (int i = 0; i < 8; i++) carried[i] = odd[24 + i];
        mask_convolved(even, dp, first_key);
    }

    // p of c, and dc in fp16 in `halves`.
    DEVICE void softmax_backward(const float (&c)[32], const float (&dp)[32], uint32_t (&p)[4][4], uint32_t (&halves)[4][4]) {
#pragma unroll
        for (int i = 0; i < 32; i += 2) {
            const int h = i / 2 % 2;
            const float first = exp2_fast(fmaf(c[i], unit, -reference[h]));
            const float second = exp2_fast(fmaf(c[i + 1], unit, -reference[h]));
            p[i / 8][i / 2 % 4] = pack<ELEMENT>(first, second);
            halves[i / 8][i / 2 % 4] = pack<Half>(first * ((dp[i] - delta[h]) * factor[h]),
                                                  second * ((dp[i + 1] - delta[h]) * factor[h]));
        }
    }

    // The weight's gradient from slabs of the scores' 64 columns before the last 16.
    template <int First, int End> DEVICE void multiply_scores(int next) {
        products_begin();
#pragma unroll
        for (int slab = First; slab < End; slab++)
#pragma unroll
            for (int step = 0; step < ROWS / 16; step++)
                Product<12, Half>::run_transposed(
                    dweight, at.scores_by_columns + bytes_on(scores_buffer(next)) + bytes_on(slab * PITCH + step * 256),
                    at.score_grads_by_columns + bytes_on(slab * GRAD_PITCH + step * 256));
        products_commit();
    }

    // The weight's gradient sums dc of several documents: scale dc to the least of their factors, after ds has read it.
    DEVICE void level_grads(uint32_t (&halves)[4][4]) const {
        products_wait<0>();
        warpgroup_barrier(own.warpgroup + 1);
        const float least = least_factor(args, rows.batch_head, rows.first_row, rows.end_of_c(args.at), own.lane);
        const auto level = [&](int row) { return least * document_unit(args, rows.batch_head, row); };
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const float by = level(own.tile_row + own.local_row + 8 * h);
#pragma unroll
            for (int i = h; i < 16; i += 2) halves[i / 4][i % 4] = scale_halves(halves[i / 4][i % 4], by, by);
        }
#pragma unroll
        for (int slabs = 0; slabs < 4; slabs++) store_matrices(at.store_grads_at + slabs * 2 * GRAD_PITCH, halves[slabs]);
        if (own.warpgroup == 1 && own.thread < 8 * GRADS_ABOVE) {
            const int slab = own.thread / GRADS_ABOVE, row = own.thread % GRADS_ABOVE;
            const uint32_t halo = at.score_grads_at + (2 + slab) * GRAD_PITCH + row * 16;
            const float by = level(own.tile_row - GRADS_ABOVE + row);
            const auto leveled = [by](uint32_t of) { return scale_halves(of, by, by); };
            const uint4 of = load_shared_16(halo);
            store_shared(halo, uint4{leveled(of.x), leveled(of.y), leveled(of.z), leveled(of.w)});
        }
        fence_async_proxy();
        warpgroup_barrier(own.warpgroup + 1);
    }

    // ds of dc in `halves`, the first slabs of the weight's gradient, and the next tile's scores.
    DEVICE void convolve_grads(float (&even)[32], float (&odd)[32], uint32_t (&halves)[4][4], uint32_t (&ds)[4][4],
                               int first_key, int passed, int next) {
#pragma unroll
        for (int i = 0; i < 8; i++) even[i] = carried_back[i], even[8 + i] = 0;
        store_grads(halves, passed);
        warpgroup_barrier(own.warpgroup + 1);
        if constexpr (FIRST_SHIFT == 1) convolve_own(even, odd, halves, at.toeplitz_back);
        products_begin();
        convolve_shifted<FIRST_SHIFT>(even, odd, at.score_grads_by_rows, GRAD_PITCH, at.toeplitz_back);
        products_commit();
        if constexpr (SPANS)
            if (odd_rows & 2) level_grads(halves);
        multiply_scores<0, 8 - LATE_SLABS>(next);
        products_wait<1>();
#pragma unroll
        for (int i = 8; i < 32; i++) even[i] += odd[i - 8];
#pragma unroll
        for (int i = 0; i < 8; i++) carried_back[i] = odd[24 + i];
        mask_causal(even, first_key - LAG, own.ds_position);
#pragma unroll
        for (int i = 0; i < 32; i += 2)
            ds[i / 8][i / 2 % 4] = pack<ELEMENT>(even[i] * scales.to_ds, even[i + 1] * scales.to_ds);
#pragma unroll
        for (int i = 0; i < 4; i++) last_grads[i] = halves[3][i];
        if constexpr (!SCORES_EARLY) multiply_keys(next % STAGES);
    }

    DEVICE void process_tile(int tile, TileRegisters& of) {
        const int next = first_iteration + tile + 1, passed = (next + odd_rows + 1) & 1, next_stage = next % STAGES;
        const int first_key = tile * KEYS;
        const int64_t kept = kept_at + (int64_t)first_key * args.chunk_rows;
        convolve_scores(of.even, of.odd, of.dp, of.halves, tile);
        softmax_backward(of.even, of.dp, of.p, of.halves);
        store_tile(args, rows, args.p + kept, of.p, own.tile_row + own.local_row);

        convolve_grads(of.even_back, of.odd_back, of.halves, of.ds, first_key, passed, next);
        products_begin();
#pragma unroll
        for (int step = 0; step < 4; step++)
            Product<HEAD_DIM / 2, ELEMENT>::run_registers(
                dq, of.ds[step], at.first_late_keys + bytes_on(next_stage * SLABS * SLAB) + bytes_on(step * 16 * 128));
        products_commit();
        multiply_scores<8 - LATE_SLABS, 8>(next);
        store_tile(args, rows, args.ds + kept - HALO * 32, of.ds, own.ds_row + own.local_row);
        products_wait<1>();
        if (own.thread == 0) block.pipeline.release(next);
    }
};

// Zeros where scores and dc will be: columns before the first tile's, and rows above the first warp group's.
DEVICE void clear_buffers(const Operands& at, int warpgroup, int thread) {
    warpgroup_barrier(warpgroup + 1);  // no thread reads the previous row block any more
    for (int i = thread; i < SCORE_BUFFERS * BUFFER / 16; i += 128) store_shared(at.scores_at + 16 * i, uint4{0, 0, 0, 0});
    for (int i = thread; i < GRAD_BUFFER / 16; i += 128) store_shared(at.score_grads_at + 16 * i, uint4{0, 0, 0, 0});
    fence_async_proxy();
    warpgroup_barrier(warpgroup + 1);
}

DEVICE void consume(const Arguments& args, const Block& block, const BlockWork& work, int warpgroup, int thread) {
    const RowBlock rows(args, work);
    const ConsumerRows own(args.at, rows, warpgroup, thread);
    float reference[2], delta[2], factor[2];
#pragma unroll
    for (int h = 0; h < 2; h++) {  // all loads before the first is used
        const int row = min(max(own.tile_row + own.local_row + 8 * h, rows.first_row), args.at.query_rows - 1);
        const int64_t of_row = out_row(args.at, rows.batch_head, row);
        reference[h] = args.logsumexp[of_row], delta[h] = args.delta[of_row];
    }
    const Operands operands(block.shared, warpgroup, thread);
    const int64_t kept_at = rows.in_scratch(args, own.tile_row + own.local_row) + own.lane % 4 * 8;
    float dq[HEAD_DIM / 2], dweight[12], carried[8], carried_back[8], scores[32];
    uint32_t last_scores[4], last_grads[4];
#pragma unroll
    for (int i = 0; i < HEAD_DIM / 2; i++) dq[i] = 0;
#pragma unroll
    for (int i = 0; i < 12; i++) dweight[i] = 0;
#pragma unroll
    for (int i = 0; i < 8; i++) carried[i] = carried_back[i] = 0;
#pragma unroll
    for (int i = 0; i < 4; i++) last_scores[i] = last_grads[i] = 0;

    const float unit = args.weight_scale[rows.head];
    const GradScales scales(args, rows, own.lane, unit, rows.end_of_c(args.at));
    const bool is_mixed = SPANS && keys_begin(args.at, rows.first_row) != keys_begin(args.at, rows.end_of_c(args.at) - 1);
    if (threadIdx.x == 0) args.ds_unit[rows.batch_head] = scales.ds_unit;  // every block of the head writes the same
#pragma unroll
    for (int h = 0; h < 2; h++) {
        // p and dc are zero where there is no row, where its c is not complete, and where backward_exact.cu computes it.
        const int row = own.tile_row + own.local_row + 8 * h;
        const bool inside = row >= rows.first_row && row < args.at.query_rows && !is_exact(reference[h]);
        reference[h] = inside ? reference[h] * LOG2_E : 1e30f;
        delta[h] = inside ? delta[h] : 0.f;
        factor[h] = SPANS ? document_factor(args, rows.batch_head, row) : scales.of_block;
    }
    barrier_wait(block.rows_full, work.odd_rows);
    clear_buffers(operands, warpgroup, thread);
    Mainloop mainloop{args, block, rows, own, operands, scales, factor, unit, kept_at,
                      work.iteration - rows.first_tile, work.odd_rows + 2 * is_mixed, reference, delta, dq, dweight, carried, carried_back, scores,
                      last_scores, last_grads};
    block.pipeline.wait(work.iteration);
    mainloop.multiply_keys(block.pipeline.stage(work.iteration));
    products_wait<0>();
    if (thread == 0) block.pipeline.release(work.iteration);
    for (int tile = rows.first_tile; tile < rows.end_tile; tile++) {
        TileRegisters of_tile;
        mainloop.process_tile(tile, of_tile);
    }
    products_wait_for(dweight);
    if (own.lane == 0) barrier_arrive(block.rows_empty);
    write_dq(args, rows, dq, scales.ds_unit, own.ds_row + own.local_row, own.column);
    const float weight_factor =
        SPANS ? least_factor(args, rows.batch_head, rows.first_row, rows.end_of_c(args.at), own.lane) : scales.of_block;
    write_dweight(args, rows, dweight, weight_factor, operands.scores_at, warpgroup, thread, own.local_row, own.column);
}
