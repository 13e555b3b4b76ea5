// A CPU's twin of mta_kernels/multi_token_attention/tiles_cuda/tiles_instructions.cuh. Included as mma.cuh is.
#pragma once
#include <mma.cuh>

inline uint32_t another(uint32_t x) { return x; }
template <class Element> void multiply_8(float (&sums)[4], uint32_t a0, uint32_t a1, uint32_t b) {
    whole_warp::together({{a0, a1, 0, 0}, {b, 0}, 0, sums}, whole_warp::multiply<Element>);
}
