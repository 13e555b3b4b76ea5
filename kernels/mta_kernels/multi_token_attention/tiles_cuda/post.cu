// Logits to mixed probabilities, of all heads: probabilities by the sums that pre.cu found, convolution, then mixing.
//
//   out[h] = sum over g of mix[g, h] conv(P[g]),   P[g] = 2^((logits[g] - reference) log2(e) - log2(sum))
//
// A step is as pre.cu's, with powers of two of the halo too (1200 cycles), and once more through shared memory (600).
#include "pipeline.cuh"

struct Nothing {};

extern "C" __global__ void __launch_bounds__(THREADS, 1) post_tiles(const __grid_constant__ Arguments args) {
    Nothing sums[ROWS_A_WARP][BLOCKS][2];
    run_steps(
        args, sums,
        [&](const Tick& tick, Nothing, ELEMENT* place, const Seen& seen, int column, const uint32_t(&pairs)[STEP]) {
            if (tick.shown) return store_pairs(place, pairs);
            if (column >= args.columns) return;
            uint32_t visible[STEP];
#pragma unroll
            for (int j = 0; j < STEP; j++) visible[j] = visible_pair(pairs[j], seen, column + 2 * j);
            store_pairs(place, visible);
        },
        [](const Tick&) {});
}
