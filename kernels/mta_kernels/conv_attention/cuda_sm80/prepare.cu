// What the backward needs besides its inputs: delta and bounds on gradients; counters that are zero. See prepare_gradients.cuh.
#include <elements.cuh>
#include <prepare_gradients.cuh>

using Arguments = GradientPreparation;

// Three blocks an SM: the compiler aims at five, and spills.
extern "C" __global__ void __launch_bounds__(256, 3) cuda_backward_prepare(const __grid_constant__ Arguments args) {
    if (blockIdx.x == 0 && blockIdx.y == 0) clear_counters(args);
    prepare_gradients(args, blockIdx.x, blockIdx.y);
}
