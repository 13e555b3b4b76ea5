// A CPU's twin of mta_kernels/multi_token_attention/mix_cuda/mix_instructions.cuh. Included as mma.cuh is.
#pragma once
#define CONFLICTS_ARE_ERRORS  // of banks, where matrices are stored
#include <rows_instructions.cuh>
#include <wgmma.cuh>

inline void send(int rank, uint32_t address, uint4 x, uint32_t barrier) {
    if (address % 16) emulator::fail("a store to another block is not aligned");
    emulator::send(CLUSTER, rank, address, &x, 16, barrier);
}
inline void expect_in_block(int rank, uint32_t barrier, int bytes) { emulator::barrier_expect(barrier, bytes, CLUSTER, rank); }
inline void arrive_in_block(int rank, uint32_t barrier) { emulator::barrier_arrive(barrier, CLUSTER, rank); }
inline void copy_tile_to_blocks(uint16_t blocks, uint32_t destination, const TensorMap* map, uint32_t barrier, int x, int y, int z,
                                int w) {
    emulator::copy_tile_to_blocks(CLUSTER, blocks, destination, map, barrier, x, y, z, w);
}
inline void copy_to_block(int rank, uint32_t destination, uint32_t source, int bytes, uint32_t barrier) {
    if (destination % 16 || source % 16 || bytes % 16) emulator::fail("a copy to another block is not aligned");
    emulator::copy_to_block(CLUSTER, rank, destination, source, bytes, barrier);
}
