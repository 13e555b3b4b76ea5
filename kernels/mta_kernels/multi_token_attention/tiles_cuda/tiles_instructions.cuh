// Instructions that the tile kernels need beside those of nvrtc/mma.cuh. Tests run the kernels on a CPU with a twin,
// tests/emulator/tiles_instructions.cuh.
#pragma once
#include <mma.cuh>

// To memory at a multiple of their size: the compiler would make four stores of one.
DEVICE void store_memory(void* at, uint4 x) {
    asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(at), "r"(x.x), "r"(x.y), "r"(x.z), "r"(x.w) : "memory");
}
DEVICE void store_memory(void* at, uint32_t x, uint32_t y) {
    asm volatile("st.global.v2.b32 [%0], {%1, %2};" ::"l"(at), "r"(x), "r"(y) : "memory");
}
