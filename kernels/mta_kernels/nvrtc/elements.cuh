// The numbers that the CUDA kernels read and write, float, Half and Bfloat16, to float and back.
//
// Tests run the kernels on a CPU with a twin of this file, tests/emulator/elements.cuh.
#pragma once
#include <common.cuh>

DEVICE float to_float(float x) { return x; }
DEVICE float to_float(Half x) { return unpack<Half>(x.bits); }
DEVICE float to_float(Bfloat16 x) { return unpack<Bfloat16>(x.bits); }

template <class Element> DEVICE Element from_float(float x);
template <> DEVICE float from_float<float>(float x) { return x; }
template <> DEVICE Half from_float<Half>(float x) {
    Half rounded;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(rounded.bits) : "f"(x));
    return rounded;
}
template <> DEVICE Bfloat16 from_float<Bfloat16>(float x) {  // to the nearest, ties to even
    const uint32_t bits = __float_as_uint(x);
    return {x != x ? (uint16_t)0x7FFF : (uint16_t)((bits + 0x7FFF + (bits >> 16 & 1)) >> 16)};
}
