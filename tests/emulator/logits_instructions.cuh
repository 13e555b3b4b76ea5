// A CPU's twin of mta_kernels/multi_token_attention/mix_cuda/logits_instructions.cuh. Included as mma.cuh is.
#pragma once
#include <mma.cuh>

#define IN_CLUSTERS

inline void __syncwarp(int line = __builtin_LINE()) { emulator::meet(500 + emulator::thread / 32, 0, 32, line); }

using ::store_shared;
inline float2 load_shared_pair(uint32_t address) {
    float2 pair;
    std::memcpy(&pair, emulator::shared_at(address, 8), 8);
    return pair;
}
inline void store_shared(uint32_t address, float2 pair) { std::memcpy(emulator::shared_at(address, 8), &pair, 8); }
inline void store_memory(void* at, uint4 x) {
    if ((uintptr_t)at % 16) emulator::fail("a store of 16 bytes is not aligned");
    std::memcpy(at, &x, 16);
}

inline void store_in_block(int rank, uint32_t address, uint4 x) {
    std::memcpy(emulator::shared_at(address, 16, CLUSTER, rank), &x, 16);
}
inline void arrive_in_block(int rank, uint32_t barrier) { emulator::barrier_arrive(barrier, CLUSTER, rank); }
inline void wait_for_cluster(uint32_t barrier, int parity) { barrier_wait(barrier, parity); }
inline void cluster_barrier() { emulator::meet_cluster(CLUSTER); }
