// A CPU's twin of mta_ladder/cuda_conv/instructions.cuh, on the fibers of device.cuh.
//
// Copies that run by themselves happen at once or when their thread waits, by chance, so that a missing wait shows as a
// wrong result for some seed.
#pragma once
#include <device.cuh>

#define __launch_bounds__(...)

struct alignas(16) float4 {
    float x, y, z, w;
};

inline char* shared_bytes() { return emulator::shared_memory(); }

inline float atomicAdd(float* at, float value) {
    const float before = *at;
    *at = before + value;
    return before;
}

namespace emulator {

constexpr int MEET_PRODUCT = 300, MEET_LOAD = 400;
inline float held[64][32][12];  // operands a and b of each thread of a warp, as numbers
inline const uint16_t* rows[64][32];

}  // namespace emulator

template <class Element> void multiply(float* sums, const uint32_t* a, uint32_t b0, uint32_t b1) {
    const int warp = emulator::thread / 32, lane = emulator::thread % 32;
    auto& held = emulator::held[warp];
    for (int i = 0; i < 6; i++) {
        const uint32_t pair = i < 4 ? a[i] : i == 4 ? b0 : b1;
        held[lane][2 * i] = unpack<Element>((uint16_t)pair), held[lane][2 * i + 1] = unpack<Element>((uint16_t)(pair >> 16));
    }
    emulator::meet(emulator::MEET_PRODUCT + warp, 0, 32);
    for (int i = 0; i < 4; i++) {
        const int row = lane / 4, column = lane % 4 * 2 + i % 2;
        for (int k = 0; k < 16; k++) {
            const int holder = k % 8 / 2, half = k / 8, odd = k % 2;
            sums[i] += held[row * 4 + holder][2 * (i / 2 + 2 * half) + odd] * held[column * 4 + holder][2 * (4 + half) + odd];
        }
    }
    emulator::meet(emulator::MEET_PRODUCT + warp, 1, 32);
}

inline void load_columns(uint32_t (&b)[4], const uint16_t* row) {
    const int warp = emulator::thread / 32, lane = emulator::thread % 32;
    emulator::rows[warp][lane] = row;
    emulator::meet(emulator::MEET_LOAD + warp, 0, 32);
    for (int i = 0; i < 4; i++) {
        const uint16_t* const* from = emulator::rows[warp] + i * 8 + lane % 4 * 2;
        b[i] = (uint32_t)from[1][lane / 4] << 16 | from[0][lane / 4];
    }
    emulator::meet(emulator::MEET_LOAD + warp, 1, 32);
}

inline void copy_16(void* shared, const void* memory, bool inside) {
    if ((uintptr_t)memory % 16 || (uintptr_t)shared % 16) emulator::fail("a copy of 16 bytes is not aligned to 16");
    auto copy = [=] {
        if (inside) memcpy(shared, memory, 16);
        else memset(shared, 0, 16);
    };
    if (emulator::coin()) copy();
    else emulator::issue(emulator::Task::of(copy));
}
inline void copies_wait() { emulator::do_issued(); }
