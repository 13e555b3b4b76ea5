// What these kernels need beyond C++: conversions, one product on the tensor cores, copies that run by themselves.
//
// NVRTC has no headers, so types and conversions are here. Tests compile the kernels with a twin of this file that runs
// them on a CPU (tests/emulator/instructions.cuh). Names of instructions follow the PTX ISA; all of them need sm_80.
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

DEVICE float exp2_fast(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

DEVICE char* shared_bytes() {
    extern __shared__ __align__(16) char bytes[];
    return bytes;
}

// Numbers of 16 bits: a tag type names the format, the bits travel as integers.

struct Half {};
struct Bfloat16 {};

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

// d += a b, 16 x 16 times 16 x 8, by the 32 threads of a warp. With g = lane / 4 and t = 2 (lane % 4) a thread holds
//   d: [g][t], [g][t + 1], [g + 8][t], [g + 8][t + 1]      b: rows t, t + 1 and then t + 8, t + 9 of column g
//   a: columns t, t + 1 of rows g and g + 8, then columns t + 8, t + 9 of the same
template <class Element> DEVICE void multiply_add(float* d, const uint32_t* a, const uint32_t* b);
#define MULTIPLY_ADD(Element, type)                                                                       \
    template <> DEVICE void multiply_add<Element>(float* d, const uint32_t* a, const uint32_t* b) {       \
        asm("mma.sync.aligned.m16n8k16.row.col.f32." type "." type ".f32 "                                \
            "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"                             \
            : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])                                              \
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));                          \
    }
MULTIPLY_ADD(Half, "f16")
MULTIPLY_ADD(Bfloat16, "bf16")
#undef MULTIPLY_ADD

// Operand b of two products from 16 rows of 16 numbers: `row` is in thread l the eight numbers of row l % 16 from column
// l / 16 * 8 on. b[0], b[1] are of the first eight columns, b[2], b[3] of the others.
DEVICE void load_columns(uint32_t (&b)[4], const uint16_t* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(b[0]), "=r"(b[1]), "=r"(b[2]), "=r"(b[3]) : "r"((uint32_t)__cvta_generic_to_shared(row))
                 : "memory");
}

// 16 bytes from memory to shared memory, or zeros; there once this thread has waited.
DEVICE void copy_16(void* shared, const void* memory, bool inside) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"((uint32_t)__cvta_generic_to_shared(shared)),
                 "l"(memory), "r"(inside ? 16 : 0) : "memory");
}
DEVICE void copies_wait() { asm volatile("cp.async.wait_all;" ::: "memory"); }
