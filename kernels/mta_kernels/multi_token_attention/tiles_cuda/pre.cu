// Scores to logits, of all heads: convolution, then mixing, and what of each row's softmax goes over all its columns.
//
//   logits[h] = sum over g of mix[h, g] conv(scores[g]),   logsumexp[h, i] = log sum over visible j of exp(logits[h, i, j])
//
// Sums are of the logits as stored, so that probabilities that are computed from these add up to one. Each block has
// the sums of its own steps, `merge_statistics` adds them up.
//
// A score takes 2 bytes read, times 1 + HALO / ROWS, and 2 written: 4 bytes of memory if the halo is still in L2. At 4.3
// TB/s an SM of 132 has 4.6 scores a cycle to do, or 3500 cycles for a step of 32 x 32 of 16 heads. It takes at 6 x 11
// taps, if a product 16 deep takes an SM 1.6 cycles and one 8 deep 1.07, of
//   tensor cores   16 x 48 products of each kind to convolve, 128 to mix                            2250 cycles
//   shared memory  84 cycles a head to load rows, 16 to store, 16 to mix, 18 to copy, 16 to write   2400
//   powers of two  8 x 2048 and more, 16 a cycle                                                    1050
//   instructions   about 650 of each warp, 4 a cycle                                                2600
#include "pipeline.cuh"

// The sum of 2^exponent(x, reference) of some logits x.
struct Sums {
    float reference, sum;
    DEVICE void move(float to) { sum *= exp2_fast(exponent(reference, to)), reference = to; }
    DEVICE void add(Sums other) {
        const float both = fmaxf(reference, other.reference);
        move(both), other.move(both);
        sum += other.sum;
    }
};

DEVICE float sum_of(const float (&x)[STEP * 2], float reference) {
    float sum = exp2_fast(exponent(x[0], reference));
#pragma unroll
    for (int i = 1; i < STEP * 2; i++) sum += exp2_fast(exponent(x[i], reference));
    return sum;
}

// The reference need not be the greatest: it moves when what comes is far greater, as after no logits.
DEVICE void add_logits(Sums& sums, const uint32_t (&pairs)[STEP], bool shown, const Seen& seen, int column) {
    float x[STEP * 2];
#pragma unroll
    for (int i = 0; i < STEP * 2; i++) x[i] = number_of(pairs[i / 2], i % 2);
    if (!shown) {
#pragma unroll
        for (int i = 0; i < STEP * 2; i++)
            if (!seen.all(column + i, 1)) x[i] = MINUS_INFINITY;
    }
    float sum = sum_of(x, sums.reference);
    if (!(sum < 1e9f)) {
        float greatest = sums.reference;
#pragma unroll
        for (int i = 0; i < STEP * 2; i++) greatest = fmaxf(greatest, x[i]);
        sums.move(greatest);
        sum = sum_of(x, greatest);
    }
    sums.sum += sum;
}

DEVICE int64_t place_of_part(const Arguments& args, int part, int batch, int row_block) {
    return (((int64_t)part * args.batch + batch) * args.row_blocks + row_block) * ROWS * HEADS;
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) pre_tiles(const __grid_constant__ Arguments args) {
    const int lane = thread_index() % 32, warp = WARPS - 1 - thread_index() / 32;
    Sums sums[ROWS_A_WARP][BLOCKS][2];
    const auto clear = [&] {
#pragma unroll
        for (int i = 0; i < ROWS_A_WARP * BLOCKS * 2; i++) sums[i / 2 / BLOCKS][i / 2 % BLOCKS][i % 2] = {LOWEST, 0};
    };
    clear();
    run_steps(
        args, sums,
        [&](const Tick& tick, Sums& of_row, ELEMENT* place, const Seen& seen, int column, const uint32_t(&pairs)[STEP]) {
            if (tick.shown || column < args.columns) store_pairs(place, pairs);
            add_logits(of_row, pairs, tick.shown, seen, column);
        },
        [&](const Tick& tick) {
            int first = tick.batch * args.steps;  // of these rows, among all steps
            for (int i = 0; i < tick.row_block; i++) first += steps_of(args, i);
            const int part = block_index() - first / args.run;
            float2* partial = args.partial + place_of_part(args, part, tick.batch, tick.row_block);
#pragma unroll
            for (int i = 0; i < ROWS_A_WARP * BLOCKS * 2; i++) {
                Sums found = sums[i / 2 / BLOCKS][i / 2 % BLOCKS][i % 2];
#pragma unroll
                for (int other = 1; other < 4; other *= 2)
                    found.add({__shfl_xor_sync(~0u, found.reference, other), __shfl_xor_sync(~0u, found.sum, other)});
                const int slot = i / 2 / BLOCKS * WARPS + warp, head = i / 2 % BLOCKS * 16 + i % 2 * 8 + lane / 4;
                if (lane % 4 == 0 && slot < ROWS && head < HEADS)
                    partial[row_of(slot) * HEADS + head] = {found.reference, found.sum};
            }
            clear();
        });
}

// A thread has a row of a head: what the blocks that had its visible steps found of it.
extern "C" __global__ void __launch_bounds__(128) merge_statistics(const __grid_constant__ Arguments args) {
    const int64_t index = (int64_t)block_index() * 128 + thread_index();
    if (index >= (int64_t)args.batch * args.rows * HEADS) return;
    const int head = index % HEADS, row = index / HEADS % args.rows, batch = index / HEADS / args.rows;
    const int row_block = row / ROWS;
    int first = batch * args.steps;
    for (int i = 0; i < row_block; i++) first += steps_of(args, i);
    const Visible visible(args, row_block);
    Sums sums = {LOWEST, 0};
    const int start = first + visible.first, end = first + visible.end;
    for (int block = start / args.run; start < end && block * args.run < end; block++) {
        const int part = block - first / args.run;
        const float2 found = args.partial[place_of_part(args, part, batch, row_block) + row % ROWS * HEADS + head];
        sums.add({found.x, found.y});
    }
    const float log_sum = log2f(sums.sum);
    args.statistics[((int64_t)batch * HEADS + head) * args.rows + row] = {sums.reference, log_sum};
    args.logsumexp[batch * args.logsumexp_batch + head * args.logsumexp_head + row * args.logsumexp_row] =
        fmaf(log_sum, LOG_2, sums.reference);
}
