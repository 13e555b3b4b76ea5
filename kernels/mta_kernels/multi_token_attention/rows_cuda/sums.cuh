// Two sums a head over all columns of a row: merged over lanes, warps and blocks.
#pragma once
#include "layout.cuh"

// A lane has heads 2 (lane % 4) and the next of every eight.
using Sums = float2[EIGHTS][2];

DEVICE int head_of(int lane, int eight, int i) { return eight * 8 + lane % 4 * 2 + i; }

DEVICE float exponential(float logit, float reference) { return exp2_fast((logit - reference) * LOG2_E); }

// x is the greatest logit so far, or close to it; y is the sum of exp(logit - x). Logits are subtracted before the
// scale to powers of two: the greatest one's difference is zero however large it is, and never overflows.
struct OfPowers {
    static constexpr float NOTHING = -3e38f;  // x of no logits: exp(NOTHING - NOTHING) is a number
    DEVICE static float2 merge(float2 a, float2 b) {
        const float x = fmaxf(a.x, b.x);
        return {x, a.y * exponential(a.x, x) + b.y * exponential(b.x, x)};
    }
};
struct OfNumbers {
    DEVICE static float2 merge(float2 a, float2 b) { return {a.x + b.x, a.y + b.y}; }
};

DEVICE float2 from_lane(float2 pair, int other) {
    return {__shfl_xor_sync(~0u, pair.x, other), __shfl_xor_sync(~0u, pair.y, other)};
}

// Merges each thread's sums into the whole row's, the same in all blocks of the cluster. `received` counts the rows:
// blocks send into one half of the buffer of all blocks' sums while others may still read the other half.
template <class Of> DEVICE void merge_sums(Sums& sums, uint32_t shared, int rank, Turn& received) {
    const int warp = thread_index() / 32, lane = thread_index() % 32;
    const uint32_t of_warps = shared + OF_WARPS_AT;
    const uint32_t of_blocks = shared + OF_BLOCKS_AT + received.stage * CLUSTER * PADDED * 8;
#pragma unroll
    for (int i = 0; i < EIGHTS * 2; i++) {
        float2& pair = sums[i / 2][i % 2];
#pragma unroll
        for (int other = 4; other < 32; other *= 2) pair = Of::merge(pair, from_lane(pair, other));
        if (lane < 4) store_shared(of_warps + (warp * PADDED + head_of(lane, i / 2, i % 2)) * 8, pair);
    }
#if CLUSTER > 1
    const uint32_t barrier = shared + RECEIVED_AT + 8 * received.stage;
    if (thread_index() == 0) barrier_expect(barrier, CLUSTER * PADDED * 8);
#endif
    threads_barrier<COMPUTING>();
#pragma unroll 1
    for (int head = thread_index(); head < PADDED; head += COMPUTING) {
        float2 pair = load_shared_pair(of_warps + head * 8);
#pragma unroll
        for (int other = 1; other < WARPS; other++)
            pair = Of::merge(pair, load_shared_pair(of_warps + (other * PADDED + head) * 8));
#if CLUSTER > 1
#pragma unroll
        for (int to = 0; to < CLUSTER; to++) send(to, of_blocks + (rank * PADDED + head) * 8, pair, barrier);
#else
        store_shared(of_blocks + head * 8, pair);
#endif
    }
#if CLUSTER > 1
    barrier_wait_cluster(barrier, received.round);
#else
    threads_barrier<COMPUTING>();
#endif
#pragma unroll
    for (int i = 0; i < EIGHTS * 2; i++) {
        const uint32_t at = of_blocks + head_of(lane, i / 2, i % 2) * 8;
        float2 pair = load_shared_pair(at);
#pragma unroll
        for (int other = 1; other < CLUSTER; other++) pair = Of::merge(pair, load_shared_pair(at + other * PADDED * 8));
        sums[i / 2][i % 2] = pair;
    }
    received.next(2);
}
