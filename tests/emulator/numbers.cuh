// Numbers of 16 bits: with device.cuh a CPU's twin of mta_kernels/nvrtc/common.cuh.
#pragma once
#include <stdint.h>

extern "C" {  // of <cmath> and <cstring>, which take the compiler as long as a kernel
float exp2f(float) noexcept, expf(float) noexcept, log2f(float) noexcept, ldexpf(float, int) noexcept;
float fabsf(float) noexcept, fmaf(float, float, float) noexcept, fmaxf(float, float) noexcept, fminf(float, float) noexcept;
float floorf(float) noexcept;
int ilogbf(float) noexcept;
void *memcpy(void*, const void*, decltype(sizeof(int))) noexcept, *memset(void*, int, decltype(sizeof(int))) noexcept;
}

struct Half {
    uint16_t bits;
};
struct Bfloat16 {
    uint16_t bits;
};

inline uint32_t __float_as_uint(float x) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    return bits;
}
inline float __uint_as_float(uint32_t bits) {
    float x;
    memcpy(&x, &bits, 4);
    return x;
}

template <class Element> float unpack(uint16_t bits);
template <> inline float unpack<Half>(uint16_t bits) {
    const float number = __uint_as_float((uint32_t)(bits & 0x7FFF) << 13) * 0x1p112f;  // the exponents' biases differ
    const uint32_t not_finite = (bits & 0x7C00) == 0x7C00 ? 0x7F800000u : 0;
    return __uint_as_float(__float_as_uint(number) | not_finite | (uint32_t)(bits & 0x8000) << 16);
}
template <> inline float unpack<Bfloat16>(uint16_t bits) { return __uint_as_float((uint32_t)bits << 16); }

template <class Element> uint16_t round_to(float x);
template <> inline uint16_t round_to<Half>(float x) {
    const _Float16 value = (_Float16)x;
    uint16_t bits;
    memcpy(&bits, &value, 2);
    return bits;
}
template <> inline uint16_t round_to<Bfloat16>(float x) {
    const uint32_t bits = __float_as_uint(x);
    return x != x ? 0x7FFF : (bits + 0x7FFF + (bits >> 16 & 1)) >> 16;
}
template <class Element> uint32_t pack(float low, float high) {
    return (uint32_t)round_to<Element>(high) << 16 | round_to<Element>(low);
}
