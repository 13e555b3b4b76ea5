// For tests of `mtabench inspect`.
#include "generated.cuh"

namespace planted {

// An array that is indexed by an argument has to be in local memory: stack, and no spill.
__global__ void lookup(float* x, int index) {
    float local[SIZE] = {};
    for (int i = 0; i < SIZE; ++i) local[(i * index + OFFSET) % SIZE] += x[i];
    x[threadIdx.x] = local[threadIdx.x % SIZE];
}

template <int Size>
__global__ void __launch_bounds__(128) reversed(float* x) {
    __shared__ float shared[128];
    shared[threadIdx.x] = x[threadIdx.x];
    __syncthreads();
    x[threadIdx.x] = shared[127 - threadIdx.x] + Size;
}
template __global__ void reversed<SIZE>(float*);

}  // namespace planted
