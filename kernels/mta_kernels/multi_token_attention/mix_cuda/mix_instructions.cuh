// Instructions that these kernels need besides the row kernels' and Hopper's: copies and arrivals from one block of a
// cluster to another. Tests run the kernels on a CPU with a twin, tests/emulator/mix_instructions.cuh. Names of
// instructions follow the PTX ISA, 8.5.
#pragma once
#include <rows_instructions.cuh>
#include <device.cuh>
#include <wgmma.cuh>

// Shared memory and mbarriers of block `rank` of the cluster, at the same address as in this block.

DEVICE uint32_t in_block(int rank, uint32_t address) {
    uint32_t there;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(address), "r"(rank));
    return there;
}
// Sends 16 bytes, counted by a barrier of that block.
DEVICE void send(int rank, uint32_t address, uint4 x, uint32_t barrier) {
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(
                     in_block(rank, address)), "r"(x.x), "r"(x.y), "r"(x.z), "r"(x.w), "r"(in_block(rank, barrier)) : "memory");
}
// Arrivals, by threads that wrote nothing for the waiting threads except what the barrier counts. A release to the
// cluster would need a fence of all memory, which waits until the thread's stores complete.
DEVICE void expect_in_block(int rank, uint32_t barrier, int bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cluster.b64 _, [%0], %1;" ::"r"(in_block(rank, barrier)), "r"(bytes) : "memory");
}
DEVICE void arrive_in_block(int rank, uint32_t barrier) {
    asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(in_block(rank, barrier)) : "memory");
}
// `copy_tile` to the same place in each block of the cluster whose bit is set in `blocks`, counted by each block's barrier.
DEVICE void copy_tile_to_blocks(uint16_t blocks, uint32_t destination, const TensorMap* map, uint32_t barrier, int x, int y, int z,
                                int w) {
    asm volatile(
        "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster "
        "[%0], [%1, {%3, %4, %5, %6}], [%2], %7;" ::"r"(destination), "l"(map), "r"(barrier), "r"(x), "r"(y), "r"(z), "r"(w),
        "h"(blocks) : "memory");
}
// Copies bytes of this block's shared memory, in units of 16, counted by a barrier of that block.
DEVICE void copy_to_block(int rank, uint32_t destination, uint32_t source, int bytes, uint32_t barrier) {
    asm volatile("cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                     in_block(rank, destination)), "r"(source), "r"(bytes), "r"(in_block(rank, barrier)) : "memory");
}
