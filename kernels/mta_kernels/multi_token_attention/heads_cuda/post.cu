// Exponentials x, as pre.cu stores them, to mixed probabilities, of all heads: probabilities P, convolution, then mixing.
//
//   out[h] = sum over g of conv(P[g]) mix[g, h],   P[g] = x[g] factor[g]
//
// A factor is of UNIT keys of a row of a head.
#include "mixed.cuh"

// A lane has the factor of a row of a turn, and of one of the units that a warp's keys and those beside them are in.
constexpr int UNITS_BESIDE = UNITS_A_ROW + 2;
static_assert(QUERY_TAPS * UNITS_BESIDE <= 32 && Reach<PAD>::LEFT * 8 <= UNIT, "a lane for each");

// Eight keys from `key` on, zeros at those that a row does not see unless it sees all.
template <bool Whole> DEVICE void make_probabilities(uint32_t place, uint32_t factor, const Seen& seen, int key) {
    const uint4 x = load_shared_16(place);
    uint32_t p[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
    for (int i = 0; i < 4; i++) {
        p[i] = Factor<ELEMENT>::times(p[i], factor);
        if (!Whole) p[i] = visible_pair(p[i], seen, key + 2 * i);
    }
    store_shared(place, uint4{p[0], p[1], p[2], p[3]});
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_AN_SM) post_heads(const __grid_constant__ Arguments args) {
    const int warp = thread_index() / 32, lane = lane_index();
    const int tasks = Task::of_a_head(args), batch = block_index() / tasks;
    const Task task(args, batch * HEADS + min(warp, HEADS - 1), block_index() % tasks);
    if (!task.visible(args, 0)) {
        if (warp < HEADS) store_zeros(args, task, args.out);
        return;
    }
    if (warp >= HEADS) {
        const Weights post(args.mix, 1, HEADS);
        const uint32_t rows = matrix_row();
        const int64_t head_stride = (int64_t)args.rows * args.pitch, first_head = batch * HEADS * head_stride;
        return mix_turns(args, task, warp - HEADS, [&](const Unit& unit) {
            if (!unit.whole && unit.key >= stored_end(args, unit.row)) return;
            const Mixed mixed(post, rows, unit.tile());
            Rounded rounded;
#pragma unroll
            for (int i = 0; i < UNIT / 16; i++) round_pairs(rounded.pairs[i], mixed.numbers[i]);
            rounded.store(args.out + (first_head + (int64_t)unit.row * args.pitch + unit.key), head_stride);
        });
    }
    const int first_key = task.first_key - 8 * Reach<PAD>::LEFT, seen_from = max(first_key, 0);
    uint32_t lanes[2] = {};  // that have the factors of this lane's chunks, a byte each
#pragma unroll
    for (int i = 0; i < COPIES; i++) {
        const int chunk = Copies::chunk(i), step = min(chunk / CHUNKS, QUERY_TAPS - 1);
        const int unit = (chunk % CHUNKS * 8 - 8 * Reach<PAD>::LEFT + UNIT) / UNIT;
        lanes[i / 4] |= (uint32_t)(step * UNITS_BESIDE + unit) << i % 4 * 8;
    }
    const int unit = task.first_key / UNIT - 1 + lane % UNITS_BESIDE;
    const bool unit_exists = unit >= 0 && unit < args.key_tiles * UNITS_A_ROW;
    const uint32_t* factors = args.factors + (place_of_piece(args, batch, unit, lane / UNITS_BESIDE) + warp);
    const auto factor_of = [&](int first) {  // of rows from `first` on; zero where nothing is stored
        const int row = first + lane / UNITS_BESIDE;
        return unit_exists && row >= 0 && row < args.rows ? factors[first * HEADS] : 0;
    };
    int expected = -1 << 30;
    uint32_t coming;
    convolve_turns(
        args, task, spread_keys(), [](const Segment&, int, int) {},
        [&](const Segment& segment, uint32_t stage, int first) {  // this lane makes probabilities of what it has copied
            const uint32_t now = first == expected ? coming : factor_of(first);
            expected = first + QUERY_TAPS, coming = factor_of(expected);
            const auto make = [&](auto whole) {
                constexpr bool WHOLE = decltype(whole)::value;
#pragma unroll
                for (int i = 0; i < COPIES; i++) {
                    const uint32_t factor = __shfl_sync(~0u, now, lanes[i / 4] >> i % 4 * 8 & 31);
                    const int chunk = Copies::chunk(i);
                    if (!Copies::has(i)) continue;
                    Seen seen;
                    const int row = first + chunk / CHUNKS;
                    if (!WHOLE && row >= segment.lowest && row < segment.highest) seen = Seen(args, row);
                    make_probabilities<WHOLE>(stage + chunk * 16, factor, seen, first_key + chunk % CHUNKS * 8);
                }
            };
            // Before the first key there are zeros.
            const int last = first + QUERY_TAPS - 1, keys = first_key + CHUNKS * 8 - seen_from;
            if (first >= segment.lowest && last < segment.highest && Seen(args, first).all(seen_from, keys) &&
                Seen(args, last).all(seen_from, keys))
                make(Constant<true>());
            else
                make(Constant<false>());
        });
}
