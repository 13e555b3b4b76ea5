// The numbers that the CUDA kernels read and write, float, float16 and bfloat16, to float and back.
//
// Compiled by NVRTC, which has no headers, so types and conversions are here. Tests run the kernels on a CPU with a
// twin of this file, tests/emulator/elements.cuh.
#pragma once

#ifdef __CUDACC_RTC__
using uint16_t = unsigned short;
using uint32_t = unsigned int;
using int64_t = long long;
#else
#include <cstdint>
#endif

#define DEVICE __device__ __forceinline__
#define MINUS_INFINITY __uint_as_float(0xFF800000u)

struct float16 {
    uint16_t bits;
};
struct bfloat16 {
    uint16_t bits;
};

DEVICE float to_float(float x) { return x; }
DEVICE float to_float(float16 x) {
    float value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(x.bits));
    return value;
}
DEVICE float to_float(bfloat16 x) { return __uint_as_float((uint32_t)x.bits << 16); }

template <class Element> DEVICE Element from_float(float x);
template <> DEVICE float from_float<float>(float x) { return x; }
template <> DEVICE float16 from_float<float16>(float x) {
    float16 rounded;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(rounded.bits) : "f"(x));
    return rounded;
}
template <> DEVICE bfloat16 from_float<bfloat16>(float x) {  // to the nearest, ties to even
    const uint32_t bits = __float_as_uint(x);
    return {x != x ? (uint16_t)0x7FFF : (uint16_t)((bits + 0x7FFF + (bits >> 16 & 1)) >> 16)};
}
