// Instructions that the tile kernels need beside those of attention/mma.cuh. Tests run the kernels on a CPU with a twin,
// tests/emulator/tiles_instructions.cuh.
#pragma once
#include <mma.cuh>

// The same number, known to the compiler as one that no other register has.
DEVICE uint32_t another(uint32_t x) {
    asm volatile("" : "+r"(x));
    return x;
}

// To memory at a multiple of their size: the compiler would make four stores of one.
DEVICE void store_memory(void* at, uint4 x) {
    asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(at), "r"(x.x), "r"(x.y), "r"(x.z), "r"(x.w) : "memory");
}
DEVICE void store_memory(void* at, uint32_t x, uint32_t y) {
    asm volatile("st.global.v2.b32 [%0], {%1, %2};" ::"l"(at), "r"(x), "r"(y) : "memory");
}

// `multiply`, 8 deep: of a rows t / 4 and 8 further, of b column t / 4, two numbers from 2 (t % 4) on.
template <class Element> DEVICE void multiply_8(float (&sums)[4], uint32_t a0, uint32_t a1, uint32_t b);
template <> DEVICE void multiply_8<Half>(float (&sums)[4], uint32_t a0, uint32_t a1, uint32_t b) {
    asm("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};"
        : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
        : "r"(a0), "r"(a1), "r"(b));
}
template <> DEVICE void multiply_8<Bfloat16>(float (&sums)[4], uint32_t a0, uint32_t a1, uint32_t b) {
    asm("mma.sync.aligned.m16n8k8.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};"
        : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
        : "r"(a0), "r"(a1), "r"(b));
}
