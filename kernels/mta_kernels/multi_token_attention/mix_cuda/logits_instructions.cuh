// Instructions that logits.cu needs beside those of hopper/device.cuh. Tests run it on a CPU with a twin,
// tests/emulator/logits_instructions.cuh. Names of instructions follow the PTX ISA, 8.5.
#pragma once
#include <device.cuh>
#include <wgmma.cuh>

#if CLUSTER > 1
#define IN_CLUSTERS __cluster_dims__(CLUSTER, 1, 1)
#else
#define IN_CLUSTERS
#endif

DEVICE float2 load_shared_pair(uint32_t address) {
    float2 pair;
    asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(pair.x), "=f"(pair.y) : "r"(address) : "memory");
    return pair;
}
DEVICE void store_shared(uint32_t address, float2 pair) {
    asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(address), "f"(pair.x), "f"(pair.y) : "memory");
}
// To memory at a multiple of 16 bytes: the compiler would make four stores of one.
DEVICE void store_memory(void* at, uint4 x) {
    asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(at), "r"(x.x), "r"(x.y), "r"(x.z), "r"(x.w) : "memory");
}

// Clusters: shared memory and mbarriers of block `rank`, at the same address as in this block.

DEVICE uint32_t in_block(int rank, uint32_t address) {
    uint32_t there;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(address), "r"(rank));
    return there;
}
DEVICE void store_in_block(int rank, uint32_t address, uint4 x) {
    asm volatile("st.shared::cluster.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(in_block(rank, address)), "r"(x.x), "r"(x.y),
                 "r"(x.z), "r"(x.w) : "memory");
}
DEVICE void arrive_in_block(int rank, uint32_t barrier) {
    asm volatile("mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%0];" ::"r"(in_block(rank, barrier)) : "memory");
}
DEVICE void wait_for_cluster(uint32_t barrier, int parity) {  // `barrier_wait`, for what other blocks did
    asm volatile(
        "{\n"
        ".reg .pred done;\n"
        "again: mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [%0], %1;\n"
        "@!done bra again;\n"
        "}" ::"r"(barrier), "r"(parity) : "memory");
}
DEVICE void cluster_barrier() {  // of all threads of all its blocks
    asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}
