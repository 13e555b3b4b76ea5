// Hopper's instructions as functions, so that a kernel reads as its algorithm.
//
// Tests compile the kernels with a twin of this file that runs them on a CPU (tests/emulator/device.cuh); kernels touch
// shared memory through these functions alone. Sections and names follow the PTX ISA, 8.5.
#pragma once
#include <bulk.cuh>
#include <counters.cuh>

#define MAXIMUM_THREADS(threads) __launch_bounds__(threads, 1)

struct alignas(64) TensorMap {  // CUtensorMap
    char bytes[128];
};

DEVICE void fence_async_proxy_everywhere() {  // `fence_async_proxy`, and of global memory: by the writing and the copying thread
    asm volatile("fence.proxy.async;" ::: "memory");
}

// Threads.

DEVICE void warpgroup_barrier(int id) { asm volatile("bar.sync %0, 128;" ::"r"(id) : "memory"); }
DEVICE bool warpgroup_any(int id, bool predicate) {  // `warpgroup_barrier`, and whether it holds for any of the threads
    int any;
    asm volatile(
        "{\n"
        ".reg .pred p, q;\n"
        "setp.ne.s32 p, %1, 0;\n"
        "bar.red.or.pred q, %2, 128, p;\n"
        "selp.s32 %0, 1, 0, q;\n"
        "}" : "=r"(any) : "r"((int)predicate), "r"(id) : "memory");
    return any;
}
// Ping-pong of two warp groups: each waits for its phase, and starts the other's.
DEVICE void pingpong_wait(int warpgroup) { asm volatile("bar.sync %0, 256;" ::"r"(4 + warpgroup) : "memory"); }
DEVICE void pingpong_arrive(int warpgroup) { asm volatile("bar.arrive %0, 256;" ::"r"(4 + warpgroup) : "memory"); }
template <int Registers> DEVICE void deallocate_registers() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(Registers));
}
template <int Registers> DEVICE void allocate_registers() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(Registers));
}

// mbarriers, besides the functions of bulk.cuh.

DEVICE bool barrier_done(uint32_t barrier, int parity) {  // whether the phase of that parity has completed
    uint32_t done;
    asm volatile(
        "{\n"
        ".reg .pred p;\n"
        "mbarrier.test_wait.parity.shared::cta.b64 p, [%1], %2;\n"
        "selp.u32 %0, 1, 0, p;\n"
        "}" : "=r"(done) : "r"(barrier), "r"(parity) : "memory");
    return done;
}

DEVICE void barrier_wait_asleep(uint32_t barrier, int parity) {  // for long waits: polling takes issue slots
    uint32_t done = 0;
    while (true) {
        asm volatile(
            "{\n"
            ".reg .pred p;\n"
            "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
            "selp.u32 %0, 1, 0, p;\n"
            "}" : "=r"(done) : "r"(barrier), "r"(parity) : "memory");
        if (done) return;
        asm volatile("nanosleep.u32 500;");
    }
}

// The copy engine (TMA): the box of `map` at coordinates x (innermost), y, z, w; zeros outside the tensor.

DEVICE void copy_tile(uint32_t destination, const TensorMap* map, uint32_t barrier, int x, int y, int z, int w) {
    asm volatile(
        "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
        "[%0], [%1, {%3, %4, %5, %6}], [%2];" ::"r"(destination), "l"(map), "r"(barrier), "r"(x), "r"(y), "r"(z), "r"(w)
        : "memory");
}
DEVICE void prefetch_map(const TensorMap* map) { asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory"); }
// `copy_tile`, of four or five dimensions, of memory that is read once: it leaves the cache first.
constexpr uint64_t EVICT_FIRST = 0x12F0000000000000;
DEVICE void stream_tile(uint32_t destination, const TensorMap* map, uint32_t barrier, int x, int y, int z, int w) {
    asm volatile(
        "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint "
        "[%0], [%1, {%3, %4, %5, %6}], [%2], %7;" ::"r"(destination), "l"(map), "r"(barrier), "r"(x), "r"(y), "r"(z), "r"(w),
        "l"(EVICT_FIRST) : "memory");
}
DEVICE void stream_tile(uint32_t destination, const TensorMap* map, uint32_t barrier, int x, int y, int z, int w, int v) {
    asm volatile(
        "cp.async.bulk.tensor.5d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint "
        "[%0], [%1, {%3, %4, %5, %6, %7}], [%2], %8;" ::"r"(destination), "l"(map), "r"(barrier), "r"(x), "r"(y), "r"(z),
        "r"(w), "r"(v), "l"(EVICT_FIRST) : "memory");
}
// wgmma: 64 rows of A times columns of B, 16 deep, by the 128 threads of a warpgroup. See `Product` in wgmma.cuh, which
// source.py generates for the shapes that a kernel uses. Its `wgmma_header` describes which number a thread holds.

DEVICE void products_begin() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
DEVICE void products_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int Pending> DEVICE void products_wait() {  // until at most so many committed groups are pending
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(Pending) : "memory");
}

// Until `sums` are complete. The compiler believes that they are so before, and would copy them to other registers.
template <int N> DEVICE void products_wait_for(float (&sums)[N]) {
    products_wait<0>();
#pragma unroll
    for (int i = 0; i < N; i++) asm volatile("" : "+f"(sums[i])::"memory");
}

constexpr uint64_t NO_SWIZZLE = 0, SWIZZLE_128 = 1, SWIZZLE_64 = 2;
DEVICE uint64_t operand(uint32_t address, uint32_t leading_bytes, uint32_t stride_bytes, uint64_t swizzle) {
    return (uint64_t)((address & 0x3FFFF) >> 4) | (uint64_t)(leading_bytes >> 4) << 16 |
           (uint64_t)(stride_bytes >> 4) << 32 | swizzle << 62;
}
// The same operand so many bytes on. The compiler does not see how it was computed, and keeps it as one number.
DEVICE uint64_t moved(uint64_t operand, int bytes) {
    operand += bytes >> 4;
    asm volatile("" : "+l"(operand));
    return operand;
}
// The same number. The compiler does not see how it was computed.
DEVICE int opaque(int number) {
    asm volatile("" : "+r"(number));
    return number;
}
DEVICE constexpr uint64_t bytes_on(int bytes) { return (uint64_t)(int64_t)(bytes >> 4); }  // to add to an operand
