// A CPU's twin of mta_kernels/nvrtc/elements.cuh; see device.cuh here.
#pragma once
#include <device.cuh>

#define __launch_bounds__(...)
#define __shared__ static
#define __align__(bytes) __attribute__((aligned(bytes)))

inline float to_float(float x) { return x; }
inline float to_float(Half x) { return unpack<Half>(x.bits); }
inline float to_float(Bfloat16 x) { return unpack<Bfloat16>(x.bits); }

template <class Element> Element from_float(float x);
template <> inline float from_float<float>(float x) { return x; }
template <> inline Half from_float<Half>(float x) { return {round_to<Half>(x)}; }
template <> inline Bfloat16 from_float<Bfloat16>(float x) { return {round_to<Bfloat16>(x)}; }
