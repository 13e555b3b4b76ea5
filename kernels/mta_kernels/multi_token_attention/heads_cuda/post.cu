// Exponentials x, as pre.cu stores them, to mixed probabilities: probabilities P, convolution, then mixing of all heads.
//
//   out[h] = sum over g of conv(P[g]) mix[g, h],   P[g] = x[g] factor[g]
//
// A factor belongs to UNIT keys of a row of a head.
#include "mixed.cuh"

// A lane has the factor of one row of a turn, for one of the units that a warp's keys and their halo are in.
constexpr int UNITS_BESIDE = UNITS_A_ROW + 2;
static_assert(QUERY_TAPS * UNITS_BESIDE <= 32 && Reach<PAD>::LEFT * 8 <= UNIT, "a lane for each");

// Eight exponentials from `key` on to probabilities; zeros at keys that a row does not see, unless it sees all.
template <bool Whole> DEVICE uint4 probabilities(uint4 x, uint32_t factor, const Seen& seen, int key) {
    uint32_t p[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
    for (int i = 0; i < 4; i++) {
        p[i] = Factor<ELEMENT>::times(p[i], factor);
        if (!Whole) p[i] = visible_pair(p[i], seen, key + 2 * i);
    }
    return uint4{p[0], p[1], p[2], p[3]};
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_AN_SM) post_heads(const __grid_constant__ Arguments args) {
    const int warp = thread_index() / 32, lane = lane_index();
    int turns = 0;
    if (warp >= HEADS) {
        deallocate_registers();
        const Weights post(args.mix, 1, HEADS);
        const uint32_t rows = matrix_row();
#pragma unroll 1
        for (Tasks tasks(args); tasks.exist(args); tasks.next(args)) {
            const Destination destination(args, tasks.batch);
            turns = mix_turns(args, tasks.of_head(args, 0), warp - HEADS, turns, [&](const Unit& unit) {
                if (!unit.whole && unit.key >= stored_end(args, unit.row)) return;
#pragma unroll
                for (int first = 0; first < UNIT; first += AT_ONCE) {
                    const Mixed mixed(post, unit.tile() + rows + first * 2);
                    uint32_t pairs[2][4];
#pragma unroll
                    for (int i = 0; i < 2; i++) round_pairs(pairs[i], mixed.numbers[i]);
                    destination.store((int64_t)unit.row * args.pitch + unit.key + first, pairs);
                }
            });
        }
        return;
    }
    allocate_registers();
    const Bands<PAD, false> bands(args.taps + warp * QUERY_TAPS * KEY_TAPS);
    uint32_t lanes[2] = {};  // the lanes with the factors of this lane's chunks, a byte each
#pragma unroll
    for (int i = 0; i < COPIES; i++) {
        const int chunk = Copies::chunk(i), step = min(chunk / CHUNKS, QUERY_TAPS - 1);
        const int unit = (chunk % CHUNKS * 8 - 8 * Reach<PAD>::LEFT + UNIT) / UNIT;
        lanes[i / 4] |= (uint32_t)(step * UNITS_BESIDE + unit) << i % 4 * 8;
    }
#pragma unroll 1
    for (Tasks tasks(args); tasks.exist(args); tasks.next(args)) {
        const Task task = tasks.of_head(args, warp);
        const int batch = tasks.batch;
        if (tasks.is_last_of_row(args)) store_zeros_behind(args, task, args.out);
        const int first_key = task.first_key - 8 * Reach<PAD>::LEFT, seen_from = max(first_key, 0);
        const int unit = task.first_key / UNIT - 1 + lane % UNITS_BESIDE;
        const bool unit_exists = unit >= 0 && unit < args.key_tiles * UNITS_A_ROW;
        const uint32_t* factors = args.factors + (place_of_piece(args, batch, unit, lane / UNITS_BESIDE) + warp);
        const int lane_row = unit_exists ? lane / UNITS_BESIDE : 1 << 30;
        const auto factor_of = [&](int first) {  // of rows from `first` on; zero where nothing is stored
            return (uint32_t)(first + lane_row) < (uint32_t)args.rows ? factors[first * HEADS] : 0;
        };
        // Zeros before the first key.
        const int keys_read = first_key + CHUNKS * 8 - seen_from;
        uint32_t coming;
        int seen_by;  // rows from this one on
        turns = convolve_turns(
            args, task, bands, turns, spread_keys(), [](const Segment&, int, int, bool) {},
            [&](const Segment& segment, uint32_t stage, int first) {  // this lane turns what it copied into probabilities
                if (first == segment.begin - HALO) {  // the first turn of a segment
                    coming = factor_of(first);
                    seen_by = max(segment.lowest, first_to_see(args, segment, seen_from, keys_read));
                }
                uint32_t of_chunks[COPIES];
#pragma unroll
                for (int i = 0; i < COPIES; i++) of_chunks[i] = __shfl_sync(~0u, coming, lanes[i / 4] >> i % 4 * 8 & 31);
                // Not earlier: a wait for this load would wait for the previous one, too.
                coming = factor_of(first + QUERY_TAPS);
                stage += lane * 16;
                if (first >= seen_by && is_full_turn(args, segment, first)) {
                    constexpr int LOADED = 2;  // at once, to save registers
#pragma unroll
                    for (int start = 0; start < COPIES; start += LOADED) {
                        uint4 chunks[LOADED];
#pragma unroll
                        for (int i = start; i < min(start + LOADED, COPIES); i++)
                            if (Copies::has(i)) chunks[i - start] = load_shared_16(stage + i * 512);
#pragma unroll
                        for (int i = start; i < min(start + LOADED, COPIES); i++)
                            if (Copies::has(i))
                                store_shared(stage + i * 512, probabilities<true>(chunks[i - start], of_chunks[i], Seen(), 0));
                    }
                    return;
                }
#pragma unroll
                for (int i = 0; i < COPIES; i++) {
                    if (!Copies::has(i)) continue;
                    Seen seen;
                    const int chunk = Copies::chunk(i), row = first + chunk / CHUNKS;
                    if (row >= segment.lowest && row < segment.highest) seen = Seen(args, row);
                    const uint4 x = load_shared_16(stage + i * 512);
                    store_shared(stage + i * 512, probabilities<false>(x, of_chunks[i], seen, first_key + chunk % CHUNKS * 8));
                }
            });
    }
    meet_mixers(turns);
}
