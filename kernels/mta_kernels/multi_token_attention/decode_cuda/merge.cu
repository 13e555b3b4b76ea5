// The last kernel of a decode step: a head's output, the sum of its programs' partial outputs in their order.
#include "layout.cuh"

constexpr int COLUMNS = HEAD_DIM / 4, GROUPS = MERGE_THREADS / COLUMNS;  // every GROUPS-th partial output
constexpr int AT_ONCE = 9;  // partial outputs on their way

extern "C" __global__ void __launch_bounds__(MERGE_THREADS, 1) mta_decode_merge(const __grid_constant__ Arguments args) {
    const uint32_t shared = shared_memory();
    const int sequence = blockIdx.x / HEADS, head = blockIdx.x % HEADS;
    const int column = threadIdx.x % COLUMNS, group = threadIdx.x / COLUMNS;
    int first, count;
    Work work;
    work.find_sharers(args.lengths, args.programs, args.splits, sequence, 0, first, count);
    const float4* partial = (const float4*)args.partial + ((int64_t)(first + sequence) * HEADS + head) * COLUMNS + column;
    float4 sum = {0, 0, 0, 0};
    wait_for_launch_before();
    if (group < GROUPS) {
#pragma unroll 1
        for (int program = group; program < count; program += AT_ONCE * GROUPS) {
            float4 parts[AT_ONCE];
#pragma unroll
            for (int i = 0; i < AT_ONCE; i++) {
                const int other = program + i * GROUPS;
                parts[i] = {0, 0, 0, 0};
                if (other < count) parts[i] = __ldcg(partial + (int64_t)other * HEADS * COLUMNS);
            }
#pragma unroll
            for (int i = 0; i < AT_ONCE; i++)
                sum.x += parts[i].x, sum.y += parts[i].y, sum.z += parts[i].z, sum.w += parts[i].w;
        }
        const uint32_t at = shared + (group * COLUMNS + column) * 16;
        store_shared(at, sum.x), store_shared(at + 4, sum.y), store_shared(at + 8, sum.z), store_shared(at + 12, sum.w);
    }
    __syncthreads();
    const int number = threadIdx.x;
    if (number < HEAD_DIM) {
        float all = 0;
#pragma unroll
        for (int i = 0; i < GROUPS; i++) all += load_shared_float(shared + (i * HEAD_DIM + number) * 4);
        args.out[((int64_t)sequence * HEADS + head) * HEAD_DIM + number] = from_float<ELEMENT>(all);
    }
}
