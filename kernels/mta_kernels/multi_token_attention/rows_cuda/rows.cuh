// The frame of both kernels: what a block prepares, and the rows that its cluster takes in turn.
#pragma once
#include "copies.cuh"
#include "mixing.cuh"
#include "sums.cuh"

constexpr float LOG2_E = 1.44269504f, LOG_2 = 0.693147181f;
constexpr int COLUMNS = 16 * TILES;  // that a warp has in registers at once
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
    cluster_barrier();  // no block sends to another before its barriers are there
#endif
}

// Has `compute(row, prepared, buffers)` called for each row by the computing warps, with what `prepare(row)` gave while the
// row was on its way, and the address of its buffers.
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

// Of a tile's positions, lane / 4 and 8 further: minus infinity where the row does not see them.
DEVICE void hide(float (&x)[EIGHTS][4], const Row& row, int column) {
    const int position = column + thread_index() % 32 / 4;
    const bool seen[2] = {row.sees(position), row.sees(position + 8)};
#pragma unroll
    for (int i = 0; i < EIGHTS * 4; i++)
        if (!seen[i % 4 / 2]) x[i / 4][i % 4] = MINUS_INFINITY;
}
// Whether a row does not see all of the columns that a warp has at once.
DEVICE bool some_hidden(const Row& row, int column) { return column < row.low || column + COLUMNS > row.high; }
