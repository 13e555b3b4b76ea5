// Recomputes for the backward, from scores x of all heads: the convolved scores, and the forward's probabilities from these.
//
//   convolved[g] = conv(x[g]),   out[h] = exp(sum over g of mix[h, g] convolved[g] - logsumexp[h]),
//
// zeros at keys that a row does not see; and the sums of `out` as stored, of each unit. A score takes 6 bytes of memory.
#include "mixed.cuh"

#include "softmax.cuh"

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_AN_SM)
    rebuild_probabilities(const __grid_constant__ Arguments args) {
    const int warp = thread_index() / 32;
    if (warp < HEADS)
        return convolve_tasks(args, warp, [&](const Tasks& tasks, const Task& task) {
            if (tasks.is_last_of_row(args))
                store_zeros_behind(args, task, args.out), store_zeros_behind(args, task, args.convolved);
        });
    int turns = 0;
    deallocate_registers();
    const Weights pre(args.mix, HEADS, 1);
    const uint32_t rows = matrix_row(), ones = pack<ELEMENT>(1, 1);
    const int half = lane_index() % 4, head = lane_index() / 4 + half * 8;
    const bool keeps_sum = half < 2 && head < HEADS;
#pragma unroll 1
    for (Tasks tasks(args); tasks.exist(args); tasks.next(args)) {
        const Destination destination(args, tasks.batch);
        float* const sums = args.sums + place_of_piece(args, tasks.batch, 0, 0) + head;
        turns = mix_turns(args, tasks.of_head(args, 0), warp - HEADS, turns, [&](const Unit& unit) {
            if (!unit.whole && unit.key >= stored_end(args, unit.row)) return;
            const Seen seen(args, unit.row);
            const Softmax softmax(args, tasks.batch, unit.row);
            const uint32_t tile = unit.tile() + rows;
            const int64_t place = (int64_t)unit.row * args.pitch + unit.key;
            float found[4] = {};  // of a head, the same in all columns
            const auto compute = [&](auto whole) {
#pragma unroll
                for (int first = 0; first < UNIT; first += AT_ONCE) {
                    Mixed numbers(pre, tile + first * 2);
                    uint32_t pairs[2][4];
#pragma unroll
                    for (int i = 0; i < 2; i++) {
#pragma unroll
                        for (int j = 0; j < 8; j++) {
                            float& x = numbers.numbers[i][j / 4][j % 4];
                            const float p = softmax.probability(x, j % 4 / 2);
                            x = whole.value || seen.all(unit.key + first + Mixed::key(i, j / 4, j % 2), 1) ? p : 0;
                        }
                        round_pairs(pairs[i], numbers.numbers[i]);
                        multiply<ELEMENT>(found, pairs[i], ones, ones);
                    }
                    destination.store(place + first, pairs);
                    Mixed::load(pairs, tile + first * 2);
                    destination.store(place + first + (args.convolved - args.out), pairs);  // at the same place
                }
            };
            if (unit.whole) compute(Constant<true>());
            else compute(Constant<false>());
            if (keeps_sum) sums[((int64_t)(unit.key / UNIT) * args.rows + unit.row) * HEADS] = half ? found[2] : found[0];
        });
    }
}
