// Which block takes which steps, and when: all steps lie in a row, and each block takes a run of `run` of them.
#pragma once
#include "layout.cuh"

DEVICE int last_row(const Arguments& args, int row_block) { return min(row_block * ROWS + ROWS, args.rows) - 1; }

// Steps of a block of rows: of the keys that its last row sees, or of what is to be written. plan.py counts them too.
DEVICE int steps_of(const Arguments& args, int row_block) {
    const int last = last_row(args, row_block);
    int end = POST ? args.columns : args.keys;
    if (CAUSAL && POST) {
        const int below = args.first_position + last / args.zero_block * args.zero_block + args.zero_block;
        end = min(end, (max(below, 1) + args.zero_block - 1) / args.zero_block * args.zero_block);
    } else if (CAUSAL) {
        end = min(end, max(args.first_position + last + 1, 1));
    }
    return (end + COLUMNS - 1) / COLUMNS;
}

// Those of them in which a row of the block sees a key, from `first` to `end`.
struct Visible {
    int first, end;
    DEVICE Visible(const Arguments& args, int row_block) {
        const int top = max(args.first_position + row_block * ROWS, args.first_query);
        const int bottom = min(args.first_position + last_row(args, row_block), args.keys - 1);
        first = 0, end = 0;
        if (bottom < top) return;
        int stop = CAUSAL ? bottom + 1 : args.keys;
        if (DOCUMENTS) first = args.documents[top] / COLUMNS, stop = min(stop, args.documents[args.keys + bottom]);
        end = (stop + COLUMNS - 1) / COLUMNS;
    }
};

// A step on its way through load, arrive, convolve and mix. Before a block's first step of some rows goes a tick that
// loads only what lies beside its columns.
enum Kind { NOTHING, BESIDE_ONLY, WHOLE, LAST };  // LAST of these rows in this block
struct Tick {
    Kind kind = NOTHING;
    int batch, row_block, step;
    int ring;  // where its first chunk is in the ring

    DEVICE bool convolves() const { return kind >= WHOLE; }
    DEVICE int chunks() const { return kind == BESIDE_ONLY ? BESIDE : STEP; }
    DEVICE int first_column() const { return step * COLUMNS + (kind == BESIDE_ONLY ? -8 * LEFT : 8 * RIGHT); }
};

DEVICE int ring_wrap(int chunk) { return chunk >= RING ? chunk - RING : chunk; }

// Zeros to what of a step lies in `out`.
DEVICE void store_zeros(const Arguments& args, int batch, int row_block, int step) {
#pragma unroll 1
    for (int i = thread_index(); i < HEADS * ROWS * STEP; i += THREADS) {
        const int row = row_block * ROWS + i / STEP % ROWS, column = step * COLUMNS + i % STEP * 8;
        if (row < args.rows && column < args.columns)
            *(uint4*)(args.out.at(batch, i / STEP / ROWS, row) + column) = uint4{0, 0, 0, 0};
    }
}

// The ticks of this block, in order.
struct Stream {
    int batch, row_block, step, left;  // the next step, and how many there are yet
    int steps, ring;
    Visible visible;
    bool begun;  // what lies beside the next step has been loaded

    DEVICE Stream(const Arguments& args) : visible(args, 0) {
        const int first = block_index() * args.run;
        batch = first / args.steps, step = first % args.steps, row_block = 0, ring = 0, begun = false;
        left = min(args.run, args.batch * args.steps - first);
        steps = steps_of(args, 0);
        while (step >= steps) step -= steps, steps = steps_of(args, ++row_block);
        visible = Visible(args, row_block);
    }
    DEVICE Tick next(const Arguments& args) {
        Tick tick;
        for (; left > 0; step++, left--) {
            if (step == steps) {
                step = 0;
                if (++row_block == args.row_blocks) row_block = 0, batch++;
                steps = steps_of(args, row_block), visible = Visible(args, row_block);
            }
            if (step >= visible.first && step < visible.end) break;
            if (POST) store_zeros(args, batch, row_block, step);
        }
        if (left == 0) return tick;
        tick.batch = batch, tick.row_block = row_block, tick.step = step, tick.ring = ring;
        if (BESIDE > 0 && !begun) {
            begun = true, tick.kind = BESIDE_ONLY;
        } else {
            const bool last = left == 1 || step + 1 == visible.end;
            tick.kind = last ? LAST : WHOLE, begun = !last;
            step++, left--;
        }
        ring = ring_wrap(ring + tick.chunks());
        return tick;
    }
};
