// NVIDIA's occupancy calculator (cuda_occupancy.h, in every CUDA toolkit and in Triton's wheel) on standard input.
// In: capability major minor, warps an SM, shared bytes an SM, shared bytes a block at most; then of a kernel: warps,
// registers, static and dynamic shared bytes. Out: error, blocks an SM, limits (1 warps, 2 registers, 4 shared, 8 blocks).
#include <stdio.h>

#include "cuda_occupancy.h"

int main(void) {
    int major, minor, sm_warps, sm_shared, most_shared, warps, registers, fixed, dynamic;
    while (scanf("%d %d %d %d %d %d %d %d %d", &major, &minor, &sm_warps, &sm_shared, &most_shared, &warps, &registers,
                 &fixed, &dynamic) == 9) {
        cudaOccDeviceProp gpu = {0};
        gpu.computeMajor = major;
        gpu.computeMinor = minor;
        gpu.maxThreadsPerBlock = 1024;
        gpu.maxThreadsPerMultiprocessor = 32 * sm_warps;
        gpu.regsPerBlock = gpu.regsPerMultiprocessor = 65536;
        gpu.warpSize = 32;
        gpu.sharedMemPerBlock = 49152;
        gpu.sharedMemPerMultiprocessor = sm_shared;
        gpu.sharedMemPerBlockOptin = most_shared;
        gpu.reservedSharedMemPerBlock = 1024;
        gpu.numSms = 1;
        cudaOccFuncAttributes kernel = {0};
        kernel.maxThreadsPerBlock = 1024;
        kernel.numRegs = registers;
        kernel.sharedSizeBytes = fixed;
        kernel.shmemLimitConfig = FUNC_SHMEM_LIMIT_OPTIN;
        kernel.maxDynamicSharedSizeBytes = dynamic;
        kernel.numBlockBarriers = 1;
        cudaOccDeviceState state = {0};
        state.carveoutConfig = SHAREDMEM_CARVEOUT_MAX_SHARED;
        cudaOccResult result = {0};
        cudaOccError error =
            cudaOccMaxActiveBlocksPerMultiprocessor(&result, &gpu, &kernel, &state, 32 * warps, dynamic);
        printf("%d %d %d\n", (int)error, result.activeBlocksPerMultiprocessor, (int)result.limitingFactors);
    }
    return 0;
}
