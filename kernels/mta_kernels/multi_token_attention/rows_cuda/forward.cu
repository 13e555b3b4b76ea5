// Rows of stored scores, in place: heads mixed, masked, softmax, heads mixed again; each byte read and written once.
//
//   logits[h] = sum over g of pre[h, g] scores[g],   P = softmax(logits),   scores[h] := sum over g of P[g] post[g, h]
//
// A block, or a cluster of up to eight, has a row of all heads in shared memory: a block a segment of its columns. One
// more warp has the copy engine bring rows and take them away, so that memory is busy while the others compute. These go
// twice over the row: for its sums, which the blocks of a cluster exchange, and to put the results where the scores were.
// Logits are computed twice: the tensor cores are idle anyway, and kept logits would have to be rounded.
//
// A score takes 4 bytes of memory, so at 4.3 TB/s an SM of 132 has 4.6 a cycle to do: two powers of two each (16 a cycle),
// and 13 instructions of a warp for 32 scores (counted in SASS), of the 4 x 32 / 4.6 = 28 that it could issue.
#include "rows.cuh"

// The sums with the logits x of some more tiles.
DEVICE void add_logits(Sums& sums, const float (&x)[TILES][EIGHTS][4]) {
    float greatest[EIGHTS][2];
    bool grows = false;
#pragma unroll
    for (int i = 0; i < EIGHTS * 2; i++) {
        float found = x[0][i / 2][i % 2];
#pragma unroll
        for (int j = 1; j < 2 * TILES; j++) found = fmaxf(found, x[j / 2][i / 2][i % 2 + j % 2 * 2]);
        greatest[i / 2][i % 2] = found * LOG2_E;
        grows |= greatest[i / 2][i % 2] > sums[i / 2][i % 2].x + 32;  // below, sums and their rounding are as good
    }
    if (__any_sync(~0u, grows)) {
#pragma unroll
        for (int i = 0; i < EIGHTS * 2; i++) {
            float2& pair = sums[i / 2][i % 2];
            const float x_now = fmaxf(pair.x, greatest[i / 2][i % 2]);
            pair = {x_now, pair.y * exp2_fast(pair.x - x_now)};
        }
    }
#pragma unroll
    for (int i = 0; i < EIGHTS * 2; i++) {
        float2& pair = sums[i / 2][i % 2];
#pragma unroll
        for (int j = 0; j < 2 * TILES; j++)
            pair.y += exp2_fast(fmaf(x[j / 2][i / 2][i % 2 + j % 2 * 2], LOG2_E, -pair.x));
    }
}

DEVICE void store_logsumexp(const Arguments& args, const Row& row, const Sums& sums) {
    float* destination = args.logsumexp + row.sequence * args.sums_batch + row.number * args.sums_row;
#pragma unroll
    for (int i = 0; i < EIGHTS * 2; i++) {
        const int head = head_of(thread_index(), i / 2, i % 2);
        const float2 pair = sums[i / 2][i % 2];
        const float found = pair.y == 0 ? MINUS_INFINITY : (pair.x + log2f(pair.y)) * LOG_2;
        if (head < HEADS) destination[head * args.sums_head] = found;
    }
}

DEVICE void mix_row(const Arguments& args, const Row& row, uint32_t buffer, const Lane& lane, const Weights<false>& pre,
                    const Weights<true>& post, uint32_t shared, int rank, Turn& received) {
    Sums sums;
#pragma unroll
    for (int i = 0; i < EIGHTS * 2; i++) sums[i / 2][i % 2] = {OfPowers::NOTHING, 0};
    float x[TILES][EIGHTS][4];
    const int first = row.start + thread_index() / 32 * COLUMNS;
#pragma unroll 1
    for (int column = first; column < row.stop; column += WARPS * COLUMNS) {
#pragma unroll
        for (int i = 0; i < TILES; i++) mix<PRE_MIX>(x[i], buffer + (column - row.start) * 2 + i * 32, lane, pre);
        if (some_hidden(row, column)) {
#pragma unroll
            for (int i = 0; i < TILES; i++) hide(x[i], row, column + 16 * i);
        }
        add_logits(sums, x);
    }
    merge_sums<OfPowers>(sums, shared, rank, received);
    if (rank == 0 && thread_index() < 4) store_logsumexp(args, row, sums);
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
                x[i][j / 4][j % 4] = exp2_fast(fmaf(x[i][j / 4][j % 4], LOG2_E, -pair.x)) * pair.y;
            }
            uint32_t pairs[EIGHTS][2];
            round_pairs(pairs, x[i]);
            mix_back(tile, pairs, lane, shared + SCRAP_AT, post);
        }
    }
}

extern "C" __global__ void IN_CLUSTERS __launch_bounds__(THREADS, BLOCKS) mix_rows(const __grid_constant__ Arguments args) {
    const uint32_t shared = shared_memory();
    const int rank = block_index() % CLUSTER, cluster = block_index() / CLUSTER, warp = thread_index() / 32;
    prepare_block(args, shared);
    if (warp < WARPS) {
        const Lane lane(args.pitch);
        const Weights<false> pre(shared + PRE_AT);
        const Weights<true> post(shared + POST_AT);
        Turn received;
        for_rows(
            args, shared, rank, cluster, [](const Row&) { return 0; },
            [&](const Row& row, int, uint32_t buffer) { mix_row(args, row, buffer, lane, pre, post, shared, rank, received); });
    }
#if BULK
    else copy_rows(args, shared, cluster, rank);
#endif
#if CLUSTER > 1
    __syncwarp();
    cluster_barrier();  // no block ends before what it sent has arrived
#endif
}
