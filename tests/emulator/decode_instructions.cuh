// A CPU's twin of mta_kernels/multi_token_attention/decode_cuda/decode_instructions.cuh. One kernel runs at a time.
#pragma once
#include <sm80_decode.cuh>

inline void let_next_kernel_begin() {}
inline void wait_for_kernel_before() {}
inline void ask_for(const void*) {}
