// A CPU's twin of mta_kernels/multi_token_attention/decode_cuda/decode_instructions.cuh.
#pragma once
#include <sm80_decode.cuh>

inline void ask_for(const void*) {}
