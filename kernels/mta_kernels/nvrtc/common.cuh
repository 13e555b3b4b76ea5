// What every CUDA source needs: types, numbers of 16 bits, shared memory by 32-bit addresses, products of a warp.
//
// Compiled by NVRTC, which has no headers. The emulator of the tests has these functions in tests/emulator/numbers.cuh
// and device.cuh. Names of instructions follow the PTX ISA, 8.5.
#pragma once

#ifdef __CUDACC_RTC__
using uint16_t = unsigned short;
using uint32_t = unsigned int;
using uint64_t = unsigned long long;
using int64_t = long long;
#else
#include <cstdint>
#endif

#define DEVICE __device__ __forceinline__
#define MINUS_INFINITY __uint_as_float(0xFF800000u)
constexpr float LN_2 = 0.69314718f, LOG2_E = 1.44269504f;

// 16-bit numbers, in memory as they are; in registers their bits are integers, two numbers to a register.

struct Half {
    uint16_t bits;
};
struct Bfloat16 {
    uint16_t bits;
};

template <class Element> DEVICE uint32_t pack(float low, float high);
template <> DEVICE uint32_t pack<Half>(float low, float high) {
    uint32_t packed;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
    return packed;
}
template <> DEVICE uint32_t pack<Bfloat16>(float low, float high) {
    uint32_t packed;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
    return packed;
}

template <class Element> DEVICE float unpack(uint16_t bits);
template <> DEVICE float unpack<Half>(uint16_t bits) {
    float value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
    return value;
}
template <> DEVICE float unpack<Bfloat16>(uint16_t bits) { return __uint_as_float((uint32_t)bits << 16); }

// Two fp16 numbers: infinity and NaN become the largest number, the others stay.
DEVICE uint32_t finite(uint32_t halves) {
#if __CUDA_ARCH__ >= 860
    asm("min.xorsign.abs.f16x2 %0, %0, %1;" : "+r"(halves) : "r"(0x7BFF7BFFu));
#else
    asm("max.f16x2 %0, %0, %1;" : "+r"(halves) : "r"(0xFBFFFBFFu));
    asm("min.f16x2 %0, %0, %1;" : "+r"(halves) : "r"(0x7BFF7BFFu));
#endif
    return halves;
}

DEVICE float exp2_fast(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

DEVICE uint32_t shared_memory() {  // of a block, aligned for the copy engine's swizzles
    extern __shared__ __align__(1024) char bytes[];
    return (uint32_t)__cvta_generic_to_shared(bytes);
}
DEVICE void store_shared(uint32_t address, uint32_t value) {
    asm volatile("st.shared.b32 [%0], %1;" ::"r"(address), "r"(value) : "memory");
}
DEVICE uint32_t load_shared(uint32_t address) {
    uint32_t value;
    asm volatile("ld.shared.b32 %0, [%1];" : "=r"(value) : "r"(address) : "memory");
    return value;
}
DEVICE void store_shared(uint32_t address, uint4 values) {  // at a multiple of 16 bytes
    asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(values.x), "r"(values.y), "r"(values.z),
                 "r"(values.w) : "memory");
}
DEVICE uint4 load_shared_16(uint32_t address) {
    uint4 values;
    asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(values.x), "=r"(values.y), "=r"(values.z), "=r"(values.w) : "r"(address) : "memory");
    return values;
}
// Four 8 x 8 matrices of 16-bit numbers: lane 8 m + r passes the address of row r of matrix m, 16 bytes. A lane
// receives two numbers of each, columns 2 (lane % 4) and the next of row lane / 4.
DEVICE void load_matrices(uint32_t (&matrices)[4], uint32_t address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(matrices[0]), "=r"(matrices[1]), "=r"(matrices[2]), "=r"(matrices[3])
                 : "r"(address) : "memory");
}
// The same of the transposed matrices: the two numbers are of column lane / 4.
DEVICE void load_matrices_transposed(uint32_t (&matrices)[4], uint32_t address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(matrices[0]), "=r"(matrices[1]), "=r"(matrices[2]), "=r"(matrices[3])
                 : "r"(address) : "memory");
}

// sums [16 x 8] += a [16 x 16] b [16 x 8], by the threads of a warp. Thread t holds, two numbers from 2 (t % 4) on:
//   sums  of row t / 4 in 0, 1 and of row t / 4 + 8 in 2, 3
//   a     of the same two rows in 0, 1, and eight columns further in 2, 3
//   b     of column t / 4 in 0, and eight rows further in 1
template <class Element> DEVICE void multiply(float* sums, const uint32_t* a, uint32_t b0, uint32_t b1);
#define MULTIPLY(Element, type)                                                                                \
    template <> DEVICE void multiply<Element>(float* sums, const uint32_t* a, uint32_t b0, uint32_t b1) {      \
        asm("mma.sync.aligned.m16n8k16.row.col.f32." type "." type ".f32 "                                     \
            "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"                                  \
            : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])                                       \
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));                                   \
    }
MULTIPLY(Half, "f16")
MULTIPLY(Bfloat16, "bf16")
#undef MULTIPLY
