// The instructions of sm_80 that cuda_flash.cu is made of, as functions: asynchronous copies, matrices from shared
// memory to registers, and products of 16 x 16 by 16 x 8 numbers on the tensor cores.
//
// Sections and names follow the PTX ISA, 8.5. Tests run the kernel on a CPU with a twin, tests/emulator/mma.cuh.
#pragma once
#include <elements.cuh>

// Two numbers of 16 bits in a register, the first in its lower half.

template <class Element> DEVICE uint32_t pack(float first, float second);
template <> DEVICE uint32_t pack<float16>(float first, float second) {
    uint32_t packed;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(second), "f"(first));
    return packed;
}
template <> DEVICE uint32_t pack<bfloat16>(float first, float second) {
    uint32_t packed;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(second), "f"(first));
    return packed;
}

DEVICE float exp2_fast(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

DEVICE float reciprocal_fast(float x) {
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// Which thread and block this is, asked anew at each call: the compiler keeps what follows from threadIdx in registers.

DEVICE int thread_index() {
    int index;
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(index));
    return index;
}
DEVICE int block_index() {
    int index;
    asm volatile("mov.u32 %0, %%ctaid.x;" : "=r"(index));
    return index;
}

// Shared memory, by 32-bit addresses.

DEVICE uint32_t shared_memory() {
    extern __shared__ __align__(128) char bytes[];
    return (uint32_t)__cvta_generic_to_shared(bytes);
}
DEVICE void store_shared(uint32_t address, uint32_t value) {
    asm volatile("st.shared.b32 [%0], %1;" ::"r"(address), "r"(value) : "memory");
}
DEVICE void store_shared(uint32_t address, uint4 values) {  // at a multiple of 16 bytes
    asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(values.x), "r"(values.y),
                 "r"(values.z), "r"(values.w) : "memory");
}
DEVICE uint4 load_shared_16(uint32_t address) {
    uint4 values;
    asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(values.x), "=r"(values.y), "=r"(values.z), "=r"(values.w) : "r"(address) : "memory");
    return values;
}

// Asynchronous copies (cp.async): a thread issues some, commits them as a group, and waits for its groups in order.

// 16 bytes from global to shared memory, both at multiples of 16 bytes; zeros, and nothing is read, if not `inside`.
DEVICE void copy_async(uint32_t destination, const void* source, bool inside) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(destination), "l"(source), "r"(inside ? 16 : 0)
                 : "memory");
}
DEVICE void copies_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int Pending> DEVICE void copies_wait() {  // until at most so many groups of this thread are under way
    asm volatile("cp.async.wait_group %0;" ::"n"(Pending) : "memory");
}

// Matrices of 8 x 8 numbers, by the 32 threads of a warp together: thread t gives the address of row t % 8 of matrix
// t / 8, 16 bytes, and gets numbers 2 (t % 4) and the next of row t / 4 of each matrix.
DEVICE void load_matrices(uint32_t (&matrices)[4], uint32_t address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(matrices[0]), "=r"(matrices[1]), "=r"(matrices[2]), "=r"(matrices[3])
                 : "r"(address) : "memory");
}
// The same of the transposed matrices: numbers 2 (t % 4) and the next of column t / 4.
DEVICE void load_matrices_transposed(uint32_t (&matrices)[4], uint32_t address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(matrices[0]), "=r"(matrices[1]), "=r"(matrices[2]), "=r"(matrices[3])
                 : "r"(address) : "memory");
}

// sums [16 x 8] += a [16 x 16] b [16 x 8], by the threads of a warp. Thread t holds, two numbers from 2 (t % 4) on:
//   sums  of row t / 4 in 0, 1 and of row t / 4 + 8 in 2, 3
//   a     of the same two rows in 0, 1, and eight columns further in 2, 3
//   b     of column t / 4 in 0, and eight rows further in 1
template <class Element>
DEVICE void multiply(float (&sums)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1);
template <>
DEVICE void multiply<float16>(float (&sums)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
template <>
DEVICE void multiply<bfloat16>(float (&sums)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
