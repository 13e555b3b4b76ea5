// A block convolves 128 keys of all heads and mixes them. A warp a head walks down its keys as in bands_cuda/convolve.cu,
// and MIXERS more warps mix. A turn's QUERY_TAPS rows of all heads meet in a tile in shared memory, of which there are
// TILES: while warps mix one, others write the next. Named barriers tell when a tile is full and when it has been read.
//
// Constants: those of bands_cuda/layout.cuh; HEADS, 1 to 16; TILES, 2 to 7; MIXERS; UNIT, keys of a row that a warp mixes
// at a time.
#pragma once
#include <products.cuh>

constexpr int PITCH = KEYS * 2 + 16;  // of a row of a head
#include "mixing.cuh"

constexpr int THREADS = 32 * (HEADS + MIXERS);
constexpr int TILE_ROW = HEADS * PITCH, TILE = QUERY_TAPS * TILE_ROW;
constexpr int TILES_AT = HEADS * RING, TILES_END = TILES_AT + TILES * TILE;
constexpr int LOADS = (2 * EIGHTS + 3) / 4;  // of four matrices
constexpr int UNITS_A_ROW = KEYS / UNIT, UNITS = QUERY_TAPS * UNITS_A_ROW;

// What a warp mixes at a time: UNIT keys of a row, of all heads.
struct Unit {
    int row, key;
    bool whole;   // all rows of the turn see all of the block's keys
    int turn;     // of the block
    uint32_t at;  // of the first head, in a tile
    DEVICE uint32_t tile() const { return shared_memory() + TILES_AT + turn % TILES * TILE + at; }
};

DEVICE int turns_of(const Segment& segment) { return (segment.stop - segment.begin + HALO + QUERY_TAPS - 1) / QUERY_TAPS; }
DEVICE int first_row(const Segment& segment, int turn) { return segment.begin - HALO + turn * QUERY_TAPS; }

// Turns of a block have numbers: those of a segment follow those of the segments before.
DEVICE int full(int turn) { return 1 + turn % TILES; }
DEVICE int empty(int turn) { return 1 + TILES + turn % TILES; }

// What a mixing warp does: `mix(unit)` for its units.
template <class Mix> DEVICE void mix_turns(const Arguments& args, const Task& task, int mixer, const Mix& mix) {
    int before = 0;
#pragma unroll 1
    for (int begin = task.first; begin < task.after;) {
        const Segment segment(args, begin, task.after);
        const int turns = turns_of(segment);
#pragma unroll 1
        for (int turn = 0; turn < turns; turn++) {
            const int number = before + turn, first = first_row(segment, turn);
            const bool whole = turn_is_whole(args, task, segment, first);
            block_sync(full(number), THREADS);
#pragma unroll 1
            for (int unit = (mixer + 4 * turn) % MIXERS; unit < UNITS; unit += MIXERS) {
                const int row = first + unit / UNITS_A_ROW, key = unit % UNITS_A_ROW * UNIT;
                if (row < begin || row >= segment.stop) continue;
                const uint32_t at = unit / UNITS_A_ROW * TILE_ROW + key * 2;
                mix(Unit{row, task.first_key + key, whole, number, at});
            }
            block_arrive(empty(number), THREADS);
        }
        before += turns, begin = segment.stop;
    }
}

// What the warp of a head does. It calls `load(segment, turn, row)` where copies of the rows of a turn begin, and
// `arrive(segment, address, row)` where this lane's have come. This lane's two keys, and those 64 further, go `of_lane`
// bytes behind the first of a row of a head.
template <class Load, class Arrive>
DEVICE void convolve_turns(const Arguments& args, const Task& task, uint32_t of_lane, const Load& load_more,
                           const Arrive& arrive) {
    const int warp = thread_index() / 32, lane = lane_index();
    const uint32_t shared = shared_memory(), ring = shared + warp * RING;
    const Bands<PAD, false> bands(args.taps + warp * QUERY_TAPS * KEY_TAPS);
    const Copies copies(args);
    uint32_t chunks[LOADS];
#pragma unroll
    for (int i = 0; i < LOADS; i++) chunks[i] = ring + matrix_chunk(4 * i, 2 * EIGHTS);
    int before = 0;
#pragma unroll 1
    for (int begin = task.first; begin < task.after;) {
        const Segment segment(args, begin, task.after);
        const int turns = turns_of(segment);
        const auto load = [&](int turn) {
            if (turn < turns)
                copies.load<Reach<PAD>::LEFT>(args, task, segment, args.x, ring + turn % STAGES * STAGE, first_row(segment, turn));
        };
        const auto load_rest = [&](int turn) {
            if (turn < turns) load_more(segment, before + turn, first_row(segment, turn));
            copies_commit();
        };
        RowSums sums;
        __syncwarp();  // the segment before has been read
#pragma unroll 1
        for (int turn = 0; turn < STAGES - 1; turn++) load(turn), load_rest(turn);
#pragma unroll 1
        for (int turn = 0; turn < turns; turn++) {
            const int number = before + turn, stage = turn % STAGES * STAGE, first = first_row(segment, turn);
            copies_wait<STAGES - 2>();
            arrive(segment, ring + stage, first);
            __syncwarp();
            load(turn + STAGES - 1);
            if (number >= TILES) block_sync(empty(number), THREADS);  // what lay there has been mixed
            load_rest(turn + STAGES - 1);
            const uint32_t tile = shared + TILES_AT + number % TILES * TILE + warp * PITCH + of_lane;
            const auto compute = [&](auto whole) {
                constexpr bool WHOLE = decltype(whole)::value;
                uint32_t numbers[2][LOADS][4];  // of a step and the next
                const auto load_step = [&](int step) {
#pragma unroll
                    for (int i = 0; i < LOADS; i++) load_matrices(numbers[step % 2][i], chunks[i] + stage + step * ROW);
                };
                load_step(0);
#pragma unroll
                for (int step = 0; step < QUERY_TAPS; step++) {
                    if (step + 1 < QUERY_TAPS) load_step(step + 1);
                    sums.add(step, numbers[step % 2], bands);
                    const int row = first + step;  // complete with what is read
                    if (WHOLE || (row >= begin && row < segment.stop)) {
                        uint32_t pairs[2];
                        visible_pairs<WHOLE>(pairs, args, row, task.first_key + lane * 2, sums.sums[step]);
                        store_shared(tile + step * TILE_ROW, pairs[0]), store_shared(tile + step * TILE_ROW + 128, pairs[1]);
                    }
                    sums.clear(step);
                }
            };
            if (turn_is_whole(args, task, segment, first)) compute(Constant<true>());
            else compute(Constant<false>());
            block_arrive(full(number), THREADS);
        }
        copies_wait<0>();
        before += turns, begin = segment.stop;
    }
#pragma unroll 1
    for (int turn = max(before - TILES, 0); turn < before; turn++) block_sync(empty(turn), THREADS);  // all who arrived are met
}
