// Scores x to exponentials: convolution, then mixing of all heads to logits l, and each row's sums for the softmax.
//
//   l[h] = sum over g of mix[h, g] conv(x[g]),   out[h] = exp(l[h] - reference),
//   logsumexp[h, i] = log sum over visible j of exp(l[h, i, j])
//
// A unit of keys of a row of a head has its own reference. A piece is this reference and the unit's sum of exponentials as
// stored. `merge_pieces` merges a row's pieces, and finds the factor that turns the exponentials of each into
// probabilities. Logits are subtracted before the scale to powers of two: the greatest one's difference is exactly zero.
#include "mixed.cuh"

DEVICE float exponential(float difference) { return exp2_fast(difference * LOG2_E); }
constexpr float LOWEST = -0x1.58p127f;  // the greatest of no logits: finite, so that it causes no NaN
// The largest sum of exponentials over a unit's first logit, which need not be the greatest.
template <class Element> constexpr float LARGEST_SUM = 1e30f;
template <> constexpr float LARGEST_SUM<Half> = 3e4f;

// References and sums of exponentials of a unit, in this lane's two heads.
struct Piece {
    float references[2], sums[2];

    // Stores exponentials over `references`, or over the unit's first logits, and sums them.
    template <bool FirstLogits>
    DEVICE void add(const Arguments& args, const Weights& pre, uint32_t tile, const Unit& unit, const Seen& seen,
                    const Destination& destination) {
        const int64_t place = (int64_t)unit.row * args.pitch + unit.key;
        const uint32_t ones = pack<ELEMENT>(1, 1);
        float found[4] = {};  // of a head, the same in all columns
#pragma unroll
        for (int first = 0; first < UNIT; first += AT_ONCE) {
            Mixed logits(pre, tile + first * 2);
            if (!FirstLogits) hide(logits, unit, seen, first);
            else if (first == 0)
#pragma unroll
                for (int half = 0; half < 2; half++)
                    references[half] = __shfl_sync(~0u, logits.numbers[0][0][half * 2], 0, 4);
            uint32_t pairs[2][4];
#pragma unroll
            for (int i = 0; i < 2; i++) {
#pragma unroll
                for (int j = 0; j < 8; j++) {
                    float& x = logits.numbers[i][j / 4][j % 4];
                    x = exponential(x - references[j % 4 / 2]);
                }
                round_pairs(pairs[i], logits.numbers[i]);
                multiply<ELEMENT>(found, pairs[i], ones, ones);
            }
            destination.store(place + first, pairs);
        }
        sums[0] = found[0], sums[1] = found[2];
    }
    // Makes the greatest visible logits the references.
    DEVICE void find_greatest(const Weights& pre, uint32_t tile, const Unit& unit, const Seen& seen) {
        references[0] = references[1] = LOWEST;
#pragma unroll 1
        for (int first = 0; first < UNIT; first += AT_ONCE) {
            Mixed logits(pre, tile + first * 2);
            hide(logits, unit, seen, first);
#pragma unroll
            for (int j = 0; j < 16; j++)
                references[j % 4 / 2] = fmaxf(references[j % 4 / 2], logits.numbers[j / 8][j / 4 % 2][j % 4]);
        }
#pragma unroll
        for (int half = 0; half < 2; half++)
#pragma unroll
            for (int other = 1; other < 4; other *= 2)
                references[half] = fmaxf(references[half], __shfl_xor_sync(~0u, references[half], other));
    }
    DEVICE static void hide(Mixed& logits, const Unit& unit, const Seen& seen, int first) {
        if (unit.whole) return;
#pragma unroll
        for (int j = 0; j < 16; j++)
            if (!seen.all(unit.key + first + Mixed::key(j / 8, j / 4 % 2, j % 2), 1))
                logits.numbers[j / 8][j / 4 % 2][j % 4] = MINUS_INFINITY;
    }
};

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_AN_SM) pre_heads(const __grid_constant__ Arguments args) {
    const int warp = thread_index() / 32;
    if (warp < HEADS) return convolve_tasks(args, warp, [](const Tasks&, const Task&) {});
    int turns = 0;
    deallocate_registers();
    const Weights pre(args.mix, HEADS, 1);
    const uint32_t rows = matrix_row();
    const int half = lane_index() % 4, head = lane_index() / 4 + half * 8;
    const bool keeps_piece = half < 2 && head < HEADS;
#pragma unroll 1
    for (Tasks tasks(args); tasks.exist(args); tasks.next(args)) {
        const Destination destination(args, tasks.batch);
        float2* const pieces = args.pieces + place_of_piece(args, tasks.batch, 0, 0) + head;
        turns = mix_turns(args, tasks.of_head(args, 0), warp - HEADS, turns, [&](const Unit& unit) {
            const Seen seen(args, unit.row);
            if (!unit.whole && (unit.key >= seen.end || unit.key + UNIT <= seen.start)) return;  // nothing reads these
            const uint32_t tile = unit.tile() + rows;
            Piece found;
            if (unit.whole) found.add<true>(args, pre, tile, unit, seen, destination);
            // Over the first logit, mostly close enough to the greatest, unless a sum is too large.
            if (!unit.whole || __any_sync(~0u, !(found.sums[0] + found.sums[1] < LARGEST_SUM<ELEMENT>))) {
                found.find_greatest(pre, tile, unit, seen);
                found.add<false>(args, pre, tile, unit, seen, destination);
            }
            if (keeps_piece)
                pieces[((int64_t)(unit.key / UNIT) * args.rows + unit.row) * HEADS] =
                    half ? float2{found.references[1], found.sums[1]} : float2{found.references[0], found.sums[0]};
        });
    }
}

// Sums of some logits for the softmax: a reference, and the sum of exp(logit - reference).
struct Total {
    float reference = LOWEST, sum = 0;
    DEVICE void add(float of_other, float sum_of_other) {
        const float both = fmaxf(reference, of_other);
        sum = sum * exponential(reference - both) + sum_of_other * exponential(of_other - both);
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
    Total own, all;
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
    const float log_sum = log2f(all.sum) * LN_2;
#pragma unroll 4
    for (int unit = first; unit < end; unit += GROUPS)
        args.factors[start + unit * stride] =
            Factor<ELEMENT>::stored(exponential(args.pieces[start + unit * stride].x - all.reference - log_sum));
    if (group == 0 && row >= args.above && row < args.above + args.owned)
        args.logsumexp[((int64_t)batch * HEADS + head) * args.query_rows + args.first_row + row] =
            all.reference + log_sum;
}
