// Rows of stored scores, in place: heads mixed, masked, softmax, heads mixed again; each byte read and written once.
//
//   logits[h] = sum over g of pre[h, g] scores[g],   P = softmax(logits),   scores[h] := sum over g of P[g] post[g, h]
//
// A block, or a cluster of up to eight, has a row of all heads in shared memory: each block has a segment of its columns.
// One more warp lets the copy engine load rows and store them, so that memory is busy while the other warps compute. They
// pass over the row twice: for its sums, which the blocks of a cluster exchange, and to replace the scores by the
// results. Logits are computed twice: the tensor cores are idle anyway, and stored logits would have to be rounded.
//
// A score takes 4 bytes of memory, so at 4.3 TB/s an SM of 132 has 4.6 scores a cycle, and can do 16 powers of two. It
// can issue 4 x 32 / 4.6 = 28 instructions of a warp for 32 scores.
#include "rows.cuh"

DEVICE void store_logsumexp(const Arguments& args, const Row& row, const Sums& sums) {
    float* destination = args.logsumexp + row.sequence * args.sums_batch + row.number * args.sums_row;
#pragma unroll
    for (int i = 0; i < EIGHTS * 2; i++) {
        const int head = head_of(thread_index(), i / 2, i % 2);
        const float2 pair = sums[i / 2][i % 2];
        const float found = pair.y == 0 ? MINUS_INFINITY : fmaf(log2f(pair.y), LN_2, pair.x);
        if (head < HEADS) destination[head * args.sums_head] = found;
    }
}

#if KEEP

// Large sums of exponentials over a warp's references, well within the range of bfloat16.
constexpr float MOST = 1e18f;

// Raises the references to the greatest of the logits x of some more tiles; `factors` rescale from the old references.
DEVICE void raise_references(Sums& sums, float (&factors)[EIGHTS][2], const float (&x)[TILES][EIGHTS][4]) {
#pragma unroll
    for (int i = 0; i < EIGHTS * 2; i++) {
        float2& pair = sums[i / 2][i % 2];
        float found = x[0][i / 2][i % 2];
#pragma unroll
        for (int j = 1; j < 2 * TILES; j++) found = fmaxf(found, x[j / 2][i / 2][i % 2 + j % 2 * 2]);
        found = fmaxf(fmaxf(found, fmaf(log2f(pair.y), LN_2, pair.x)), pair.x);
#pragma unroll
        for (int other = 4; other < 32; other *= 2) found = fmaxf(found, __shfl_xor_sync(~0u, found, other));
        const float factor = exponential(pair.x, found);
        pair = {found, pair.y * factor}, factors[i / 2][i % 2] = factor;
    }
}

// Multiplies a warp's columns from `first` on before `column`, at `buffer`, by the factors.
DEVICE void scale_kept(uint32_t buffer, int first, int column, const Lane& lane, uint32_t scrap,
                       const float (&factors)[EIGHTS][2]) {
    __syncwarp();
#pragma unroll 1
    for (int earlier = first; earlier < column; earlier += WARPS * COLUMNS)
#pragma unroll 1
        for (int i = 0; i < TILES; i++) {
            const uint32_t tile = buffer + earlier * 2 + i * 32;
            uint32_t pairs[EIGHTS][2];
            load_pairs(pairs, tile, lane);
#pragma unroll
            for (int j = 0; j < EIGHTS * 2; j++) pairs[j / 2][j % 2] = scaled(pairs[j / 2][j % 2], factors[j / 2]);
            store_pairs(tile, pairs, lane, scrap);
        }
}

// As `mix_row` below, with one computation of logits: the first pass over the row replaces the scores by exponentials,
// rounded like probabilities. The second mixes these by weights that turn them into probabilities.
DEVICE void mix_row_kept(const Arguments& args, const Row& row, uint32_t buffer, const Lane& lane, const Weights<false>& pre,
                         const Weights<true>& post, uint32_t shared, int rank, Turn& received) {
    Sums sums;  // all lanes of a warp have the same references
#pragma unroll
    for (int i = 0; i < EIGHTS * 2; i++) sums[i / 2][i % 2] = {OfPowers::NOTHING, 0};
    const int first = thread_index() / 32 * COLUMNS, stop = row.stop - row.start;
#pragma unroll 1
    for (int column = first; column < stop; column += WARPS * COLUMNS) {
        const uint32_t tiles = buffer + column * 2;
        uint32_t pairs[TILES][EIGHTS][2];
        float before[EIGHTS][2];
#pragma unroll
        for (int i = 0; i < EIGHTS * 2; i++) before[i / 2][i % 2] = sums[i / 2][i % 2].y;
        bool raise = column == first;
#pragma unroll 1
        while (true) {
            float x[TILES][EIGHTS][4];
#pragma unroll
            for (int i = 0; i < TILES; i++) mix<PRE_MIX>(x[i], tiles + i * 32, lane, pre);
            if (some_hidden(row, row.start + column)) {
#pragma unroll
                for (int i = 0; i < TILES; i++) hide(x[i], row, row.start + column + 16 * i);
            }
            if (raise) {
                float factors[EIGHTS][2];
                raise_references(sums, factors, x);
                if (column > first) scale_kept(buffer, first, column, lane, shared + SCRAP_AT, factors);
            }
            bool grows = false;
#pragma unroll
            for (int i = 0; i < EIGHTS * 2; i++) {
                float2& pair = sums[i / 2][i % 2];
#pragma unroll
                for (int j = 0; j < 2 * TILES; j++) {
                    float& number = x[j / 2][i / 2][i % 2 + j % 2 * 2];
                    number = exponential(number, pair.x);
                    pair.y += number;
                }
                grows |= pair.y > MOST;
            }
#pragma unroll
            for (int i = 0; i < TILES; i++) round_pairs(pairs[i], x[i]);
            if (raise || !__any_sync(~0u, grows)) break;
            raise = true;
#pragma unroll
            for (int i = 0; i < EIGHTS * 2; i++) sums[i / 2][i % 2].y = before[i / 2][i % 2];
        }
#pragma unroll
        for (int i = 0; i < TILES; i++) store_pairs(tiles + i * 32, pairs[i], lane, shared + SCRAP_AT);
    }
    float scale[EIGHTS][2];
#pragma unroll
    for (int i = 0; i < EIGHTS * 2; i++) scale[i / 2][i % 2] = sums[i / 2][i % 2].x;
    merge_sums<OfPowers>(sums, shared, rank, received);
    if (rank == 0 && thread_index() < 4) store_logsumexp(args, row, sums);
#pragma unroll
    for (int i = 0; i < EIGHTS * 2; i++) {
        const float2 pair = sums[i / 2][i % 2];
        scale[i / 2][i % 2] = pair.y == 0 ? 0 : exponential(scale[i / 2][i % 2], pair.x) / pair.y;
    }
    const ScaledWeights weights(post, scale);
#pragma unroll 1
    for (int column = first; column < stop; column += WARPS * COLUMNS) {
        uint32_t pairs[TILES][EIGHTS][2];
#pragma unroll
        for (int i = 0; i < TILES; i++) load_pairs(pairs[i], buffer + column * 2 + i * 32, lane);
#pragma unroll
        for (int i = 0; i < TILES; i++) mix_back(buffer + column * 2 + i * 32, pairs[i], lane, shared + SCRAP_AT, weights);
    }
}

#endif

DEVICE void mix_row(const Arguments& args, const Row& row, uint32_t buffer, const Lane& lane, const Weights<false>& pre,
                    const Weights<true>& post, uint32_t shared, int rank, Turn& received) {
    Sums sums;
    sum_logits(sums, row, buffer, lane, pre, shared, rank, received);
    if (rank == 0 && thread_index() < 4) store_logsumexp(args, row, sums);
    float x[TILES][EIGHTS][4];
    const int first = row.start + thread_index() / 32 * COLUMNS;
#pragma unroll
    for (int i = 0; i < EIGHTS * 2; i++) sums[i / 2][i % 2].y = sums[i / 2][i % 2].y == 0 ? 0 : 1 / sums[i / 2][i % 2].y;
#pragma unroll 1
    for (int column = first; column < row.stop; column += WARPS * COLUMNS) {
#pragma unroll
        for (int i = 0; i < TILES; i++) {
            const uint32_t tile = buffer + (column - row.start) * 2 + i * 32;
            mix<PRE_MIX>(x[i], tile, lane, pre);
            if (some_hidden(row, column)) hide(x[i], row, column + 16 * i);
#pragma unroll
            for (int j = 0; j < EIGHTS * 4; j++) {
                const float2 pair = sums[j / 4][j % 2];
                x[i][j / 4][j % 4] = exponential(x[i][j / 4][j % 4], pair.x) * pair.y;
            }
            uint32_t pairs[EIGHTS][2];
            round_pairs(pairs, x[i]);
            mix_back(tile, pairs, lane, shared + SCRAP_AT, post);
        }
    }
}

extern "C" __global__ void IN_CLUSTERS __launch_bounds__(THREADS, BLOCKS) mix_rows(const __grid_constant__ Arguments args) {
    const uint32_t shared = shared_memory();
    run_block(args, shared, [&](int rank, int cluster, int) {
        const Lane lane(args.pitch);
        const Weights<false> pre(shared + PRE_AT);
        const Weights<true> post(shared + POST_AT);
        Turn received;
        for_rows(
            args, shared, rank, cluster, [](const Row&) { return 0; },
            [&](const Row& row, int, uint32_t buffer) {
#if KEEP
                mix_row_kept(args, row, buffer, lane, pre, post, shared, rank, received);
#else
                mix_row(args, row, buffer, lane, pre, post, shared, rank, received);
#endif
            });
    });
}
