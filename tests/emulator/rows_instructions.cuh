// A CPU's twin of mta_kernels/multi_token_attention/rows_cuda/rows_instructions.cuh. Included as mma.cuh is.
#pragma once
#include <mma.cuh>

#define IN_CLUSTERS

using ::store_shared;
inline float2 load_shared_pair(uint32_t address) {
    float2 pair;
    memcpy(&pair, emulator::shared_at(address, 8), 8);
    return pair;
}
inline void store_shared(uint32_t address, float2 pair) { memcpy(emulator::shared_at(address, 8), &pair, 8); }
inline void store_shared(uint32_t address, uint16_t value) { memcpy(emulator::shared_at(address, 2), &value, 2); }
template <int Threads> void threads_barrier() { emulator::meet(600, 0, Threads); }

inline void store_matrices_transposed(uint32_t address, const uint32_t (&m)[4]) {
    whole_warp::together({{m[0], m[1], m[2], m[3]}, {}, address, nullptr}, [](auto& warp) {
#ifdef CONFLICTS_ARE_ERRORS
        for (int i = 0; i < 4; i++) emulator::check_banks(warp, i);
#endif
        for (int i = 0; i < 32; i++) {
            const int row = i % 8;
            for (int column = 0; column < 8; column++) {
                const uint16_t number = warp[column * 4 + row / 2].a[i / 8] >> row % 2 * 16;
                memcpy(emulator::shared_at(warp[i].address + column * 2, 2), &number, 2);
            }
        }
    });
}

// Copies from shared memory happen at a random moment between their commit and the wait for them.
inline void store_bytes(void* destination, uint32_t source, int bytes) {
    if (source % 16 || (uintptr_t)destination % 16 || bytes % 16 || bytes <= 0) emulator::fail("a store is not aligned");
    emulator::issue(emulator::Task::of([=] { memcpy(destination, emulator::shared_at(source, bytes), bytes); }));
}
inline void stores_commit() { emulator::commit(); }
inline void stores_wait() { emulator::complete(0); }

inline void cluster_barrier() { emulator::meet_cluster(CLUSTER); }
inline void send(int rank, uint32_t address, float2 pair, uint32_t barrier) {
    emulator::send(CLUSTER, rank, address, &pair, 8, barrier);
}
inline void barrier_wait_cluster(uint32_t barrier, int parity) { barrier_wait(barrier, parity); }
