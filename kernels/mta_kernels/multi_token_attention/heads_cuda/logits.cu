// Replaces `grad`, the gradient of the probabilities, by the gradient of the convolved scores x:
//
//   p = exp(pre(x) - logsumexp - residual),   dl = p (grad - delta),   grad[g] := sum over h of pre[h, g] dl[h],
//   dpre[h, g] += sum over keys and owned rows of dl[h] x[g]
//
// A score takes 6 bytes of memory.
#include "tiles.cuh"

#include "softmax.cuh"

extern "C" __global__ void __launch_bounds__(32, BLOCKS_AN_SM) differentiate_logits(const __grid_constant__ Arguments args) {
    const Weights pre(args.mix, HEADS, 1), back(args.mix, 1, HEADS);
    const uint32_t rows = matrix_row();
    ScaledProducts dpre;
    for_tiles(
        args,
        [&](const Tiles& tiles, uint32_t tile) {
            const Seen seen(args, tiles.row);
            Softmax softmax(args, tiles.batch, tiles.row);
            softmax.residual = OfRow(args.residual, tiles.batch, args.rows, tiles.row);
            const OfRow delta(args.delta, tiles.batch, args.rows, tiles.row);
            const bool owned = tiles.row >= args.above && tiles.row < args.above + args.owned;
            if (owned) dpre.begin_row(gradient_unit(args, tiles.batch, tiles.row));
            const auto compute = [&](auto whole) {
#pragma unroll
                for (int first = 0; first < KEYS; first += 16) {
                    const uint32_t x = tile + first * 2, grad = x + TILE;
                    uint32_t scores[4], gradients[4], dl[4], turned[4];
                    load_matrices_transposed(scores, x + rows);
                    load_matrices(gradients, grad + rows);
                    Numbers numbers;
                    mix(numbers, pre, scores);
                    softmax.probabilities<whole.value>(numbers, seen, tiles.key + first);
#pragma unroll
                    for (int i = 0; i < 8; i++) {
                        const int half = i % 4 / 2, key = tiles.key + first + i / 4 * 8 + lane_index() % 4 * 2 + i % 2;
                        float& p = numbers[i / 4][i % 4];
                        const float d = p * (number_of(gradients[i / 4 * 2 + half], i % 2) - delta.numbers[half]);
                        p = whole.value || seen.all(key, 1) ? d : 0;  // zero in a row of NaN, too
                    }
                    round_pairs(dl, numbers);
                    if (owned) {
                        load_matrices(scores, x + rows);
                        dpre.add(dl, scores);
                    }
#pragma unroll
                    for (int i = 0; i < 4; i++) turned[i] = transpose(dl[i]);
                    mix(numbers, back, turned);
                    round_pairs(dl, numbers);
                    store_pairs(grad, dl);
                }
            };
            if (seen.all(tiles.key, KEYS)) compute(Constant<true>());
            else compute(Constant<false>());
        },
        [&](int64_t place, uint32_t tile) {
            store_heads<KEYS>(args.grad + place, (int64_t)args.rows * args.pitch, tile + TILE);
        });
    float* part = args.parts + block_index() * HEADS * HEADS;
    dpre.for_all([&](int place, float sum) { part[place] += sum; });
}
