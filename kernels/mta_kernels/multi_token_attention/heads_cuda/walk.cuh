// A block convolves and mixes 128 keys of all heads. A warp a head steps down the keys as in bands_cuda/convolve.cu, and
// MIXERS more warps mix. A turn is QUERY_TAPS rows of all heads, in one of TILES tiles in shared memory: warps mix one
// while others write the next. Named barriers signal that a tile is full, and that it is empty again.
//
// Values that all turns of a task share are computed once: in a turn every instruction counts.
//
// Constants: as in bands_cuda/layout.cuh; HEADS, 1 to 16; TILES, 2 to 7; MIXERS; UNIT, keys of a row that a warp mixes at
// a time.
#pragma once
#include <products.cuh>

// Whether the last eights of two rows form one product.
constexpr bool PAIRS = EIGHTS == 3 && QUERY_TAPS % 2 == 0;
constexpr int PITCH = KEYS * 2 + 16;  // of a row of a head
#include "mixing.cuh"

constexpr int THREADS = 32 * (HEADS + MIXERS);
constexpr int TILE_ROW = HEADS * PITCH, TILE = QUERY_TAPS * TILE_ROW;
constexpr int TILES_AT = HEADS * RING, TILES_END = TILES_AT + TILES * TILE;
constexpr int LOADS = (2 * EIGHTS + 3) / 4;  // of four matrices
constexpr int UNITS_A_ROW = KEYS / UNIT, UNITS = QUERY_TAPS * UNITS_A_ROW;

// The part that a warp mixes at a time: UNIT keys of a row, of all heads.
struct Unit {
    int row, key;
    bool whole;   // all rows of the turn see all of the block's keys
    int turn;     // of the block
    uint32_t at;  // of the first head, in a tile
    DEVICE uint32_t tile() const { return shared_memory() + TILES_AT + turn % TILES * TILE + at; }
};

DEVICE int turns_of(const Segment& segment) { return (segment.stop - segment.begin + HALO + QUERY_TAPS - 1) / QUERY_TAPS; }
DEVICE int first_row(const Segment& segment, int turn) { return segment.begin - HALO + turn * QUERY_TAPS; }

// Turns are numbered through all segments of a block.
DEVICE int full(int turn) { return 1 + turn % TILES; }
DEVICE int empty(int turn) { return 1 + TILES + turn % TILES; }

// On Hopper, where both kinds of warps are whole warp groups, mixing warps give registers to the head warps: from 96 a
// thread, or from 80 where there are more threads.
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
DEVICE void allocate_registers() {
    if constexpr (HEADS == 16 && MIXERS == 4) asm volatile("setmaxnreg.inc.sync.aligned.u32 104;");
    if constexpr (HEADS == 16 && MIXERS == 8) asm volatile("setmaxnreg.inc.sync.aligned.u32 88;");
}
DEVICE void deallocate_registers() {
    if constexpr (HEADS == 16 && (MIXERS == 4 || MIXERS == 8)) asm volatile("setmaxnreg.dec.sync.aligned.u32 64;");
}
#else
DEVICE void allocate_registers() {}
DEVICE void deallocate_registers() {}
#endif

// Whether all rows of the turn from `first` on are queries, or before the queries, and before the segment's end.
DEVICE bool is_full_turn(const Arguments& args, const Segment& segment, int first) {
    return first + QUERY_TAPS <= min(segment.stop, args.query_rows - args.first_row);
}
// The first row of a segment from which on all rows see all of `count` keys from `first` on; NEVER if there is none.
constexpr int NEVER = 1 << 30;
DEVICE int first_to_see(const Arguments& args, const Segment& segment, int first, int count) {
    bool some = first >= 0 && (CAUSAL || first + count <= args.key_rows);
    if (DOCUMENTS) {
        const int query = args.first_row + segment.begin, position = args.first_position + segment.begin;
        some = some && query >= 0 && query < args.query_rows && first >= args.documents[position] &&
               first + count <= args.documents[args.key_rows + position];
    }
    if (!some) return NEVER;
    // Not max(-first_row, ...): ptxas 13 loses that sign when it merges two maxima into one instruction.
    const int query = CAUSAL ? first + count - 1 - args.first_position + args.first_row : 0;
    return max(query, 0) - args.first_row;
}
// The first row from which on all rows are stored at all of `count` keys from `first` on.
DEVICE int first_stored_at(const Arguments& args, int first, int count) {
    if (first < 0 || first + count > args.pitch) return NEVER;
    return CAUSAL ? ((first + count + BLOCK - 1) / BLOCK - 2) * BLOCK + 1 - args.first_position : 0;
}

// A persistent block's tasks: every `blocks`-th of those with visible keys, but at least one of each row tile.
struct Tasks {
    int batch = 0, row_tile = 0, key_tile;

    DEVICE Tasks(const Arguments& args) : key_tile(block_index()) { find(args); }
    DEVICE bool exist(const Arguments& args) const { return batch < args.batch; }
    DEVICE void next(const Arguments& args) { key_tile += args.blocks, find(args); }
    DEVICE Task of_head(const Arguments& args, int head) const {
        return Task(args, batch * HEADS + head, row_tile * args.key_tiles + key_tile);
    }
    DEVICE bool is_last_of_row(const Arguments& args) const { return key_tile + 1 == count(args); }

private:
    DEVICE int count(const Arguments& args) const {  // of this row tile
        if (!CAUSAL) return args.key_tiles;
        const int after = min((row_tile + 1) * args.run, args.rows);
        return min(max((args.first_position + after + KEYS - 1) / KEYS, 1), args.key_tiles);
    }
    DEVICE void find(const Arguments& args) {
#pragma unroll 1
        for (int tiles; batch < args.batch && key_tile >= (tiles = count(args));) {
            key_tile -= tiles;
            if (++row_tile == args.row_tiles) row_tile = 0, batch++;
        }
    }
};

// Writes zeros where a head's rows of a task are stored after the task's keys, the last that its rows see.
DEVICE void store_zeros_behind(const Arguments& args, const Task& task, ELEMENT* out) {
    for (Task behind = task; (behind.first_key += KEYS) < stored_end(args, task.after - 1);) store_zeros(args, behind, out);
}

// The loop of a mixing warp over a task: calls `mix(unit)` for its units. `before` counts the block's turns before the
// task; returns the count after it.
template <class Mix> DEVICE int mix_turns(const Arguments& args, const Task& task, int mixer, int before, const Mix& mix) {
#pragma unroll 1
    for (int begin = task.first; begin < task.after;) {
        const Segment segment(args, begin, task.after);
        const int turns = turns_of(segment), whole_from = max(begin, first_to_see(args, segment, task.first_key, KEYS));
#pragma unroll 1
        for (int turn = 0; turn < turns; turn++) {
            const int number = before + turn, first = first_row(segment, turn);
            const bool whole = first >= whole_from && is_full_turn(args, segment, first);
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
    return before;
}

// The loop of a head's warp over a task. It calls `load_more(segment, turn, row, whole)` where copies of a turn's rows begin,
// `whole` if all of them see all keys, and `arrive(segment, address, row)` when this lane's copies have arrived. This lane's
// two keys, and those 64 further, go `of_lane` bytes after a head's row in the tile. Turns are counted as in `mix_turns`.
template <class Load, class Arrive>
DEVICE int convolve_turns(const Arguments& args, const Task& task, const Bands<PAD, false>& bands, int before,
                          uint32_t of_lane, const Load& load_more, const Arrive& arrive) {
    const int warp = thread_index() / 32, lane = lane_index();
    const uint32_t shared = shared_memory(), ring = shared + warp * RING;
    const int first_key = task.first_key - 8 * Reach<PAD>::LEFT;
    const ELEMENT* start = args.x + (task.place + first_key);
    const Copies copies(args);
    uint32_t chunks[LOADS];
#pragma unroll
    for (int i = 0; i < LOADS; i++) chunks[i] = ring + matrix_chunk(4 * i, 2 * EIGHTS);
    const uint32_t last_chunk = ring + lane / 16 * ROW + (lane / 8 % 2 * 8 + lane % 8 + 2) * 16;
#pragma unroll 1
    for (int begin = task.first; begin < task.after;) {
        const Segment segment(args, begin, task.after);
        const int turns = turns_of(segment);
        const int whole_from = max(begin, first_to_see(args, segment, task.first_key, KEYS));
        const int copied_from = max(segment.lowest, first_stored_at(args, first_key, CHUNKS * 8));
        const auto load = [&](int turn) {
            const int first = first_row(segment, turn);
            const bool whole = first >= copied_from && is_full_turn(args, segment, first);
            const ELEMENT* rows = start + (int64_t)first * args.pitch;
            if (turn < turns) copies.load_rows(args, segment, rows, whole, ring + turn % STAGES * STAGE, first, first_key);
        };
        const auto load_rest = [&](int turn) {
            const int first = first_row(segment, turn);
            const bool whole = first >= whole_from && is_full_turn(args, segment, first);
            if (turn < turns) load_more(segment, before + turn, first, whole);
            copies_commit();
        };
        RowSums sums;
        __syncwarp();  // all lanes have read the segment before
#pragma unroll 1
        for (int turn = 0; turn < STAGES - 1; turn++) load(turn), load_rest(turn);
#pragma unroll 1
        for (int turn = 0; turn < turns; turn++) {
            const int number = before + turn, stage = turn % STAGES * STAGE, first = first_row(segment, turn);
            copies_wait<STAGES - 2>();
            arrive(segment, ring + stage, first);
            __syncwarp();
            load(turn + STAGES - 1);
            if (number >= TILES) block_sync(empty(number), THREADS);  // the tile there is mixed
            load_rest(turn + STAGES - 1);
            const uint32_t tile = shared + TILES_AT + number % TILES * TILE + warp * PITCH + of_lane;
            const auto compute = [&](auto whole) {
                constexpr bool WHOLE = decltype(whole)::value;
                const auto emit = [&](int step) {
                    const int row = first + step;  // complete with the rows read so far
                    if (WHOLE || (row >= begin && row < segment.stop)) {
                        uint32_t pairs[2];
                        visible_pairs<WHOLE>(pairs, args, row, task.first_key + lane * 2, sums.sums[step]);
                        store_shared(tile + step * TILE_ROW, pairs[0]), store_shared(tile + step * TILE_ROW + 128, pairs[1]);
                    }
                    sums.clear(step);
                };
                if constexpr (PAIRS) {
                    uint32_t low[2][4], last[4];
                    const auto load_part = [&](int pair, int i) {  // both first eights of a row, or both rows' last
                        const int from = stage + 2 * pair * ROW;
                        if (pair == QUERY_TAPS / 2) return;
                        if (i < 2) load_matrices(low[i], chunks[0] + from + i * ROW);
                        else load_matrices(last, last_chunk + from);
                    };
                    load_part(0, 0), load_part(0, 2), load_part(0, 1);
#pragma unroll
                    for (int pair = 0; pair < QUERY_TAPS / 2; pair++)
                        sums.add_pair(2 * pair, low, last, bands, emit, [&](int i) { load_part(pair + 1, i); });
                } else {
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
                        emit(step);
                    }
                }
            };
            if (first >= whole_from && is_full_turn(args, segment, first)) compute(Constant<true>());
            else compute(Constant<false>());
            block_arrive(full(number), THREADS);
        }
        copies_wait<0>();
        before += turns, begin = segment.stop;
    }
    return before;
}
// The head warps wait for the mixing warps of the last tiles, so that every arrival at a barrier is matched.
DEVICE void meet_mixers(int turns) {
#pragma unroll 1
    for (int turn = max(turns - TILES, 0); turn < turns; turn++) block_sync(empty(turn), THREADS);
}
