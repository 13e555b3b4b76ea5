// Parts of out, of a warp or a program, added up: a maximum and a sum a head, and its weighted values.
#pragma once
#include "layout.cuh"

// A maximum to subtract; 0 where there was no score, so that 2^(-inf - 0) is 0 and not NaN.
DEVICE float finite(float maximum) { return maximum == MINUS_INFINITY ? 0 : maximum; }

constexpr int heads_of(int out_tile) { return ALL_HEADS - out_tile * 8 < 8 ? ALL_HEADS - out_tile * 8 : 8; }

// A part of out: its maximum and sum a head, and its accumulator. Each warp has one in its scratch.
DEVICE float2 statistic(uint32_t shared, int warp, int head) {
    float both[2];
    load_floats(both, shared + STATISTICS_AT + (warp * ALL_HEADS + head) * 8);
    return {both[0], both[1]};
}
DEVICE void set_statistic(uint32_t shared, int warp, int head, float maximum, float sum) {
    store_shared(shared + STATISTICS_AT + (warp * ALL_HEADS + head) * 8, __float_as_uint(maximum), __float_as_uint(sum));
}

// Adds up the warps' parts of one tile of heads: to `out` if they are all, else to this program's part in global memory.
template <int TILE_OF_HEADS>
DEVICE void add_warps(uint32_t shared, int heads, uint16_t* out, float* part, float2* statistics) {
    constexpr int FIRST = TILE_OF_HEADS * 8;
    __syncthreads();
#pragma unroll 1
    for (int i = thread_index(); i < heads_of(TILE_OF_HEADS) * DEPTH / 4; i += THREADS) {
        const int head = i / (DEPTH / 4), number = i % (DEPTH / 4) * 4;
        float maximum = MINUS_INFINITY, sum = 0, value[4] = {};
#pragma unroll
        for (int warp = 0; warp < WARPS; warp++) maximum = fmaxf(maximum, statistic(shared, warp, FIRST + head).x);
#pragma unroll
        for (int warp = 0; warp < WARPS; warp++) {
            const float2 of_warp = statistic(shared, warp, FIRST + head);
            const float scale = exp2_fast(of_warp.x - finite(maximum));
            float values[4];
            load_floats(values, shared + SCRATCH_AT + warp * SCRATCH + head * OUT_PITCH + number * 4);
            sum += scale * of_warp.y;
#pragma unroll
            for (int j = 0; j < 4; j++) value[j] += scale * values[j];
        }
        if (part) {
            *(float4*)(part + (FIRST + head) * DEPTH + number) = {value[0], value[1], value[2], value[3]};
            if (number == 0) statistics[FIRST + head] = {maximum, sum};
        } else if (FIRST + head < heads) {
            const float inverse = sum == 0 ? 0 : reciprocal_fast(sum);  // zeros for a sequence without tokens
#pragma unroll
            for (int j = 0; j < 4; j++)
                if (number + j < HEAD_DIM)
                    out[(FIRST + head) * HEAD_DIM + number + j] = from_float<ELEMENT>(value[j] * inverse).bits;
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

// A warp's part becomes the sum of every WARPS'th program's part of one tile of heads.
template <int TILE_OF_HEADS>
DEVICE void add_programs(const Arguments& args, uint32_t shared, int first_program, int programs) {
    constexpr int FIRST = TILE_OF_HEADS * 8, VECTORS = heads_of(TILE_OF_HEADS) * DEPTH / 4;
    constexpr int COUNT = (VECTORS + 31) / 32, AT_ONCE = COUNT > 8 ? 1 : COUNT > 4 ? 2 : 3;  // on their way
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
            const int64_t first = slot * ALL_HEADS + FIRST;
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
        const int vector = lane + 32 * i, head = vector / (DEPTH / 4), number = vector % (DEPTH / 4) * 4;
        if (vector < VECTORS) {
            const uint32_t at = shared + SCRATCH_AT + warp * SCRATCH + head * OUT_PITCH + number * 4;
            store_shared(at, uint4{__float_as_uint(value[i].x), __float_as_uint(value[i].y), __float_as_uint(value[i].z),
                                   __float_as_uint(value[i].w)});
            if (number == 0) set_statistic(shared, warp, FIRST + head, maximum[i], sum[i]);
        }
    }
}
