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
