// A step's columns, with the rows above: from memory into the ring, and there made what the convolution reads.
#pragma once
#include "steps.cuh"

constexpr int COPIES = HEADS * ROWS_IN * STEP, COPIES_A_THREAD = (COPIES + THREADS - 1) / THREADS;

// One chunk of a tick. A thread copies and changes the same chunks, so that no barrier is needed in between.
struct Chunk {
    bool exists;  // of this thread and tick
    int head, row, column;
    Seen seen;
    uint32_t place;

    DEVICE Chunk(const Arguments& args, const Tick& tick, int i, uint32_t shared)
        : seen(args, args.first_position + tick.row_block * ROWS + (i / STEP % ROWS_IN - HALO)) {
        const int number = i % STEP, from_top = i / STEP % ROWS_IN;
        exists = i < COPIES && number < tick.chunks();
        head = i / STEP / ROWS_IN;
        row = tick.row_block * ROWS + from_top - HALO + args.above;
        column = tick.first_column() + number * 8;
        if (row < 0 || row >= args.rows_in) seen.start = seen.end = 0;
        place = shared + head * RING_HEAD + row_place(from_top) + ring_wrap(tick.ring + number) * 16;
    }
};

DEVICE void load(const Arguments& args, const Tick& tick, uint32_t shared) {
    if (tick.kind != NOTHING) {
#pragma unroll
        for (int i = 0; i < COPIES_A_THREAD; i++) {
            const Chunk chunk(args, tick, i * THREADS + thread_index(), shared);
            if (!chunk.exists) continue;
            const bool some = chunk.seen.some(chunk.column, 8);
            const ELEMENT* source = args.in.at(tick.batch, chunk.head, max(chunk.row, 0)) + chunk.column;
            copy_async(chunk.place, some ? source : args.in.start, some);  // zeros where nothing is seen
        }
    }
    copies_commit();
}

// Whether no row sees a part of a chunk: then nothing is to be hidden. It may miss some such steps.
DEVICE bool has_whole_chunks(const Arguments& args, const Tick& tick) {
    if (DOCUMENTS) return false;
    const int top = max(args.first_position + tick.row_block * ROWS - HALO, args.first_query);
    return tick.first_column() + tick.chunks() * 8 <= (CAUSAL ? min(top + 1, args.keys) : args.keys);
}

// What this thread has copied becomes the convolution's input: 0 where a row does not see a key, and else the score, or
// of a logit the probability, 2^((logit - maximum) log2(e) - log2(sum)).
DEVICE void arrive(const Arguments& args, const Tick& tick, uint32_t shared) {
    if (tick.kind == NOTHING || (!POST && has_whole_chunks(args, tick))) return;
#pragma unroll
    for (int i = 0; i < COPIES_A_THREAD; i++) {
        const Chunk chunk(args, tick, i * THREADS + thread_index(), shared);
        if (!chunk.exists || !chunk.seen.some(chunk.column, 8)) continue;
        const bool all = chunk.seen.all(chunk.column, 8);
        if (!POST && all) continue;
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
            if (!all) {
                if (!chunk.seen.all(chunk.column + 2 * j, 1)) pairs[j] &= 0xFFFF0000u;
                if (!chunk.seen.all(chunk.column + 2 * j + 1, 1)) pairs[j] &= 0xFFFFu;
            }
        }
        store_shared(chunk.place, uint4{pairs[0], pairs[1], pairs[2], pairs[3]});
    }
}
