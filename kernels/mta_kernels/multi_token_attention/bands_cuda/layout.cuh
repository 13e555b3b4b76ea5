// The arguments of the convolution kernels, and which keys a row of a chunk sees and stores.
//
// Constants come from the compiler's command line: ELEMENT Half or Bfloat16; QUERY_TAPS, KEY_TAPS, PAD of the
// convolution; CAUSAL, DOCUMENTS; DELTA, whether gradients.cu sums rows; STAGES of the ring; SHARED_BYTES, as bands.py
// counts them; BLOCKS_AN_SM, which bounds the registers. A block is a warp.
#pragma once
#include <stored.cuh>

constexpr int KEYS = 128;   // of a warp: 16 chunks of 16 bytes

// The eights of input keys that some tap of eight output keys reads: LEFT before them, themselves, RIGHT after them.
template <int Pad> struct Reach {
    static constexpr int LEFT = (Pad + 7) / 8, RIGHT = (KEY_TAPS - 1 - Pad + 7) / 8, EIGHTS = LEFT + 1 + RIGHT;
};
constexpr int EIGHTS = Reach<PAD>::EIGHTS, HALO = QUERY_TAPS - 1;
static_assert(EIGHTS <= 3, "1 to 17 key taps, centred or to one side");
constexpr int CHUNKS = KEYS / 8 + EIGHTS - 1, ROW = CHUNKS * 16;  // of a row in the ring
constexpr int STAGE = QUERY_TAPS * ROW, RING = STAGES * STAGE;

struct Arguments {
    const ELEMENT* x;  // [B * heads, rows, pitch]
    ELEMENT *grad, *out;
    const ELEMENT* taps;   // [heads, QUERY_TAPS, KEY_TAPS]
    const int* documents;  // [2, key_rows]
    float* partial;        // [B * heads, tasks, QUERY_TAPS, KEY_TAPS]
    float* delta;          // [B * heads, rows, key_tiles]
    int heads, rows, pitch, first_position, first_row, query_rows, key_rows, above, owned;  // of a chunk
    int run, row_tiles, key_tiles, tasks;
    const ELEMENT* mix;  // [heads, heads], of heads_cuda/heads.cu
    float* parts;        // [B, tasks, heads, heads]
    float2* pieces;        // of heads_cuda/pre.cu and post.cu: [B, units, rows, heads]
    uint32_t* factors;     // the same
    float* logsumexp;      // [B, heads, query_rows]
    ELEMENT* convolved;    // of heads_cuda/rebuild.cu: x convolved
    float* sums;           // of its probabilities: [B, units, rows, heads]
    int batch, blocks;
    const float* loss_scale;  // of stored.cuh
};

// What a warp does: rows from `first` to `after` of a head, keys from `first_key` on.
struct Task {
    int batch_head, index, key_tile, first_key, first, after;  // `index` of this head
    int64_t place;  // of row 0, key 0

    DEVICE explicit Task(const Arguments& args) : Task(args, block_index() / of_a_head(args), block_index() % of_a_head(args)) {}
    DEVICE Task(const Arguments& args, int batch_head, int index) : batch_head(batch_head), index(index) {
        key_tile = index % args.key_tiles, first_key = key_tile * KEYS;
        first = index / args.key_tiles * args.run, after = min(first + args.run, args.rows);
        place = (int64_t)batch_head * args.rows * args.pitch;
    }
    DEVICE static int of_a_head(const Arguments& args) { return args.row_tiles * args.key_tiles; }
    // Whether one of its rows, or of the next `below` rows, sees one of its keys.
    DEVICE bool visible(const Arguments& args, int below) const {
        return !CAUSAL || first_key < args.first_position + after + below;
    }
};

// The rows from `begin` to `stop` (at most `after`), which are of one document with rows `lowest` to `highest`. Rows
// outside the queries see no keys: all of them count as one document.
struct Segment {
    int begin, stop, lowest = 0, highest;
    DEVICE Segment(const Arguments& args, int begin, int after) : begin(begin), stop(after), highest(args.rows) {
        if (!DOCUMENTS) return;
        const int query = args.first_row + begin, position = args.first_position + begin;
        if (query >= 0 && query < args.query_rows) {
            lowest = max(args.documents[position] - args.first_position, 0);
            highest = min(args.documents[args.key_rows + position] - args.first_position, args.rows);
            stop = min(highest, after);
        } else if (query < 0) {
            stop = min(-args.first_row, after);
        }
    }
    DEVICE Segment own_rows() const {
        Segment own = *this;
        own.lowest = begin, own.highest = stop;
        return own;
    }
};

// The chunks of QUERY_TAPS rows that a lane copies, and their offsets from the first one in memory, in numbers.
constexpr int ALL_CHUNKS = QUERY_TAPS * CHUNKS, COPIES = (ALL_CHUNKS + 31) / 32;
struct Copies {
    int places[COPIES];

    DEVICE static int chunk(int i) { return i * 32 + lane_index(); }
    DEVICE static bool has(int i) { return (i + 1) * 32 <= ALL_CHUNKS || chunk(i) < ALL_CHUNKS; }
    DEVICE Copies(const Arguments& args) {
#pragma unroll
        for (int i = 0; i < COPIES; i++) places[i] = chunk(i) / CHUNKS * args.pitch + chunk(i) % CHUNKS * 8;
    }

    // Copies QUERY_TAPS rows of `x` from `first` on, a warp's keys and their halo, to `ring`; zeros where nothing is
    // stored or a row is not of the segment.
    template <int Left>
    DEVICE void load(const Arguments& args, const Task& task, const Segment& segment, const ELEMENT* x, uint32_t ring,
                     int first) const {
        const int first_key = task.first_key - 8 * Left;
        const bool all = first >= segment.lowest && first + QUERY_TAPS <= segment.highest && first_key >= 0 &&
                         first_key + CHUNKS * 8 <= stored_end(args, first);
        load_rows(args, segment, x + (task.place + (int64_t)first * args.pitch + first_key), all, ring, first, first_key);
    }
    // Copies the rows that begin at `start`; with `all`, every chunk is stored and of the segment.
    DEVICE void load_rows(const Arguments& args, const Segment& segment, const ELEMENT* start, bool all, uint32_t ring,
                          int first, int first_key) const {
        ring += lane_index() * 16;
        if (all) {
#pragma unroll
            for (int i = 0; i < COPIES; i++)
                if (has(i)) copy_async(ring + i * 512, start + places[i], true);
            return;
        }
#pragma unroll 1
        for (int i = 0; i < COPIES; i++) {
            const int row = first + chunk(i) / CHUNKS, key = first_key + chunk(i) % CHUNKS * 8;
            if (chunk(i) >= ALL_CHUNKS) continue;
            const bool some = row >= segment.lowest && row < segment.highest && key >= 0 && key < stored_end(args, row);
            const int64_t place = (int64_t)(row - first) * args.pitch + key - first_key;
            copy_async(ring + i * 512, some ? start + place : args.x, some);
        }
    }
};

// A load reads four 8 x 8 matrices, each of eight consecutive chunks: both halves of 16 chunks, then the same one chunk
// further, and so on. Returns a lane's chunk for a load that begins with matrix `first` of `most`.
DEVICE uint32_t matrix_chunk(int first, int most) {
    const int lane = lane_index(), matrix = min(first + lane / 8, most - 1);
    return (matrix / 2 + matrix % 2 * 8 + lane % 8) * 16;
}
template <int Loads> DEVICE uint32_t matrix(const uint32_t (&loaded)[Loads][4], int number) {
    return loaded[number / 4][number % 4];
}

// Two keys of a row, which may not see both.
DEVICE uint32_t visible_pair(uint32_t pair, const Seen& seen, int key) {
    if (!seen.all(key, 1)) pair &= 0xFFFF0000u;
    return seen.all(key + 1, 1) ? pair : pair & 0xFFFFu;
}

// A lane's keys of a row, rounded, with zeros at keys that the row does not see.
template <bool Whole>
DEVICE void visible_pairs(uint32_t (&pairs)[2], const Arguments& args, int row, int key, const float (&sums)[4]) {
    pairs[0] = pack<ELEMENT>(sums[0], sums[1]), pairs[1] = pack<ELEMENT>(sums[2], sums[3]);
    if (Whole) return;
    const Seen seen(args, row);
    pairs[0] = visible_pair(pairs[0], seen, key), pairs[1] = visible_pair(pairs[1], seen, key + 64);
}
// Stores a lane's keys of a row: two numbers from 8 (lane / 4) + 2 (lane % 4) = 2 lane on, and 64 further. `place` is
// the address of the lane's first, of key `key`. Keys that the row does not see get zeros, unless it is `whole`.
template <bool Whole> DEVICE void store_keys(const Arguments& args, ELEMENT* place, int row, int key, const float (&sums)[4]) {
    if (!Whole && key >= stored_end(args, row)) return;
    uint32_t pairs[2];
    visible_pairs<Whole>(pairs, args, row, key, sums);
    *(uint32_t*)place = pairs[0];
    *(uint32_t*)(place + 64) = pairs[1];
}

// Whether the QUERY_TAPS rows from `first` on, a turn, are the segment's and see all keys of a warp.
DEVICE bool turn_is_whole(const Arguments& args, const Task& task, const Segment& segment, int first) {
    const int last = first + QUERY_TAPS - 1;
    if (first < segment.begin || last >= segment.stop) return false;
    return Seen(args, first).all(task.first_key, KEYS) && Seen(args, last).all(task.first_key, KEYS);
}
DEVICE void store_zeros(const Arguments& args, const Task& task, ELEMENT* out) {
#pragma unroll 1
    for (int row = task.first; row < task.after; row++) {
        if (task.first_key >= stored_end(args, row)) continue;
        ELEMENT* start = out + task.place + (int64_t)row * args.pitch;
        for (int i = 0; i < KEYS; i += 64) *(uint32_t*)(start + task.first_key + lane_index() * 2 + i) = 0;
    }
}
