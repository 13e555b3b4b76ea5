// Instructions that decode.cu needs beside those of nvrtc/mma.cuh. Tests run the kernel on a CPU with a twin,
// tests/emulator/sm80_decode.cuh.
#pragma once
#include <mma.cuh>

DEVICE float load_shared_float(uint32_t address) { return __uint_as_float(load_shared(address)); }
DEVICE void store_shared(uint32_t address, float value) { store_shared(address, __float_as_uint(value)); }
DEVICE void store_shared(uint32_t address, uint16_t value) {
    asm volatile("st.shared.b16 [%0], %1;" ::"r"(address), "h"(value) : "memory");
}

// As `copy_async`, of what is read once and whose neighbours come next: memory gives 128 bytes at a time.
DEVICE void copy_stream(uint32_t destination, const void* source, bool inside) {
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(destination), "l"(source),
                 "r"(inside ? 16 : 0) : "memory");
}

// Adds 1, and returns what was there. What any thread of the block wrote before its last barrier is seen by whoever
// adds later, and by that block after its next barrier.
DEVICE int arrive(int* at) {
    int before;
    asm volatile("atom.acq_rel.gpu.global.add.s32 %0, [%1], 1;" : "=r"(before) : "l"(at) : "memory");
    return before;
}
