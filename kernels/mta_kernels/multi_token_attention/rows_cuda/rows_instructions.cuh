// Instructions that the row kernels need besides nvrtc/mma.cuh and bulk.cuh. Tests run the kernels on a CPU with a
// twin, tests/emulator/rows_instructions.cuh. Sections and names follow the PTX ISA, 8.5.
#pragma once
#include <mma.cuh>
#if BULK  // sm_90 and later
#include <bulk.cuh>
#endif

#if CLUSTER > 1
#define IN_CLUSTERS __cluster_dims__(CLUSTER, 1, 1)
#else
#define IN_CLUSTERS
#endif

// Shared memory, besides mma.cuh's.

DEVICE float2 load_shared_pair(uint32_t address) {
    float2 pair;
    asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(pair.x), "=f"(pair.y) : "r"(address) : "memory");
    return pair;
}
DEVICE void store_shared(uint32_t address, float2 pair) {
    asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(address), "f"(pair.x), "f"(pair.y) : "memory");
}
DEVICE void store_shared(uint32_t address, uint16_t value) {
    asm volatile("st.shared.b16 [%0], %1;" ::"r"(address), "h"(value) : "memory");
}
template <int Threads> DEVICE void threads_barrier() { asm volatile("bar.sync 1, %0;" ::"n"(Threads) : "memory"); }

#if BULK  // sm_90 and later

// As `store_matrices`, of the transposed matrices: the inverse of `load_matrices_transposed`.
DEVICE void store_matrices_transposed(uint32_t address, const uint32_t (&matrices)[4]) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(matrices[0]),
                 "r"(matrices[1]), "r"(matrices[2]), "r"(matrices[3]) : "memory");
}

// Bulk copies from shared memory by the copy engine, in groups, in units of 16 bytes.

DEVICE void store_bytes(void* destination, uint32_t source, int bytes) {
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(destination), "r"(source), "r"(bytes)
                 : "memory");
}
DEVICE void stores_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
DEVICE void stores_wait() {  // until this thread's stores have read shared memory
    asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
}

// Clusters.

DEVICE void cluster_barrier() {  // of all threads of all its blocks
    asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}
// Sends a pair to an address of shared memory in block `rank` of the cluster, where a barrier counts it as 8 bytes.
DEVICE void send(int rank, uint32_t address, float2 pair, uint32_t barrier) {
    asm volatile(
        "{\n"
        ".reg .b32 there, its_barrier;\n"
        "mapa.shared::cluster.u32 there, %0, %4;\n"
        "mapa.shared::cluster.u32 its_barrier, %1, %4;\n"
        "st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 [there], {%2, %3}, [its_barrier];\n"
        "}" ::"r"(address), "r"(barrier), "f"(pair.x), "f"(pair.y), "r"(rank) : "memory");
}
DEVICE void barrier_wait_cluster(uint32_t barrier, int parity) {  // as `barrier_wait`, for what other blocks sent
    asm volatile(
        "{\n"
        ".reg .pred done;\n"
        "again: mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [%0], %1;\n"
        "@!done bra again;\n"
        "}" ::"r"(barrier), "r"(parity) : "memory");
}

#endif
