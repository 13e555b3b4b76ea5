// A CPU's twin of mta_kernels/attention/elements.cuh; see device.cuh here.
#pragma once
#include <device.cuh>

#define __launch_bounds__(...)
#define __shared__ static
#define __align__(bytes) __attribute__((aligned(bytes)))

struct float16 {
    uint16_t bits;
};
struct bfloat16 {
    uint16_t bits;
};

inline float to_float(float x) { return x; }
inline float to_float(float16 x) { return unpack<Half>(x.bits); }
inline float to_float(bfloat16 x) { return unpack<Bfloat16>(x.bits); }

template <class Element> Element from_float(float x);
template <> inline float from_float<float>(float x) { return x; }
template <> inline float16 from_float<float16>(float x) { return {round_to<Half>(x)}; }
template <> inline bfloat16 from_float<bfloat16>(float x) { return {round_to<Bfloat16>(x)}; }
