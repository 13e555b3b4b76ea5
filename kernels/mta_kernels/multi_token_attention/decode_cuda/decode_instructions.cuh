// An instruction of decode's kernels beside those of sm80_decode.cuh. Tests run the kernels on a CPU with a twin,
// tests/emulator/decode_instructions.cuh.
#pragma once
#include <sm80_decode.cuh>

// What lies here is on its way to the L2 cache.
DEVICE void ask_for(const void* address) { asm volatile("prefetch.global.L2 [%0];" ::"l"(address) : "memory"); }
