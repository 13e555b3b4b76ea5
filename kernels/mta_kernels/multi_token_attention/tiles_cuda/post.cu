// Logits to mixed probabilities, of all heads: softmax by the sums that pre.cu found, convolution, then mixing.
//
//   out[h] = sum over g of mix[g, h] conv(P[g]),   P[g] = 2^((logits[g] - maximum) log2(e) - log2(sum))
//
// A step is as pre.cu's; its powers of two are of the halo too: 0.07 cycles a score, and 0.04 more of shared memory.
#include "pipeline.cuh"

extern "C" __global__ void __launch_bounds__(THREADS, 1) post_tiles(const __grid_constant__ Arguments args) {
    const int lane = thread_index() % 32;
    run_steps(
        args,
        [&](const Tick& tick, int i, int to, int half, int row, int head, const Seen& seen, const uint32_t(&pairs)[STEP]) {
            const int column = tick.step * COLUMNS + lane % 4 * STEP * 2;
            if (column >= args.columns) return;
            const bool all = seen.all(column, STEP * 2);
            uint32_t shown[STEP];
#pragma unroll
            for (int j = 0; j < STEP; j++) shown[j] = all ? pairs[j] : visible_pair(pairs[j], seen, column + 2 * j);
            store_pairs(args.out.at(tick.batch, head, row) + column, shown);
        },
        [](const Tick&) {});
}
