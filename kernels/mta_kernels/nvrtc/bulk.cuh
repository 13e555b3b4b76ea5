// Instructions of sm_90 that CUDA sources of several folders need: mbarriers, and copies in bulk that they count.
//
// The emulator of the tests has these functions in tests/emulator/device.cuh. Names of instructions follow the PTX ISA,
// 8.5.
#pragma once
#include <common.cuh>

// Stores four matrices as `load_matrices` loads them. Of 16 x 16 numbers they are in the order of columns, as operand A
// of a product.
DEVICE void store_matrices(uint32_t address, const uint32_t (&values)[4]) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(values[0]),
                 "r"(values[1]), "r"(values[2]), "r"(values[3]) : "memory");
}
DEVICE void fence_async_proxy() {  // ordinary stores before it are seen by the copy engine and by wgmma
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// mbarrier: arrivals and bytes that complete a phase.

DEVICE void barrier_init(uint32_t barrier, int arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals));
}
DEVICE void barrier_init_done() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
DEVICE void barrier_expect(uint32_t barrier, int bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}
DEVICE void barrier_arrive(uint32_t barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
DEVICE void barrier_wait(uint32_t barrier, int parity) {  // until the phase of that parity has completed
    asm volatile(
        "{\n"
        ".reg .pred done;\n"
        "again: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
        "@!done bra again;\n"
        "}" ::"r"(barrier), "r"(parity) : "memory");
}

DEVICE void copy_bytes(uint32_t destination, const void* source, int bytes, uint32_t barrier) {  // in units of 16
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(destination),
                 "l"(source), "r"(bytes), "r"(barrier) : "memory");
}
