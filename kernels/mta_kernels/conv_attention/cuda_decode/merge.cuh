// Parts of out, of a warp or a program, added up: a maximum and a sum a head, and its weighted values.
#pragma once
#include "layout.cuh"

// A maximum to subtract; 0 where there was no score, so that 2^(-inf - 0) is 0 and not NaN.
DEVICE float finite(float maximum) { return maximum == MINUS_INFINITY ? 0 : maximum; }

// A part of out: its maximum and sum a head, and its accumulator. Each warp has one in its scratch.
DEVICE float2 statistic(uint32_t shared, int warp, int head) {
    const uint32_t at = shared + STATISTICS_AT + (warp * HEADS + head) * 8;
    return {load_shared_float(at), load_shared_float(at + 4)};
}
DEVICE void set_statistic(uint32_t shared, int warp, int head, float maximum, float sum) {
    const uint32_t at = shared + STATISTICS_AT + (warp * HEADS + head) * 8;
    store_shared(at, maximum), store_shared(at + 4, sum);
}

// Adds up the warps' parts of one pass: to `out` if they are all, else to this program's part in global memory.
DEVICE void add_warps(uint32_t shared, int heads, uint16_t* out, float* part, float2* statistics) {
    __syncthreads();
    for (int i = thread_index(); i < HEADS * DEPTH; i += THREADS) {
        const int head = i / DEPTH, number = i % DEPTH;
        float maximum = MINUS_INFINITY, sum = 0, value = 0;
        for (int warp = 0; warp < WARPS; warp++) maximum = fmaxf(maximum, statistic(shared, warp, head).x);
        for (int warp = 0; warp < WARPS; warp++) {
            const float2 of_warp = statistic(shared, warp, head);
            const float scale = exp2_fast(of_warp.x - finite(maximum));
            sum += scale * of_warp.y;
            value += scale * load_shared_float(shared + SCRATCH_AT + warp * SCRATCH + i * 4);
        }
        if (part) {
            part[i] = value;
            if (number == 0) statistics[head] = {maximum, sum};
        } else if (head < heads && number < HEAD_DIM) {  // zeros for a sequence without tokens
            out[head * HEAD_DIM + number] = from_float<ELEMENT>(sum == 0 ? 0 : value / sum).bits;
        }
    }
    __syncthreads();
}

// Whether this program is the last of those that share a head: all have written their parts.
DEVICE bool last_to_come(uint32_t shared, int* arrived, int programs) {
    if (thread_index() == 0) {
        const bool last = arrive(arrived) == programs - 1;
        if (last) *arrived = 0;
        store_shared(shared + FLAG_AT, (uint32_t)last);
    }
    __syncthreads();
    return load_shared(shared + FLAG_AT);
}

// A warp's part becomes the sum of every WARPS'th program's part of one pass.
DEVICE void add_programs(const Arguments& args, uint32_t shared, int pass, int first_program, int programs) {
    constexpr int COUNT = (HEADS * DEPTH / 4 + 31) / 32, AT_ONCE = COUNT > 2 ? 1 : 4;  // to have more on their way
    const int warp = thread_index() / 32, lane = thread_index() % 32;
    float maximum[COUNT], sum[COUNT];
    float4 value[COUNT];
#pragma unroll
    for (int i = 0; i < COUNT; i++) maximum[i] = MINUS_INFINITY, sum[i] = 0, value[i] = {0, 0, 0, 0};
#pragma unroll 1
    for (int next = warp; next < programs; next += WARPS * AT_ONCE) {
        float2 statistic[AT_ONCE][COUNT];
        float4 part[AT_ONCE][COUNT];
#pragma unroll
        for (int k = 0; k < AT_ONCE; k++) {
            const int program = next + k * WARPS;
            const int64_t slot = 2 * ((int64_t)(first_program + program) * HEAD_BLOCKS + blockIdx.x % HEAD_BLOCKS) +
                                 (program == 0);
            const int64_t first = slot * ALL_HEADS + pass * HEADS;
#pragma unroll
            for (int i = 0; i < COUNT; i++) {
                const int column = min(lane + 32 * i, HEADS * DEPTH / 4 - 1);
                const bool inside = k == 0 || program < programs;
                const float2* at = args.statistics + first + column / (DEPTH / 4);
                statistic[k][i] = inside ? __ldcg(at) : float2{MINUS_INFINITY, 0};
                part[k][i] = inside ? __ldcg((const float4*)(args.parts + first * DEPTH) + column) : float4{0, 0, 0, 0};
            }
        }
#pragma unroll
        for (int k = 0; k < AT_ONCE; k++)
#pragma unroll
            for (int i = 0; i < COUNT; i++) {
                const float new_maximum = fmaxf(maximum[i], statistic[k][i].x);
                const float old_scale = exp2_fast(maximum[i] - finite(new_maximum));
                const float scale = exp2_fast(statistic[k][i].x - finite(new_maximum));
                maximum[i] = new_maximum, sum[i] = sum[i] * old_scale + statistic[k][i].y * scale;
                value[i].x = value[i].x * old_scale + part[k][i].x * scale;
                value[i].y = value[i].y * old_scale + part[k][i].y * scale;
                value[i].z = value[i].z * old_scale + part[k][i].z * scale;
                value[i].w = value[i].w * old_scale + part[k][i].w * scale;
            }
    }
#pragma unroll
    for (int i = 0; i < COUNT; i++) {
        const int column = lane + 32 * i;
        if (column < HEADS * DEPTH / 4) {
            const uint32_t at = shared + SCRATCH_AT + warp * SCRATCH + column * 16;
            store_shared(at, value[i].x), store_shared(at + 4, value[i].y);
            store_shared(at + 8, value[i].z), store_shared(at + 12, value[i].w);
            if (column % (DEPTH / 4) == 0) set_statistic(shared, warp, column / (DEPTH / 4), maximum[i], sum[i]);
        }
    }
}
