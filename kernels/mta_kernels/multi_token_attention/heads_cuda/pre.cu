// Scores x to exponentials, of all heads: convolution, then mixing to logits l, and what the softmax of each row needs.
//
//   l[h] = sum over g of mix[h, g] conv(x[g]),   out[h] = 2^(l[h] log2(e) - reference),
//   logsumexp[h, i] = log sum over visible j of exp(l[h, i, j])
//
// A unit of keys of a row of a head has its own reference: it and the sum of exponentials as stored are a piece of the row.
// `merge_pieces` adds pieces up, and finds the factor by which the exponentials of each become probabilities.
#include "mixed.cuh"

constexpr float LOG2_E = 1.44269504f, LOG_2 = 0.693147181f;
constexpr float LOWEST = -0x1.58p127f;  // the greatest logit of none: finite, so that no NaN comes of it
// Of exponentials over the first of a unit's logits, which need not be the greatest.
template <class Element> constexpr float LARGEST_SUM = 1e30f;
template <> constexpr float LARGEST_SUM<Half> = 3e4f;

struct Exponentials {
    Rounded rounded;
    float references[2], sums[2];  // of this lane's two heads

    DEVICE Exponentials(const Mixed& logits, bool first_is_seen) {
        if (first_is_seen) {  // near enough to the greatest, mostly
#pragma unroll
            for (int half = 0; half < 2; half++)
                references[half] = LOG2_E * __shfl_sync(~0u, logits.numbers[0][0][half * 2], lane_index() & ~3);
            sum(logits);
            if (!__any_sync(~0u, !(sums[0] + sums[1] < LARGEST_SUM<ELEMENT>))) return;
        }
#pragma unroll
        for (int half = 0; half < 2; half++) {
            float greatest = LOWEST;
#pragma unroll
            for (int i = 0; i < UNIT / 4; i++)
                greatest = fmaxf(greatest, logits.numbers[i / 4][i / 2 % 2][half * 2 + i % 2]);
#pragma unroll
            for (int other = 1; other < 4; other *= 2) greatest = fmaxf(greatest, __shfl_xor_sync(~0u, greatest, other));
            references[half] = LOG2_E * greatest;
        }
        sum(logits);
    }

private:
    DEVICE void sum(const Mixed& logits) {
        const uint32_t ones = pack<ELEMENT>(1, 1);
        float found[4] = {};  // of a head, in all columns
#pragma unroll
        for (int i = 0; i < UNIT / 16; i++) {
            Numbers e;
#pragma unroll
            for (int j = 0; j < 8; j++)
                e[j / 4][j % 4] = exp2_fast(fmaf(logits.numbers[i][j / 4][j % 4], LOG2_E, -references[j % 4 / 2]));
            round_pairs(rounded.pairs[i], e);
            multiply<ELEMENT>(found, rounded.pairs[i], ones, ones);
        }
        sums[0] = found[0], sums[1] = found[2];
    }
};

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_AN_SM) pre_heads(const __grid_constant__ Arguments args) {
    const int warp = thread_index() / 32, tasks = Task::of_a_head(args), batch = block_index() / tasks;
    const Task task(args, batch * HEADS + min(warp, HEADS - 1), block_index() % tasks);
    if (!task.visible(args, 0)) return;
    if (warp < HEADS)
        return convolve_turns(
            args, task, spread_keys(), [](const Segment&, int, int) {}, [](const Segment&, uint32_t, int) {});
    const Weights pre(args.mix, HEADS, 1);
    const uint32_t rows = matrix_row();
    const int64_t head_stride = (int64_t)args.rows * args.pitch, first_head = batch * HEADS * head_stride;
    mix_turns(args, task, warp - HEADS, [&](const Unit& unit) {
        const Seen seen(args, unit.row);
        if (!unit.whole && (unit.key >= seen.end || unit.key + UNIT <= seen.start)) return;  // nobody reads these
        Mixed logits(pre, rows, unit.tile());
        if (!unit.whole) {
#pragma unroll
            for (int i = 0; i < UNIT / 2; i++)
                if (!seen.all(unit.key + Mixed::key(i / 8, i / 4 % 2, i % 2), 1))
                    logits.numbers[i / 8][i / 4 % 2][i % 4] = MINUS_INFINITY;
        }
        const Exponentials found(logits, unit.whole);
        found.rounded.store(args.out + (first_head + (int64_t)unit.row * args.pitch + unit.key), head_stride);
        float2* pieces = args.pieces + place_of_piece(args, batch, unit.key / UNIT, unit.row);
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int head = lane_index() / 4 + half * 8;
            if (lane_index() % 4 == half && head < HEADS) pieces[head] = {found.references[half], found.sums[half]};
        }
    });
}

// What the softmax needs of some logits: a reference, and the sum of 2^(logit - reference), both of binary logarithms.
struct Piece {
    float reference = LOWEST * LOG2_E, sum = 0;
    DEVICE void add(float of_other, float sum_of_other) {
        const float both = fmaxf(reference, of_other);
        sum = sum * exp2_fast(reference - both) + sum_of_other * exp2_fast(of_other - both);
        reference = both;
    }
};

// A block has a row of all heads, and a thread every GROUPS-th unit of a head.
constexpr int MERGE_THREADS = 128, GROUPS = MERGE_THREADS / HEADS;
extern "C" __global__ void __launch_bounds__(MERGE_THREADS) merge_pieces(const __grid_constant__ Arguments args) {
    const int row = block_index() % args.rows, batch = block_index() / args.rows;
    const int head = thread_index() % HEADS, group = thread_index() / HEADS;
    const Seen seen(args, row);
    const int first = seen.start / UNIT + group, end = group < GROUPS ? (seen.end + UNIT - 1) / UNIT : 0;
    const int64_t start = place_of_piece(args, batch, 0, row) + head, stride = (int64_t)args.rows * HEADS;
    Piece own, all;
#pragma unroll 4
    for (int unit = first; unit < end; unit += GROUPS) {
        const float2 found = args.pieces[start + unit * stride];
        own.add(found.x, found.y);
    }
    const uint32_t shared = shared_memory();
    store_shared(shared + thread_index() * 8, __float_as_uint(own.reference));
    store_shared(shared + thread_index() * 8 + 4, __float_as_uint(own.sum));
    __syncthreads();
#pragma unroll
    for (int i = 0; i < GROUPS; i++) {
        const uint32_t other = shared + (i * HEADS + head) * 8;
        all.add(__uint_as_float(load_shared(other)), __uint_as_float(load_shared(other + 4)));
    }
    const float log_sum = log2f(all.sum);
#pragma unroll 4
    for (int unit = first; unit < end; unit += GROUPS)
        args.factors[start + unit * stride] =
            Factor<ELEMENT>::stored(exp2_fast(args.pieces[start + unit * stride].x - all.reference - log_sum));
    if (group == 0 && row >= args.above && row < args.above + args.owned)
        args.logsumexp[((int64_t)batch * HEADS + head) * args.query_rows + args.first_row + row] =
            (all.reference + log_sum) * LOG_2;
}
