// The instructions of sm_80 that sources of several folders need besides common.cuh, as functions: asynchronous copies
// above all.
//
// Sections and names follow the PTX ISA, 8.5. Tests run the kernel on a CPU with a twin, tests/emulator/mma.cuh.
#pragma once
#include <elements.cuh>

DEVICE float reciprocal_fast(float x) {
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// Thread and block indices, read anew at each call: the compiler would keep values derived from threadIdx in registers.

DEVICE int thread_index() {
    int index;
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(index));
    return index;
}
DEVICE int lane_index() {  // of a warp's 32
    int index;
    asm volatile("mov.u32 %0, %%laneid;" : "=r"(index));
    return index;
}
DEVICE int block_index() {
    int index;
    asm volatile("mov.u32 %0, %%ctaid.x;" : "=r"(index));
    return index;
}

// To global memory at a multiple of 16 bytes, as one store: the compiler may split the store of a structure into four.
DEVICE void store_global(void* destination, uint4 values) {
    asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(destination), "r"(values.x), "r"(values.y), "r"(values.z),
                 "r"(values.w) : "memory");
}

// Named barriers of a block, 1 to 15, for so many threads: a thread waits for all, or arrives and continues.
DEVICE void block_sync(int barrier, int threads) { asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory"); }
DEVICE void block_arrive(int barrier, int threads) {
    asm volatile("bar.arrive %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

// Asynchronous copies (cp.async): a thread issues some, commits them as a group, and waits for its groups in order.

// 16 bytes from global to shared memory, both at multiples of 16 bytes; zeros, without a read, if not `inside`.
DEVICE void copy_async(uint32_t destination, const void* source, bool inside) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(destination), "l"(source), "r"(inside ? 16 : 0)
                 : "memory");
}
DEVICE void copies_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int Pending> DEVICE void copies_wait() {  // until at most `Pending` groups of this thread are in flight
    asm volatile("cp.async.wait_group %0;" ::"n"(Pending) : "memory");
}

// `multiply` with depth 8: a has rows t / 4 and 8 further, b column t / 4; both two numbers from 2 (t % 4) on.
template <class Element> DEVICE void multiply_8(float (&sums)[4], uint32_t a0, uint32_t a1, uint32_t b);
template <> DEVICE void multiply_8<Half>(float (&sums)[4], uint32_t a0, uint32_t a1, uint32_t b) {
    asm("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};"
        : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
        : "r"(a0), "r"(a1), "r"(b));
}
template <> DEVICE void multiply_8<Bfloat16>(float (&sums)[4], uint32_t a0, uint32_t a1, uint32_t b) {
    asm("mma.sync.aligned.m16n8k8.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};"
        : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
        : "r"(a0), "r"(a1), "r"(b));
}

// a * b + c of two pairs of bfloat16, each rounded once.
DEVICE uint32_t multiply_add(uint32_t a, uint32_t b, uint32_t c) {
    uint32_t result;
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(result) : "r"(a), "r"(b), "r"(c));
    return result;
}

// The same number in a register that the compiler takes for another value.
DEVICE uint32_t another(uint32_t x) {
    asm volatile("" : "+r"(x));
    return x;
}

// The transpose of an 8 x 8 matrix that a warp holds: lane t holds numbers 2 (t % 4) and the next of row t / 4, before
// and after.
DEVICE uint32_t transpose(uint32_t matrix) {
    uint32_t result;
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(result) : "r"(matrix));
    return result;
}
