// What the backward needs besides its inputs: delta and bounds on gradients; counters that are zero. See prepare_gradients.cuh.
#include <elements.cuh>
#include <prepare_gradients.cuh>

struct Arguments {
    Rows v, out, grad_out;
    float *value_norms, *grad_norms;  // [B * heads, NORM_PARTS]
    float* delta;                     // [B, Hq, M]: sums of out * grad_out
    int* counters;                    // of the tile scheduler
    int heads, kv_heads, batch, query_rows, key_rows, counter_count;
};

// Three blocks an SM: the compiler aims at five, and spills.
extern "C" __global__ void __launch_bounds__(256, 3) cuda_backward_prepare(const __grid_constant__ Arguments args) {
    if (blockIdx.x == 0 && blockIdx.y == 0)
        for (int i = threadIdx.x; i < args.counter_count; i += 256) args.counters[i] = 0;
    prepare_gradients(args, blockIdx.x, blockIdx.y);
}
