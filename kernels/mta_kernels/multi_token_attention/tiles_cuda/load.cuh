// A step's columns, with the rows above: from memory into the ring, and there made what the convolution reads.
#pragma once
#include "steps.cuh"

// A warp copies some rows of a head at a time.
constexpr int ROWS_AT_ONCE = 32 / STEP, PASSES = (ROWS_IN + ROWS_AT_ONCE - 1) / ROWS_AT_ONCE;
constexpr int COPIES = (HEADS * PASSES + WARPS - 1) / WARPS;  // of a thread

// One chunk of a tick. A thread copies and changes the same chunks, so that no barrier is needed in between.
struct Chunk {
    bool exists;  // of this thread and tick
    int head, row, column, position;
    uint32_t place;

    DEVICE Chunk(const Arguments& args, const Tick& tick, int i, uint32_t shared) {
        const int lane = thread_index() % 32, index = i * WARPS + thread_index() / 32;
        const int pass = index % PASSES, number = lane % STEP, from_top = pass * ROWS_AT_ONCE + lane / STEP;
        head = index / PASSES;
        exists = head < HEADS && from_top < ROWS_IN && number < tick.chunks();
        row = tick.row_block * ROWS + from_top - HALO + args.above;
        position = args.first_position - args.above + row;
        column = tick.first_column() + number * 8;
        place = shared + head * RING_HEAD + ring_wrap(tick.ring + number) * 16;
        if (ROWS_AT_ONCE % INTERLEAVE == 0)  // the same, and less to compute
            place += row_place(lane / STEP) + pass * (ROWS_AT_ONCE / INTERLEAVE * PITCH);
        else
            place += row_place(from_top);
    }
    DEVICE Seen seen(const Arguments& args) const {
        Seen found(args, position);
        if (row < 0 || row >= args.rows_in) found.end = found.start;
        return found;
    }
};

DEVICE void store_zeros(const Arguments& args, const Tick& tick) {
    const int first = tick.step * COLUMNS, end = min(first + tick.steps * COLUMNS, args.columns);
    const int lane = thread_index() % 32;
#pragma unroll 1
    for (int i = thread_index() / 32; i < HEADS * ROWS; i += WARPS) {
        const int row = tick.row_block * ROWS + i % ROWS;
        if (row >= args.rows) continue;
        ELEMENT* destination = args.out.at(tick.batch, i / ROWS, row);
#pragma unroll 1
        for (int column = first + lane * 8; column < end; column += 256) *(uint4*)(destination + column) = uint4{0, 0, 0, 0};
    }
}

DEVICE void load(const Arguments& args, const Tick& tick, uint32_t shared) {
    if (POST && tick.kind == ZEROS) store_zeros(args, tick);
    if (tick.kind > ZEROS) {
#pragma unroll
        for (int i = 0; i < COPIES; i++) {
            const Chunk chunk(args, tick, i, shared);
            if (!chunk.exists) continue;
            const bool some = tick.seen || chunk.seen(args).some(chunk.column, 8);
            const ELEMENT* source = args.in.at(tick.batch, chunk.head, chunk.row) + chunk.column;
            copy_async(chunk.place, some ? source : args.in.start, some);  // zeros where nothing is seen
        }
    }
    copies_commit();
}

// Two numbers of which some are not seen, from `column` on.
DEVICE uint32_t visible_pair(uint32_t pair, const Seen& seen, int column) {
    if (!seen.all(column, 1)) pair &= 0xFFFF0000u;
    return seen.all(column + 1, 1) ? pair : pair & 0xFFFFu;
}

// What this thread has copied becomes the convolution's input: 0 where a row does not see a key, and else the score, or
// of a logit the probability, 2^((logit - maximum) log2(e) - log2(sum)).
DEVICE void arrive(const Arguments& args, const Tick& tick, uint32_t shared) {
    if (tick.kind <= ZEROS || (!POST && tick.seen)) return;
#pragma unroll
    for (int i = 0; i < COPIES; i++) {
        const Chunk chunk(args, tick, i, shared);
        if (!chunk.exists) continue;
        Seen seen;
        bool all = tick.seen;
        if (!all) {
            seen = chunk.seen(args), all = seen.all(chunk.column, 8);
            if (!seen.some(chunk.column, 8) || (!POST && all)) continue;
        }
        float2 sums = {0, 0};
        if (POST) sums = args.statistics[((int64_t)tick.batch * HEADS + chunk.head) * args.rows_in + chunk.row];
        const uint4 found = load_shared_16(chunk.place);
        uint32_t pairs[4] = {found.x, found.y, found.z, found.w};
#pragma unroll
        for (int j = 0; j < 4; j++) {
            if (POST) {
                float p[2];
#pragma unroll
                for (int e = 0; e < 2; e++) p[e] = exp2_fast(fmaf(number_of(pairs[j], e) - sums.x, LOG2_E, -sums.y));
                pairs[j] = pack<ELEMENT>(p[0], p[1]);
            }
            if (!all) pairs[j] = visible_pair(pairs[j], seen, chunk.column + 2 * j);
        }
        store_shared(chunk.place, uint4{pairs[0], pairs[1], pairs[2], pairs[3]});
    }
}
