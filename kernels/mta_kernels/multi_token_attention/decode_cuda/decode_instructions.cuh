// Instructions of decode's kernels beside those of sm80_decode.cuh. Tests run the kernels on a CPU with a twin,
// tests/emulator/decode_instructions.cuh.
#pragma once
#include <sm80_decode.cuh>

// Programmatic dependent launch: a kernel takes its place while the one before it finishes, and waits for its results.
DEVICE void let_next_kernel_begin() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
DEVICE void wait_for_kernel_before() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// What lies here is on its way to the L2 cache.
DEVICE void ask_for(const void* address) { asm volatile("prefetch.global.L2 [%0];" ::"l"(address) : "memory"); }

#ifndef L2_BYTES
#define L2_BYTES 128
#endif
DEVICE void copy_row(uint32_t destination, const void* source, bool inside) {
#if L2_BYTES == 256
    asm volatile("cp.async.cg.shared.global.L2::256B [%0], [%1], 16, %2;" ::"r"(destination), "l"(source), "r"(inside ? 16 : 0) : "memory");
#elif L2_BYTES == 0
    copy_async(destination, source, inside);
#else
    copy_stream(destination, source, inside);
#endif
}
