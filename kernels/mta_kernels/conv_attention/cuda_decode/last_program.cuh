// The last program to finish sums over all programs that share a head. With few heads that is faster than merge.cu.
#pragma once
#include "merge.cuh"

// A warp's part becomes the sum of every WARPS'th program's.
DEVICE void add_programs(const Arguments& args, uint32_t shared, int first_program, int programs) {
    constexpr int VECTORS = HEADS * DEPTH / 4;
    constexpr int COUNT = (VECTORS + 31) / 32, AT_ONCE = COUNT > 4 ? 1 : 3;  // in flight
    const int warp = thread_index() / 32, lane = thread_index() % 32;
    Part sums[COUNT];
#pragma unroll 1
    for (int next = warp; next < programs; next += WARPS * AT_ONCE) {
        float2 statistic[AT_ONCE][COUNT];
        float4 part[AT_ONCE][COUNT];
#pragma unroll
        for (int k = 0; k < AT_ONCE; k++) {
            const int program = next + k * WARPS;
            const int64_t slot = 2 * ((int64_t)(first_program + program) * HEAD_BLOCKS + blockIdx.x % HEAD_BLOCKS) +
                                 (program == 0);
            const int64_t first = slot * HEADS;
#pragma unroll
            for (int i = 0; i < COUNT; i++) {
                const int vector = min(lane + 32 * i, VECTORS - 1);
                const bool inside = k == 0 || program < programs;
                const float2* at = args.statistics + first + vector / (DEPTH / 4);
                statistic[k][i] = inside ? __ldcg(at) : float2{MINUS_INFINITY, 0};
                part[k][i] = inside ? __ldcg((const float4*)(args.parts + first * DEPTH) + vector) : float4{0, 0, 0, 0};
            }
        }
#pragma unroll
        for (int k = 0; k < AT_ONCE; k++)
#pragma unroll
            for (int i = 0; i < COUNT; i++) sums[i].add(statistic[k][i], part[k][i]);
    }
#pragma unroll
    for (int i = 0; i < COUNT; i++) {
        const int vector = lane + 32 * i, head = vector / (DEPTH / 4), number = vector % (DEPTH / 4) * 4;
        if (vector < VECTORS) {
            store_floats(shared + SCRATCH_AT + warp * SCRATCH + head * OUT_PITCH + number * 4, sums[i].values);
            if (number == 0) set_statistic(shared, warp, head, sums[i].maximum, sums[i].sum);
        }
    }
}
