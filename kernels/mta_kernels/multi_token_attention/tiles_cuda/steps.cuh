// Which block takes which steps, and when: all steps lie in a row, and each block takes a run of `run` of them.
#pragma once
#include "layout.cuh"

DEVICE int last_row(const Arguments& args, int row_block) { return min(row_block * ROWS + ROWS, args.rows) - 1; }

// Steps of a block of rows: of the keys that its last row sees, and of post.cu one more, which writes zeros behind them.
// tiles.py counts them too.
DEVICE int steps_of(const Arguments& args, int row_block) {
    int end = args.keys;
    if (CAUSAL) end = max(min(end, args.first_position + last_row(args, row_block) + 1), 1);
    return (end + COLUMNS - 1) / COLUMNS + POST;
}

// One past the last column in which post.cu writes zeros.
DEVICE int end_of_zeros(const Arguments& args, int row_block) {
    if (!CAUSAL) return args.columns;
    const int block = args.zero_block, below = args.first_position + last_row(args, row_block) / block * block + block;
    return min(args.columns, (max(below, 1) + block - 1) / block * block);
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
// loads only what lies beside its columns. Ticks of zeros are those of post.cu that no row sees.
enum Kind { NOTHING, ZEROS, BESIDE_ONLY, WHOLE, LAST };  // LAST of these rows in this block
struct Tick {
    int kind = NOTHING, batch = 0, row_block = 0, step = 0;
    int ring = 0;   // where its first chunk is in the ring
    int zeros_to = 0;  // of zeros: one past the last column
    int seen = 0;   // whether all rows, those of the halo too, see all columns that are loaded
    int shown = 0;  // whether all rows of results see all its columns
    int64_t in = 0, out = 0;  // the places of head 0 of its first row, that of the halo, and column

    DEVICE bool convolves() const { return kind >= WHOLE; }
    DEVICE int chunks() const { return kind == BESIDE_ONLY ? BESIDE : STEP; }
    DEVICE int first_column() const { return step * COLUMNS + (kind == BESIDE_ONLY ? -8 * LEFT : 8 * RIGHT); }

    DEVICE void look(const Arguments& args) {
        const int row = row_block * ROWS - HALO, top = args.first_position + row;
        const int last = min(row_block * ROWS + ROWS, args.rows) - 1, bottom = args.first_position + last;
        in = args.in.place(batch, 0, row + args.above) + first_column();
        out = args.out.place(batch, 0, row_block * ROWS) + step * COLUMNS;
        seen = shown = 0;
        if (row + args.above < 0 || top < args.first_query || bottom >= args.keys) return;
        if (row_block * ROWS + ROWS > args.rows) return;
        const int start = DOCUMENTS ? args.documents[bottom] : 0, first = first_column();
        int end = CAUSAL ? top + 1 : args.keys;
        if (DOCUMENTS) end = min(end, args.documents[args.keys + top]);
        seen = first >= start && first + chunks() * 8 <= end;
        shown = step * COLUMNS >= start && step * COLUMNS + COLUMNS <= end;
    }

    // One thread thinks, the others read: it takes as many registers and instructions as a load.
    DEVICE void store(uint32_t at) const {
        store_shared(at, uint4{(uint32_t)kind, (uint32_t)batch, (uint32_t)row_block, (uint32_t)step});
        store_shared(at + 16, uint4{(uint32_t)ring, (uint32_t)zeros_to, (uint32_t)seen, (uint32_t)shown});
        store_shared(at + 32, uint4{(uint32_t)in, (uint32_t)(in >> 32), (uint32_t)out, (uint32_t)(out >> 32)});
    }
    DEVICE static Tick at(uint32_t address) {
        const uint4 a = load_shared_16(address), b = load_shared_16(address + 16), c = load_shared_16(address + 32);
        Tick tick;
        tick.kind = a.x, tick.batch = a.y, tick.row_block = a.z, tick.step = a.w;
        tick.ring = b.x, tick.zeros_to = b.y, tick.seen = b.z, tick.shown = b.w;
        tick.in = (int64_t)c.y << 32 | c.x, tick.out = (int64_t)c.w << 32 | c.z;
        return tick;
    }
};

DEVICE int ring_wrap(int chunk) { return chunk >= RING ? chunk - RING : chunk; }

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
        while (left > 0) {
            if (step == steps) {
                step = 0;
                if (++row_block == args.row_blocks) row_block = 0, batch++;
                steps = steps_of(args, row_block), visible = Visible(args, row_block);
            }
            tick.batch = batch, tick.row_block = row_block, tick.step = step, tick.ring = ring;
            if (step >= visible.first && step < visible.end) {
                if (BESIDE > 0 && !begun) {
                    begun = true, tick.kind = BESIDE_ONLY;
                } else {
                    const bool last = left == 1 || step + 1 == visible.end;
                    tick.kind = last ? LAST : WHOLE, begun = !last;
                    step++, left--;
                }
                ring = ring_wrap(ring + tick.chunks());
                tick.look(args);
                break;
            }
            const int count = min(left, (step < visible.first ? min(visible.first, steps) : steps) - step);
            step += count, left -= count;
            if (POST) {
                tick.kind = ZEROS;
                tick.zeros_to = step == steps ? end_of_zeros(args, row_block) : min(step * COLUMNS, args.columns);
                break;
            }
        }
        return tick;
    }
};
