// A CPU's twin of mta_kernels/conv_attention/cuda_decode/sm80_decode.cuh. Included as mma.cuh is.
#pragma once
#include <counters.cuh>
#include <mma.cuh>

struct alignas(8) float2 {
    float x, y;
};
struct alignas(8) uint2 {
    uint32_t x, y;
};
struct alignas(16) float4 {
    float x, y, z, w;
};

inline uint32_t __ballot_sync(uint32_t mask, bool predicate) {
    uint32_t votes = (uint32_t)predicate << emulator::thread % 32;
    for (int other = 1; other < 32; other *= 2) votes |= __shfl_xor_sync(mask, votes, other);
    return votes;
}
inline unsigned __reduce_add_sync(uint32_t mask, unsigned x) {
    for (int other = 1; other < 32; other *= 2) x += __shfl_xor_sync(mask, x, other);
    return x;
}
inline unsigned __reduce_max_sync(uint32_t mask, unsigned x) {
    for (int other = 1; other < 32; other *= 2) x = max(x, __shfl_xor_sync(mask, x, other));
    return x;
}
inline int __popc(uint32_t x) { return __builtin_popcount(x); }
template <class T> T __ldcg(const T* at) { return *at; }

inline float reciprocal_root(float x) { return 1 / __builtin_sqrtf(x); }
inline void ask_for(const void* source) { (void)*(const volatile char*)source; }  // there it must be

using ::store_shared;
inline float load_shared_float(uint32_t address) { return __uint_as_float(load_shared(address)); }
inline void store_shared(uint32_t address, float value) { store_shared(address, __float_as_uint(value)); }
inline void store_shared(uint32_t address, uint16_t value) { memcpy(emulator::shared_at(address, 2), &value, 2); }
inline void store_shared(uint32_t address, uint32_t first, uint32_t second) {
    const uint32_t both[2] = {first, second};
    memcpy(emulator::shared_at(address, 8), both, 8);
}
template <int Count> void load_floats(float (&x)[Count], uint32_t address) {
    memcpy(x, emulator::shared_at(address, 4 * Count), 4 * Count);
}
template <int Count> void store_floats(uint32_t address, const float (&x)[Count]) {
    memcpy(emulator::shared_at(address, 4 * Count), x, 4 * Count);
}
inline void copy_stream(uint32_t destination, const void* source, bool inside) {
    copy_async(destination, inside ? source : nullptr, inside);
}
