// A step's columns, with the rows above: from memory into the ring, and there made what the convolution reads.
#pragma once
#include "steps.cuh"

// A warp copies the heads that it convolves, some rows at a time. A thread copies and changes the same chunks, so that no
// barrier is needed in between.
constexpr int HEADS_A_WARP = (HEADS + WARPS - 1) / WARPS;
constexpr int ROWS_AT_ONCE = 32 / STEP, PASSES = (ROWS_IN + ROWS_AT_ONCE - 1) / ROWS_AT_ONCE;
static_assert(ROWS_AT_ONCE % INTERLEAVE == 0, "all passes have the same classes of rows");
constexpr int PASS = ROWS_AT_ONCE / INTERLEAVE * PITCH;  // from one to the next in the ring

// What this thread has of a tick and head: chunk `number` of the rows `first_row` + ROWS_AT_ONCE i of the tile.
struct Chunks {
    int row, column;  // of the first, in the input
    bool exist;
    uint32_t place;

    DEVICE Chunks(const Arguments& args, const Tick& tick, int head, uint32_t shared) {
        const int lane = thread_index() % 32, number = lane % STEP;
        exist = number < tick.chunks();
        row = tick.row_block * ROWS - HALO + args.above + lane / STEP;
        column = tick.first_column() + number * 8;
        place = shared + head * RING_HEAD + row_place(lane / STEP) + ring_wrap(tick.ring + number) * 16;
    }
    DEVICE static bool has(int pass) {
        return (pass + 1) * ROWS_AT_ONCE <= ROWS_IN || pass * ROWS_AT_ONCE + thread_index() % 32 / STEP < ROWS_IN;
    }
    DEVICE Seen seen(const Arguments& args, int pass) const {
        const int of_pass = row + pass * ROWS_AT_ONCE;
        Seen found(args, args.first_position - args.above + of_pass);
        if (of_pass < 0 || of_pass >= args.rows_in) found.end = found.start;
        return found;
    }
};

DEVICE void store_zeros(const Arguments& args, const Tick& tick) {
    const int first = tick.step * COLUMNS, end = tick.zeros_to;
    const int lane = thread_index() % 32;
#pragma unroll 1
    for (int i = thread_index() / 32; i < HEADS * ROWS; i += WARPS) {
        const int row = tick.row_block * ROWS + i % ROWS;
        if (row >= args.rows) continue;
        ELEMENT* destination = args.out.start + args.out.place(tick.batch, i / ROWS, row);
#pragma unroll 1
        for (int column = first + lane * 8; column < end; column += 256)
            store_memory(destination + column, uint4{0, 0, 0, 0});
    }
}

// `mine` is the place of this thread's first chunk of a tick's.
DEVICE int64_t first_chunk(const Arguments& args) {
    const int lane = thread_index() % 32;
    return args.in.place(0, thread_index() / 32, lane / STEP) + lane % STEP * 8;
}
DEVICE void load(const Arguments& args, const Tick& tick, uint32_t shared, int64_t mine) {
    if (POST && tick.kind == ZEROS) store_zeros(args, tick);
    if (tick.kind > ZEROS) {
#pragma unroll
        for (int i = 0; i < HEADS_A_WARP; i++) {
            const int head = i * WARPS + thread_index() / 32;
            const Chunks chunks(args, tick, head, shared);
            if (head >= HEADS || !chunks.exist) continue;
            const ELEMENT* source = args.in.start + (tick.in + mine + i * WARPS * args.in.head);
            const int64_t rows = ROWS_AT_ONCE * args.in.row;
            if (tick.seen) {
#pragma unroll
                for (int pass = 0; pass < PASSES; pass++, source += rows)
                    if (Chunks::has(pass)) copy_async(chunks.place + pass * PASS, source, true);
                continue;
            }
#pragma unroll 1
            for (int pass = 0; pass < PASSES; pass++, source += rows) {
                if (!Chunks::has(pass)) continue;
                const bool some = chunks.seen(args, pass).some(chunks.column, 8);  // else zeros
                copy_async(chunks.place + pass * PASS, some ? source : args.in.start, some);
            }
        }
    }
    copies_commit();
}

// Two numbers of which some are not seen, from `column` on.
DEVICE uint32_t visible_pair(uint32_t pair, const Seen& seen, int column) {
    if (!seen.all(column, 1)) pair &= 0xFFFF0000u;
    return seen.all(column + 1, 1) ? pair : pair & 0xFFFFu;
}

// Of a logit x the probability, 2^(exponent(x, reference) - log2(sum)).
DEVICE uint32_t probabilities(uint32_t pair, float2 sums) {
    float p[2];
#pragma unroll
    for (int e = 0; e < 2; e++) {
        const float x = number_of(pair, e);
        p[e] = exp2_fast(SHORT ? fmaf(x, LOG2_E, -fmaf(sums.x, LOG2_E, sums.y)) : fmaf(x - sums.x, LOG2_E, -sums.y));
    }
    return pack<ELEMENT>(p[0], p[1]);
}
DEVICE void make_probabilities(uint32_t place, float2 sums) {
    const uint4 x = load_shared_16(place);
    store_shared(place, uint4{probabilities(x.x, sums), probabilities(x.y, sums), probabilities(x.z, sums),
                              probabilities(x.w, sums)});
}
DEVICE void hide(uint32_t place, const Seen& seen, int column) {
    const uint4 x = load_shared_16(place);
    store_shared(place, uint4{visible_pair(x.x, seen, column), visible_pair(x.y, seen, column + 2),
                              visible_pair(x.z, seen, column + 4), visible_pair(x.w, seen, column + 6)});
}

// What this thread has copied becomes the convolution's input: the score or the probability, 0 where a row does not see a
// key.
DEVICE void arrive(const Arguments& args, const Tick& tick, uint32_t shared) {
    if (tick.kind <= ZEROS || (!POST && tick.seen)) return;
#pragma unroll
    for (int i = 0; i < HEADS_A_WARP; i++) {
        const int head = i * WARPS + thread_index() / 32;
        const Chunks chunks(args, tick, head, shared);
        if (head >= HEADS || !chunks.exist) continue;
        const float2* sums = args.statistics + ((int64_t)tick.batch * HEADS + head) * args.rows_in + chunks.row;
        if (POST && tick.seen) {
            float2 found[PASSES];
#pragma unroll
            for (int pass = 0; pass < PASSES; pass++)
                if (Chunks::has(pass)) found[pass] = sums[pass * ROWS_AT_ONCE];
#pragma unroll
            for (int pass = 0; pass < PASSES; pass++)
                if (Chunks::has(pass)) make_probabilities(chunks.place + pass * PASS, found[pass]);
            continue;
        }
#pragma unroll 1
        for (int pass = 0; pass < PASSES; pass++) {
            if (!Chunks::has(pass)) continue;
            const Seen seen = chunks.seen(args, pass);
            if (!seen.some(chunks.column, 8)) continue;
            if (POST) make_probabilities(chunks.place + pass * PASS, sums[pass * ROWS_AT_ONCE]);
            if (!seen.all(chunks.column, 8)) hide(chunks.place + pass * PASS, seen, chunks.column);
        }
    }
}
