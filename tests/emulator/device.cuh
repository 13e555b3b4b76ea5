// A CPU's twin of mta_kernels/conv_attention/hopper/device.cuh: the same functions, so that a kernel runs without a GPU, on
// the machine of machine.hpp.
#pragma once
#include <machine.hpp>
#include <numbers.cuh>

#define __device__
#define __global__
#define __forceinline__ inline
#define __grid_constant__
#define DEVICE inline
#define MAXIMUM_THREADS(threads)

struct alignas(16) uint4 {
    uint32_t x, y, z, w;
};
struct alignas(8) float2 {
    float x, y;
};

struct alignas(64) TensorMap {  // see machine.cpp
    char bytes[128];
};

template <class A, class B> auto min(A a, B b) { return b < a ? b : a; }
template <class A, class B> auto max(A a, B b) { return a < b ? b : a; }

inline void __syncthreads(int line = __builtin_LINE()) { emulator::meet(0, 0, emulator::block_size.x, line); }
template <class T> T __shfl_sync(uint32_t mask, T value, int from, int width = 32) {
    uint32_t bits;
    memcpy(&bits, &value, 4);
    bits = emulator::exchange(mask, bits, emulator::thread % 32 / width * width + from);
    memcpy(&value, &bits, 4);
    return value;
}
template <class T> T __shfl_xor_sync(uint32_t mask, T value, int other) {
    return __shfl_sync(mask, value, (emulator::thread % 32) ^ other);
}
inline int __any_sync(uint32_t mask, int predicate) {
    int any = predicate != 0;
    for (int lane = 1; lane < 32; lane *= 2) any |= __shfl_xor_sync(mask, any, lane);
    return any;
}

inline uint32_t finite(uint32_t halves) {
    for (int shift = 0; shift < 32; shift += 16)
        if ((halves >> shift & 0x7C00) == 0x7C00) halves = (halves & ~(0x7FFFu << shift)) | 0x7BFFu << shift;
    return halves;
}

inline float exp2_fast(float x) {
    const float y = exp2f(x);
    return y < 1.17549435e-38f ? 0 : y;  // ftz
}

inline uint32_t shared_memory() { return emulator::SHARED_START; }
inline void store_shared(uint32_t address, uint32_t value) { memcpy(emulator::shared_at(address, 4), &value, 4); }
inline uint32_t load_shared(uint32_t address) {
    uint32_t value;
    memcpy(&value, emulator::shared_at(address, 4), 4);
    return value;
}
inline void store_shared(uint32_t address, uint4 values) { memcpy(emulator::shared_at(address, 16), &values, 16); }
inline uint4 load_shared_16(uint32_t address) {
    uint4 values;
    memcpy(&values, emulator::shared_at(address, 16), 16);
    return values;
}
inline void store_matrices(uint32_t address, const uint32_t (&values)[4]) { emulator::store_matrices(address, values); }
inline void load_matrices(uint32_t (&values)[4], uint32_t address) { emulator::load_matrices(values, address); }
inline void fence_async_proxy() {}
inline void fence_async_proxy_everywhere() {}

inline void pingpong_wait(int warpgroup) { emulator::meet(102, warpgroup, 256); }
inline void pingpong_arrive(int warpgroup) { emulator::arrive(102, warpgroup, 256); }
inline bool warpgroup_any(int id, bool predicate) { return emulator::meet_any(100, id, 128, predicate); }
inline void warpgroup_barrier(int id) { emulator::meet(100, id, 128); }
inline int fetch_next(int* taken) { return (*taken)++; }
struct Queue {
    int taken, open;
};
inline int take_open(Queue& queue, int at_first) { return queue.open + at_first > 0 ? (queue.open--, queue.taken++) : -1; }
inline void open_more(Queue& queue, int numbers) { queue.open += numbers; }
inline bool wait_for_open(const Queue& one, int at_first, const Queue& other, int all) {
    emulator::wait_for_open(&one.taken, at_first, &other.taken, all);
    return one.taken + other.taken < all;
}
inline int arrive(int* counter) { return (*counter)++; }
inline void let_next_start() {}  // a launch begins when the one before has ended
inline void wait_for_launch_before() {}
inline void wait_for_count(const int* counter, int count) { emulator::wait_for_count(counter, count); }
template <int Registers> void deallocate_registers() {}
template <int Registers> void allocate_registers() {}

inline void barrier_init(uint32_t barrier, int arrivals) { emulator::barrier_init(barrier, arrivals); }
inline void barrier_init_done() {}
inline void barrier_arrive(uint32_t barrier) { emulator::barrier_arrive(barrier); }
inline void barrier_expect(uint32_t barrier, int bytes) { emulator::barrier_expect(barrier, bytes); }
inline void barrier_wait(uint32_t barrier, int parity) { emulator::barrier_wait(barrier, parity); }
inline bool barrier_done(uint32_t barrier, int parity) { return emulator::barrier_done(barrier, parity); }
inline void barrier_wait_asleep(uint32_t barrier, int parity) { barrier_wait(barrier, parity); }
inline void copy_tile(uint32_t destination, const TensorMap* map, uint32_t barrier, int x, int y, int z, int w) {
    emulator::copy_tile(destination, map, barrier, x, y, z, w);
}
inline void prefetch_map(const TensorMap*) {}
template <class... Coordinates> void stream_tile(uint32_t destination, const TensorMap* map, uint32_t barrier, Coordinates... at) {
    emulator::copy_tile(destination, map, barrier, at...);
}
inline void copy_bytes(uint32_t destination, const void* source, int bytes, uint32_t barrier) {
    emulator::copy_bytes(destination, source, bytes, barrier);
}

#define MINUS_INFINITY __uint_as_float(0xFF800000u)
constexpr float LN_2 = 0.69314718f, LOG2_E = 1.44269504f;

constexpr uint64_t NO_SWIZZLE = 0, SWIZZLE_128 = 1, SWIZZLE_64 = 2;
inline uint64_t operand(uint32_t address, uint32_t leading_bytes, uint32_t stride_bytes, uint64_t swizzle) {
    return (uint64_t)((address & 0x3FFFF) >> 4) | (uint64_t)(leading_bytes >> 4) << 16 |
           (uint64_t)(stride_bytes >> 4) << 32 | swizzle << 62;
}
inline uint64_t moved(uint64_t operand, int bytes) { return operand + (bytes >> 4); }
inline int opaque(int number) { return number; }
constexpr uint64_t bytes_on(int bytes) { return (uint64_t)(int64_t)(bytes >> 4); }

inline void products_begin() {}
inline void products_commit() { emulator::commit(); }
template <int Pending> void products_wait() {
    if (emulator::complete(Pending)) emulator::meet(101, emulator::thread / 128, 128);  // they complete for the whole warpgroup
}
template <int N> void products_wait_for(float (&)[N]) { products_wait<0>(); }
template <int Accumulators, class Element> struct Product {
    static void run(float (&accumulator)[Accumulators], uint64_t a, uint64_t b, bool accumulate) {
        issue({.accumulate = accumulate, .into = accumulator, .a = a, .b = b});
    }
    static void run_transposed(float (&accumulator)[Accumulators], uint64_t a, uint64_t b) {
        issue({.a_by_rows = true, .b_by_columns = true, .accumulate = true, .into = accumulator, .a = a, .b = b});
    }
    static void run_rows(float (&accumulator)[Accumulators], uint64_t a, uint64_t b) {
        issue({.a_by_rows = true, .accumulate = true, .into = accumulator, .a = a, .b = b});
    }
    static void run_values(float (&accumulator)[Accumulators], uint64_t a, uint64_t b) {
        issue({.b_by_columns = true, .accumulate = true, .into = accumulator, .a = a, .b = b});
    }
    static void run_registers(float (&accumulator)[Accumulators], const uint32_t* a, uint64_t b) {
        issue({.b_by_columns = true, .accumulate = true, .into = accumulator, .fragments = a, .b = b});
    }
    static void run_fragments(float (&accumulator)[Accumulators], const uint32_t (&a)[4], uint64_t b, bool accumulate) {
        issue({.accumulate = accumulate, .into = accumulator, .fragments = a, .b = b});
    }

  private:
    static void issue(emulator::Product product) {
        product.of_bfloat16 = __is_same(Element, Bfloat16), product.accumulators = Accumulators;
        emulator::issue(product);
    }
};
