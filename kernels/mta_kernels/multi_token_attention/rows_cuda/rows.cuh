// The common frame of both kernels: a block's setup, and the loop over the rows of its cluster.
#pragma once
#include "copies.cuh"
#include "mixing.cuh"
#include "sums.cuh"

constexpr int COLUMNS = 16 * TILES;  // columns that a warp holds in registers at once
static_assert(64 % COLUMNS == 0, "segments are units of 64");

DEVICE void prepare_block(const Arguments& args, uint32_t shared) {
    for (int i = thread_index(); i < ZEROS / 16; i += THREADS) store_shared(shared + ZEROS_AT + i * 16, uint4{0, 0, 0, 0});
    load_weights(args.pre, shared + PRE_AT);
    load_weights(args.post, shared + POST_AT);
#if BULK
    if (thread_index() == 0) {
        for (int stage = 0; stage < args.stages; stage++) {
            barrier_init(shared + FULL_AT + 8 * stage, 1);
            barrier_init(shared + DONE_AT + 8 * stage, WARPS);
        }
        for (int i = 0; i < 2; i++) barrier_init(shared + RECEIVED_AT + 8 * i, 1);
        barrier_init_done();
    }
    fence_async_proxy();
#endif
    __syncthreads();
#if CLUSTER > 1
    cluster_barrier();  // a block must not send before the others' barriers exist
#endif
}

// Calls `compute(row, prepared, buffers)` for each row in the computing warps. `prepare(row)` runs while the row is in
// flight, and returns `prepared`; `buffers` is the address of the row's buffers.
template <class Prepare, class Compute>
DEVICE void for_rows(const Arguments& args, uint32_t shared, int rank, int cluster, Prepare prepare, Compute compute) {
#if BULK
    Turn turn;
#endif
#pragma unroll 1
    for (int index = cluster; index < args.all_rows; index += args.clusters) {
        const Row row(args, index, rank);
        auto prepared = prepare(row);
#if BULK
        barrier_wait(shared + FULL_AT + 8 * turn.stage, turn.round);
        compute(row, prepared, stage_at(args, shared, turn.stage, 0));
        fence_async_proxy();
        __syncwarp();
        if (thread_index() % 32 == 0) barrier_arrive(shared + DONE_AT + 8 * turn.stage);
        turn.next(args.stages);
#else
        load_row(args, row, shared);
        compute(row, prepared, stage_at(args, shared, 0, 0));
        store_row(args, row, shared);
#endif
    }
}

// A block: `compute(rank, cluster, warp)` in the computing warps, beside the warp that copies.
template <class Compute> DEVICE void run_block(const Arguments& args, uint32_t shared, Compute compute) {
    const int rank = block_index() % CLUSTER, cluster = block_index() / CLUSTER, warp = thread_index() / 32;
    prepare_block(args, shared);
    if (warp < WARPS) compute(rank, cluster, warp);
#if BULK
    else copy_rows(args, shared, cluster, rank);
#endif
#if CLUSTER > 1
    __syncwarp();
    cluster_barrier();  // no block may end before its sends have arrived
#endif
}

// Sets a tile's positions lane / 4 and 8 further to `instead` where the row does not see them.
DEVICE void hide(float (&x)[EIGHTS][4], const Row& row, int column, float instead = MINUS_INFINITY) {
    const int position = column + thread_index() % 32 / 4;
    const bool seen[2] = {row.sees(position), row.sees(position + 8)};
#pragma unroll
    for (int i = 0; i < EIGHTS * 4; i++)
        if (!seen[i % 4 / 2]) x[i / 4][i % 4] = instead;
}
// Whether the row does not see all of the columns that a warp holds at once.
DEVICE bool some_hidden(const Row& row, int column) { return column < row.low || column + COLUMNS > row.high; }

// Adds the logits x of some more tiles to the sums.
DEVICE void add_logits(Sums& sums, const float (&x)[TILES][EIGHTS][4]) {
    float greatest[EIGHTS][2];
    bool grows = false;
#pragma unroll
    for (int i = 0; i < EIGHTS * 2; i++) {
        float found = x[0][i / 2][i % 2];
#pragma unroll
        for (int j = 1; j < 2 * TILES; j++) found = fmaxf(found, x[j / 2][i / 2][i % 2 + j % 2 * 2]);
        greatest[i / 2][i % 2] = found;
        grows |= greatest[i / 2][i % 2] > sums[i / 2][i % 2].x + 22;  // a smaller growth costs no accuracy
    }
    if (__any_sync(~0u, grows)) {
#pragma unroll
        for (int i = 0; i < EIGHTS * 2; i++) {
            float2& pair = sums[i / 2][i % 2];
            const float x_now = fmaxf(pair.x, greatest[i / 2][i % 2]);
            pair = {x_now, pair.y * exponential(pair.x, x_now)};
        }
    }
#pragma unroll
    for (int i = 0; i < EIGHTS * 2; i++) {
        float2& pair = sums[i / 2][i % 2];
#pragma unroll
        for (int j = 0; j < 2 * TILES; j++)
            pair.y += exponential(x[j / 2][i / 2][i % 2 + j % 2 * 2], pair.x);
    }
}

// The sums of a row's logits, the same in all threads.
DEVICE void sum_logits(Sums& sums, const Row& row, uint32_t buffer, const Lane& lane, const Weights<false>& pre, uint32_t shared,
                       int rank, Turn& received) {
#pragma unroll
    for (int i = 0; i < EIGHTS * 2; i++) sums[i / 2][i % 2] = {OfPowers::NOTHING, 0};
#pragma unroll 1
    for (int column = row.start + thread_index() / 32 * COLUMNS; column < row.stop; column += WARPS * COLUMNS) {
        float x[TILES][EIGHTS][4];
#pragma unroll
        for (int i = 0; i < TILES; i++) mix<PRE_MIX>(x[i], buffer + (column - row.start) * 2 + i * 32, lane, pre);
        if (some_hidden(row, column)) {
#pragma unroll
            for (int i = 0; i < TILES; i++) hide(x[i], row, column + 16 * i);
        }
        add_logits(sums, x);
    }
    merge_sums<OfPowers>(sums, shared, rank, received);
}
