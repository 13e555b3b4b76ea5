// A CPU's twin of mta_kernels/multi_token_attention/tiles_cuda/tiles_instructions.cuh. Included as mma.cuh is.
#pragma once
#include <mma.cuh>

inline void store_memory(void* at, uint4 x) { *(uint4*)at = x; }
inline void store_memory(void* at, uint32_t x, uint32_t y) {
    if ((uintptr_t)at % 8) emulator::fail("a store of 8 bytes is not aligned");
    const uint32_t both[2] = {x, y};
    memcpy(at, both, 8);
}
