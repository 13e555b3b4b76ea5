// Out from exponentials: the mixing after the softmax and the product with the values, in one pass over stored scores.
//
//   out_h[i] = sum_j (sum_g post[g, h] scale_g[i] E_g[i, j]) v_h[j]
//
// A cluster has a tile of ROWS query rows of all heads, and steps over the keys. Each block mixes its share of the rows for
// all heads, sends every other block the mixed probabilities of that block's heads, and multiplies all rows of its own heads
// by the values. So the cluster reads each exponential and each value once. Roles, with rings of stages between them:
//   producer warps   exponentials and values, by the copy engine
//   mixing warps     exponentials -> planes of mixed probabilities, here and in the other blocks
//   two consumers    planes x values -> sums, in registers
// The kernel does not read columns after the 64-column block with the tile's last visible key.
#include "values_mixing.cuh"
#include "values_products.cuh"

constexpr int CONSUMER_REGISTERS = 168, MIXING_REGISTERS = 120, PRODUCER_REGISTERS = 40;

DEVICE void copy_units(const Block& block, const TensorMap* map) {
#pragma unroll 1
    for (int unit = 0; unit < block.steps * GROUPS; unit++) {
        const uint32_t full = block.units.acquire(unit);
        barrier_expect(full, UNIT);
        copy_tile(block.shared + UNITS_AT + block.units.stage(unit) * UNIT, map, full, unit / GROUPS * KEYS, 0,
                  block.first_row + (block.rank * GROUPS + unit % GROUPS) * 8, block.sequence);
    }
}

DEVICE void copy_values(const Arguments& args, const Block& block, const TensorMap* map) {
#pragma unroll 1
    for (int step = 0; step < block.steps; step++) {
        const uint32_t full = block.values.acquire(step);
        barrier_expect(full, VALUES);
#pragma unroll
        for (int i = 0; i < OWN * SLABS; i++)
            copy_tile(block.shared + VALUES_AT + block.values.stage(step) * VALUES + i * SLAB, map, full, i % SLABS * 64, step * KEYS,
                      min(block.rank * OWN + i / SLABS, HEADS - 1) / args.group, block.sequence);
    }
}

extern "C" __global__ void IN_CLUSTERS __launch_bounds__(THREADS, 1) mix_values(
    const __grid_constant__ TensorMap exponentials, const __grid_constant__ TensorMap values, const __grid_constant__ Arguments args) {
    const Block block(args);
    const int warpgroup = __shfl_sync(~0u, thread_index() / 128, 0), thread = thread_index() % 128;
    if (thread_index() == 0) block.init_barriers();
    __syncthreads();
    cluster_barrier();  // a block must not send before the others' barriers exist
    if (warpgroup < CONSUMERS) {
        allocate_registers<CONSUMER_REGISTERS>();
        multiply_values(args, block, warpgroup, thread);
    } else if (warpgroup == CONSUMERS) {
        deallocate_registers<MIXING_REGISTERS>();
        mix_units(args, block);
    } else {
        deallocate_registers<PRODUCER_REGISTERS>();
        if (thread == 0) copy_units(block, &exponentials);
        if (thread == 32) copy_values(args, block, &values);
    }
    __syncwarp();
    cluster_barrier();  // a block must not end before its incoming data has arrived
}
