// Adds up the parts of out of a program's warps: a maximum and a sum a head, and its weighted values. fold.cuh and
// queries.cuh define where they are in shared memory.
#pragma once
#include "parts.cuh"

// A maximum to subtract; 0 where there was no score, so that 2^(-inf - 0) is 0 and not NaN.
DEVICE float finite(float maximum) { return maximum == MINUS_INFINITY ? 0 : maximum; }

// A part of out: its maximum and sum a head, and its accumulator. Each warp has one of its HEADS heads.
DEVICE float2 statistic(uint32_t shared, int warp, int head) {
    float both[2];
    load_floats(both, shared + STATISTICS_AT + (warp * HEADS + head) * 8);
    return {both[0], both[1]};
}
DEVICE void set_statistic(uint32_t shared, int warp, int head, float maximum, float sum) {
    store_shared(shared + STATISTICS_AT + (warp * HEADS + head) * 8, __float_as_uint(maximum), __float_as_uint(sum));
}

// A lane's part of out, of dimensions lane / 4, and 8 more, of every 16, and heads 2 (lane % 4) and the next.
DEVICE void store_out(uint32_t to, const float (&out)[STEPS][4]) {
    const int lane = thread_index() % 32;
#pragma unroll
    for (int i = 0; i < STEPS * 4; i++) {
        const int number = i / 4 * 16 + i / 2 % 2 * 8 + lane / 4, head = lane % 4 * 2 + i % 2;
        if (head < HEADS) store_shared(to + head * OUT_PITCH + number * 4, out[i / 4][i % 4]);
    }
}

constexpr int TEAMS_AT_ONCE = FEW_HEADS ? TEAMS : 4;

// Adds up the warps' parts of a segment: to `out` if they are all, else to this program's part in global memory.
DEVICE void add_warps(const Arguments& args, const Segment& segment, uint32_t shared) {
    __syncthreads();
#pragma unroll 1
    for (int i = thread_index(); i < ALL_HEADS * DEPTH / 4; i += THREADS) {
        const int head = i / (DEPTH / 4), number = i % (DEPTH / 4) * 4, first_warp = head / HEADS, of_warp = head % HEADS;
        float maximum = MINUS_INFINITY, sum = 0, value[4] = {};
#pragma unroll TEAMS_AT_ONCE
        for (int team = 0; team < TEAMS; team++)
            maximum = fmaxf(maximum, statistic(shared, team * SHARING + first_warp, of_warp).x);
#pragma unroll TEAMS_AT_ONCE
        for (int team = 0; team < TEAMS; team++) {
            const int warp = team * SHARING + first_warp;
            const float2 found = statistic(shared, warp, of_warp);
            const float scale = exp2_fast(found.x - finite(maximum));
            float values[4];
            load_floats(values, shared + SCRATCH_AT + warp * SCRATCH + of_warp * OUT_PITCH + number * 4);
            sum += scale * found.y;
#pragma unroll
            for (int j = 0; j < 4; j++) value[j] += scale * values[j];
        }
        write_part(args, segment, head, number, maximum, sum, value);
    }
    __syncthreads();
}
