// Probabilities out = exp(pre(x) - logsumexp) of convolved scores x, zeros at keys that a row does not see, and the
// sums of these as stored, for each segment of a row.
//
// A score takes 4 bytes of memory.
#include "tiles.cuh"

#include "softmax.cuh"

extern "C" __global__ void __launch_bounds__(32, BLOCKS_AN_SM) mix_probabilities(const __grid_constant__ Arguments args) {
    const Weights pre(args.mix, HEADS, 1);
    const uint32_t rows = matrix_row();
    float sums[2] = {};
    for_tiles(
        args,
        [&](const Tiles& tiles, uint32_t tile) {
            const Seen seen(args, tiles.row);
            const Softmax softmax(args, tiles.batch, tiles.row);
            const auto compute = [&](auto whole) {
#pragma unroll
                for (int first = 0; first < KEYS; first += 16) {
                    uint32_t scores[4], rounded[4];
                    load_matrices_transposed(scores, tile + rows + first * 2);
                    Numbers numbers;
                    mix(numbers, pre, scores);
                    softmax.probabilities<whole.value>(numbers, seen, tiles.key + first);
                    round_pairs(rounded, numbers);
                    store_pairs(tile + first * 2, rounded);
#pragma unroll
                    for (int i = 0; i < 4; i++) sums[i % 2] += number_of(rounded[i], 0) + number_of(rounded[i], 1);
                }
            };
            if (seen.all(tiles.key, KEYS)) compute(Constant<true>());
            else compute(Constant<false>());
            if (!tiles.is_last()) return;
#pragma unroll
            for (int i = 0; i < 2; i++) {
#pragma unroll
                for (int other = 1; other < 4; other *= 2) sums[i] += __shfl_xor_sync(~0u, sums[i], other);
                const int head = lane_index() / 4 + 8 * i;
                if (lane_index() % 4 == 0 && head < HEADS)
                    args.sums[(int64_t)tiles.row_of(args, head) * args.segments + tiles.task % args.segments] = sums[i];
                sums[i] = 0;
            }
        },
        [&](int64_t place, uint32_t tile) { store_heads<KEYS>(args.out + place, (int64_t)args.rows * args.pitch, tile); });
}
