// The last kernel of a decode step: a head's output, the sum of its programs' partial outputs, normalised and gated.
//
// A block has a head. It loads the parameters of norm and gate before the kernel of V ends, and rounds only the result.
// NORM is whether there is a norm; GATE 0 without a gate, 1 for a gate a head, 2 for a gate a head dim.
#include "layout.cuh"

constexpr int COLUMNS = HEAD_DIM / 4, WARPS = MERGE_THREADS / 32;
constexpr int AT_A_TIME = 32 / COLUMNS, GROUPS = WARPS * AT_A_TIME;  // every GROUPS-th partial output
constexpr int AT_ONCE = 9;  // partial outputs in flight
constexpr int BLOCKS = GATE == 2 ? 1 : 2;  // of an SM, where many sequences give more of them than there are SMs

DEVICE float all_lanes(float x) {
#pragma unroll
    for (int other = 16; other > 0; other /= 2) x += __shfl_xor_sync(~0u, x, other);
    return x;
}
DEVICE float sigmoid(float x) { return reciprocal_fast(1 + exp2_fast(-x * LOG2E)); }

// Norm, and gate of one number, by the first warp: a lane has four numbers of the head's output.
struct Finish {
    float weights[4], gate[4], bias;

    DEVICE void load(const Arguments& args, int column) {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            weights[i] = NORM ? args.norm.at(0, column * 4 + i) * args.factor : 1;
            gate[i] = GATE == 1 ? args.gate.at(0, column * 4 + i) : 0;
        }
        bias = GATE == 1 && args.bias.start ? args.bias.at(0, 0) : 0;
    }
    // One reduction over a head gives both sums: the gate's sum is multiplied by the norm's factor afterwards.
    DEVICE void apply(const Arguments& args, float (&x)[4]) const {
        float squares = 0, z = 0;
#pragma unroll
        for (int i = 0; i < 4; i++) {
            squares += x[i] * x[i];
            x[i] *= weights[i];
            z += x[i] * gate[i];
        }
        float factor = NORM ? reciprocal_root(all_lanes(squares) / HEAD_DIM + args.eps) : 1;
        if (GATE == 1) factor *= sigmoid(all_lanes(z) * factor + bias);
#pragma unroll
        for (int i = 0; i < 4; i++) x[i] *= factor;
    }
};

// A quarter of a row of the gate of a number a head dim: four threads share a row, each with every fourth four numbers.
struct GateOfDims {
    float numbers[HEAD_DIM / 16][4], bias;

    DEVICE void load(const Arguments& args, int row, int quarter) {
#pragma unroll
        for (int i = 0; i < HEAD_DIM / 16; i++)
#pragma unroll
            for (int j = 0; j < 4; j++) numbers[i][j] = args.gate.at(row, i * 16 + quarter * 4 + j);
        bias = args.bias.start ? args.bias.at(row, 0) : 0;
    }
    DEVICE float opened(uint32_t head, int quarter) const {
        float z = 0;
#pragma unroll
        for (int i = 0; i < HEAD_DIM / 16; i++) {
            float x[4];
            load_floats(x, head + (i * 4 + quarter) * 16);
#pragma unroll
            for (int j = 0; j < 4; j++) z += x[j] * numbers[i][j];
        }
        z += __shfl_xor_sync(~0u, z, 1);
        z += __shfl_xor_sync(~0u, z, 2);
        return sigmoid(z + bias);
    }
};

extern "C" __global__ void __launch_bounds__(MERGE_THREADS, BLOCKS) mta_decode_merge(const __grid_constant__ Arguments args) {
    const uint32_t shared = shared_memory();
    const int sequence = blockIdx.x / HEADS, head = blockIdx.x % HEADS;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, column = lane % COLUMNS;
    const int row = threadIdx.x / 4, quarter = threadIdx.x % 4;
    Finish finish;
    GateOfDims gate;
    if (warp == 0) finish.load(args, column);
    if (GATE == 2 && row < HEAD_DIM) gate.load(args, row, quarter);
    int first, count;
    Work work;
    work.find_sharers(args.lengths, args.programs, args.splits, sequence, 0, first, count);
    int program = warp * AT_A_TIME + lane / COLUMNS;
    const float4* partial =
        (const float4*)args.partial + ((int64_t)(first + sequence + program) * HEADS + head) * COLUMNS + column;
    ELEMENT* out = args.out + ((int64_t)sequence * HEADS + head) * HEAD_DIM;
    wait_for_launch_before();
    float sum[4] = {};
    if (lane < AT_A_TIME * COLUMNS) {
#pragma unroll 1
        for (; program < count; program += AT_ONCE * GROUPS, partial += AT_ONCE * GROUPS * HEADS * COLUMNS) {
            float4 parts[AT_ONCE];
#pragma unroll
            for (int i = 0; i < AT_ONCE; i++) {
                parts[i] = {0, 0, 0, 0};
                if (program + i * GROUPS < count) parts[i] = __ldcg(partial + i * GROUPS * HEADS * COLUMNS);
            }
#pragma unroll
            for (int i = 0; i < AT_ONCE; i++)
                sum[0] += parts[i].x, sum[1] += parts[i].y, sum[2] += parts[i].z, sum[3] += parts[i].w;
        }
    }
#pragma unroll
    for (int other = AT_A_TIME / 2; other > 0; other /= 2)
#pragma unroll
        for (int i = 0; i < 4; i++) sum[i] += __shfl_sync(~0u, sum[i], (lane + other * COLUMNS) % 32);
    if (lane < COLUMNS) store_floats(shared + (warp * COLUMNS + lane) * 16, sum);
    __syncthreads();
    if (warp == 0) {
        float all[4] = {};
        if (lane < COLUMNS) {
#pragma unroll
            for (int i = 0; i < WARPS; i++) {
                float of_warp[4];
                load_floats(of_warp, shared + (i * COLUMNS + lane) * 16);
#pragma unroll
                for (int j = 0; j < 4; j++) all[j] += of_warp[j];
            }
        }
        finish.apply(args, all);
        if (lane < COLUMNS) {
            if (GATE == 2) store_floats(shared + lane * 16, all);
            else *(uint2*)(out + lane * 4) = {pack<ELEMENT>(all[0], all[1]), pack<ELEMENT>(all[2], all[3])};
        }
    }
    if (GATE == 2) {
        __syncthreads();
        if (row >= HEAD_DIM) return;
        const float opened = gate.opened(shared, quarter);
        if (quarter == 0) out[row] = from_float<ELEMENT>(load_shared_float(shared + row * 4) * opened);
    }
}
