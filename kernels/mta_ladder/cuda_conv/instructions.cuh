// What these kernels need besides common.cuh: columns of an operand, asynchronous copies. All need sm_80.
//
// Tests compile the kernels with a twin of this file that runs them on a CPU (tests/emulator/instructions.cuh).
#pragma once
#include <common.cuh>

DEVICE char* shared_bytes() {
    extern __shared__ __align__(16) char bytes[];
    return bytes;
}

// Operand b of two products from 16 rows of 16 numbers: `row` is in thread l the eight numbers of row l % 16 from column
// l / 16 * 8 on. b[0], b[1] are of the first eight columns, b[2], b[3] of the others.
DEVICE void load_columns(uint32_t (&b)[4], const uint16_t* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(b[0]), "=r"(b[1]), "=r"(b[2]), "=r"(b[3]) : "r"((uint32_t)__cvta_generic_to_shared(row))
                 : "memory");
}

// Starts a copy of 16 bytes from memory to shared memory, or of zeros; complete after this thread's wait.
DEVICE void copy_16(void* shared, const void* memory, bool inside) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"((uint32_t)__cvta_generic_to_shared(shared)),
                 "l"(memory), "r"(inside ? 16 : 0) : "memory");
}
DEVICE void copies_wait() { asm volatile("cp.async.wait_all;" ::: "memory"); }
