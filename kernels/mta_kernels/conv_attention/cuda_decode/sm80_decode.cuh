// Instructions that the decode kernels need besides mma.cuh and counters.cuh. Tests run them on a CPU with a twin,
// tests/emulator/sm80_decode.cuh.
#pragma once
#include <counters.cuh>
#include <mma.cuh>

DEVICE float load_shared_float(uint32_t address) { return __uint_as_float(load_shared(address)); }
DEVICE void store_shared(uint32_t address, float value) { store_shared(address, __float_as_uint(value)); }
DEVICE void store_shared(uint32_t address, uint16_t value) {
    asm volatile("st.shared.b16 [%0], %1;" ::"r"(address), "h"(value) : "memory");
}

DEVICE void store_shared(uint32_t address, uint32_t first, uint32_t second) {  // at a multiple of 8 bytes
    asm volatile("st.shared.v2.b32 [%0], {%1, %2};" ::"r"(address), "r"(first), "r"(second) : "memory");
}
// One, two or four contiguous numbers, at a multiple of their size.
template <int Count> DEVICE void load_floats(float (&x)[Count], uint32_t address) {
    static_assert(Count == 1 || Count == 2 || Count == 4);
    if constexpr (Count == 4)
        asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
                     : "=f"(x[0]), "=f"(x[1]), "=f"(x[2]), "=f"(x[3]) : "r"(address) : "memory");
    else if constexpr (Count == 2)
        asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(x[0]), "=f"(x[1]) : "r"(address) : "memory");
    else
        x[0] = load_shared_float(address);
}

template <int Count> DEVICE void store_floats(uint32_t address, const float (&x)[Count]) {
    if constexpr (Count == 4)
        store_shared(address, uint4{__float_as_uint(x[0]), __float_as_uint(x[1]), __float_as_uint(x[2]), __float_as_uint(x[3])});
    else if constexpr (Count == 2) store_shared(address, __float_as_uint(x[0]), __float_as_uint(x[1]));
    else store_shared(address, x[0]);
}

DEVICE float reciprocal_root(float x) {
    float y;
    asm("rsqrt.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// Prefetches 128 bytes of global memory into L2.
DEVICE void ask_for(const void* source) { asm volatile("prefetch.global.L2 [%0];" ::"l"(source)); }

// As `copy_async`, for data that is read once in sequence: it fetches 128 bytes from memory at a time.
DEVICE void copy_stream(uint32_t destination, const void* source, bool inside) {
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(destination), "l"(source),
                 "r"(inside ? 16 : 0) : "memory");
}
