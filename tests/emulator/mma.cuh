// A CPU's twin of mta_kernels/nvrtc/mma.cuh; see device.cuh here.
//
// It is included within a namespace, with the kernel, so that it may take names of device.cuh. Copies happen at a random
// moment between their commit and the wait for them. What eight threads load together must come from all banks: a
// conflict, which only makes a GPU slower, is an error.
#pragma once
#include <elements.cuh>

inline float reciprocal_fast(float x) { return 1 / x; }
inline int thread_index() { return threadIdx.x; }
inline int lane_index() { return threadIdx.x % 32; }
inline int block_index() { return blockIdx.x; }
inline void store_global(void* destination, uint4 values) { *(uint4*)destination = values; }

namespace whole_warp {

// One time in so many, this thread's warp falls behind the others.
inline void may_fall_behind(int times) {
    if (emulator::thread % 32 || emulator::random_bits() % times) return;
    for (int turns = emulator::random_bits() % 256; turns > 0; turns--) emulator::yield();
}

}  // namespace whole_warp

inline void block_sync(int barrier, int threads) { emulator::meet(400, barrier, threads); }
inline void block_arrive(int barrier, int threads) { emulator::arrive(400, barrier, threads); }
inline uint32_t multiply_add(uint32_t a, uint32_t b, uint32_t c) {
    uint32_t result = 0;
    for (int shift = 0; shift < 32; shift += 16) {
        const auto number = [&](uint32_t pair) { return (double)unpack<Bfloat16>((uint16_t)(pair >> shift)); };
        result |= (uint32_t)round_to<Bfloat16>((float)(number(a) * number(b) + number(c))) << shift;
    }
    return result;
}
inline uint32_t another(uint32_t x) { return x; }
inline void copy_async(uint32_t destination, const void* source, bool inside) {
    if (destination % 16 || (uintptr_t)source % 16) emulator::fail("a copy is not aligned");
    emulator::issue(emulator::Task::of([=] {
        uint4 bytes = {0, 0, 0, 0};
        if (inside) memcpy(&bytes, source, 16);
        store_shared(destination, bytes);
    }));
}
template <int Pending> void copies_wait() {
    whole_warp::may_fall_behind(2);
    emulator::complete(Pending);
}
inline void copies_commit() { emulator::commit(); }

namespace whole_warp {

using emulator::Brought;
inline Brought brought[emulator::MOST_THREADS / 32][32];
inline int arrived[emulator::MOST_THREADS / 32];

// The last thread of a warp to come executes the instruction for all of them.
template <class Instruction> void together(const Brought& mine, Instruction instruction, int line = 0) {
    const int lane = emulator::thread % 32, warp = emulator::warp_of_all();
    may_fall_behind(256);
    brought[warp][lane] = mine;
    if (++arrived[warp] == 32) {
        arrived[warp] = 0;
        instruction(brought[warp]);
    }
    emulator::meet(300 + emulator::thread / 32, 0, 32, line);
}

template <class Element> void multiply(const Brought (&warp)[32]) {
    emulator::multiply(warp, __is_same(Element, Bfloat16));
}

}  // namespace whole_warp

inline void load_matrices(uint32_t (&matrices)[4], uint32_t address, int line = __builtin_LINE()) {
    whole_warp::together({{}, {}, address, matrices}, [](auto& warp) { emulator::load_matrices(warp, false); }, line);
}
inline void load_matrices_transposed(uint32_t (&matrices)[4], uint32_t address, int line = __builtin_LINE()) {
    whole_warp::together({{}, {}, address, matrices}, [](auto& warp) { emulator::load_matrices(warp, true); }, line);
}
template <class Element> void multiply(float (&sums)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1, int line = __builtin_LINE()) {
    whole_warp::together({{a[0], a[1], a[2], a[3]}, {b0, b1}, 0, sums}, whole_warp::multiply<Element>, line);
}
template <class Element> void multiply_8(float (&sums)[4], uint32_t a0, uint32_t a1, uint32_t b, int line = __builtin_LINE()) {
    whole_warp::together({{a0, a1, 0, 0}, {b, 0}, 0, sums}, whole_warp::multiply<Element>, line);
}
inline void __syncwarp(int line = __builtin_LINE()) { emulator::meet(500 + emulator::thread / 32, 0, 32, line); }
inline uint32_t transpose(uint32_t matrix) {
    uint32_t result;
    whole_warp::together({{matrix}, {}, 0, &result}, [](auto& warp) {
        for (int lane = 0; lane < 32; lane++) {
            uint32_t pair = 0;
            for (int e = 0; e < 2; e++) {
                const int row = lane % 4 * 2 + e, column = lane / 4;
                pair |= (warp[row * 4 + column / 2].a[0] >> column % 2 * 16 & 0xFFFF) << e * 16;
            }
            *(uint32_t*)warp[lane].result = pair;
        }
    });
    return result;
}
