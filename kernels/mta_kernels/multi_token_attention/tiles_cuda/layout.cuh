// What the tile kernels are given, and what is where in shared memory.
//
// A block convolves ROWS rows x COLUMNS columns of all heads at a time, a step, from left to right. Shared memory has a
// ring of the input's columns, in chunks of 8 (16 bytes), and the convolved numbers of a step or two, for the mixing.
//
// Constants come from the compiler's command line: ELEMENT Half or Bfloat16; HEADS; QUERY_TAPS, KEY_TAPS, PAD; MIX,
// CAUSAL, DOCUMENTS; POST, whether the input is logits; WARPS; ROWS, COLUMNS; LEAD, steps that loads run ahead; RESULTS,
// 1 or 2 buffers of convolved numbers; SHARED_BYTES, as plan.py counts them, which chooses all these.
#pragma once
#include <tiles_instructions.cuh>

constexpr int THREADS = 32 * WARPS;
constexpr int HALO = QUERY_TAPS - 1, ROWS_IN = ROWS + HALO;

// Of each eight columns of results, the eights of the input that some tap reads: LEFT before it, itself, RIGHT after it.
constexpr int LEFT = (PAD + 7) / 8, RIGHT = (KEY_TAPS - 1 - PAD + 7) / 8, EIGHTS = LEFT + 1 + RIGHT;
constexpr int STEP = COLUMNS / 8, BESIDE = LEFT + RIGHT, WINDOW = STEP + BESIDE;  // in chunks
static_assert(EIGHTS <= 3 && BESIDE <= STEP && (STEP == 2 || STEP == 4), "1 to 17 key taps, steps of 16 or 32 columns");

// A product of matrices takes rows of INTERLEAVE apart, so that taps share what is loaded: see convolve.cuh.
constexpr int INTERLEAVE = ROWS / 16, SETS = INTERLEAVE + HALO;
constexpr int RING = (WINDOW + LEAD * STEP) | 1;  // chunks a row: odd, so that neighbours lie in other banks
constexpr int PITCH = RING * 16;
constexpr int SLOTS = 16 + (SETS - 1) / INTERLEAVE;  // rows of a class, those of one remainder by INTERLEAVE
// Rows that follow one another are copied together, so classes begin half of all banks apart.
constexpr int CLASS = ((SLOTS * RING + 3) / 8 * 8 + 4) * 16;
static_assert(CLASS >= SLOTS * PITCH && CLASS % 128 == 64, "a class begins in the other half of the banks");
constexpr int RING_HEAD = INTERLEAVE * CLASS;
DEVICE int row_place(int row) { return row % INTERLEAVE * CLASS + row / INTERLEAVE * PITCH; }

// Convolved numbers of a head: rows as in `row_of`, each 2 COLUMNS bytes.
constexpr int PLANE = ROWS * COLUMNS * 2 + 16;
constexpr int PLANES = HEADS < 8 ? 8 : HEADS, RESULT = PLANES * PLANE;
DEVICE int row_of(int slot) { return slot % 16 * INTERLEAVE + slot / 16; }

constexpr int BLOCKS = (HEADS + 15) / 16;  // of 16 heads
constexpr int RESULTS_AT = HEADS * RING_HEAD;
constexpr int MIX_AT = RESULTS_AT + RESULTS * RESULT;
constexpr int MIX_BYTES = MIX && BLOCKS > 1 ? BLOCKS * BLOCKS * 512 : 0;
constexpr int TICKS_AT = MIX_AT + MIX_BYTES, TICKS = 8, TICK = 48;
static_assert(TICKS_AT + TICKS * TICK == SHARED_BYTES && LEAD + 3 <= TICKS, "as in plan.py");

// What an exponent is to a power of two. For bfloat16 in 16 bits, 5e-6 less, so that products with bfloat16 are exact and
// `exponent` is one instruction at any magnitude up to 2.3e38.
template <class Element> constexpr bool IS_SHORT = false;
template <> constexpr bool IS_SHORT<Bfloat16> = true;
constexpr bool SHORT = IS_SHORT<ELEMENT>;
constexpr float LOG2_E = SHORT ? 47274.0f / 32768 : 1.44269504f, LOG_2 = 0.693147181f;
constexpr float LOWEST = -0x1.58p127f;  // the reference of no logits: finite, and a bfloat16, so that no NaN comes of it

// (x - reference) log2(e)
DEVICE float exponent(float x, float reference) {
    return SHORT ? fmaf(x, LOG2_E, -(reference * LOG2_E)) : (x - reference) * LOG2_E;
}

struct Numbers {  // [B, HEADS, rows, columns], strides in numbers
    ELEMENT* start;
    int64_t batch, head, row;
    DEVICE int64_t place(int sequence, int of_head, int of_row) const {
        return sequence * batch + of_head * head + of_row * row;
    }
};
struct Arguments {
    Numbers in, out;
    const ELEMENT* taps;  // [HEADS, QUERY_TAPS, KEY_TAPS]
    const ELEMENT* mix;
    int mix_out, mix_in;  // strides
    const int* documents;  // [2, keys]
    int batch, rows_in, rows, above, columns;  // of `in`, `above` rows lie above row 0 of `out`
    int first_position, first_query, keys;
    int row_blocks, steps, run, zero_block;  // steps of a sequence, steps of a block
    float2* partial;     // [parts, B, row_blocks, ROWS, HEADS]: a reference, and the sum of 2^exponent
    float2* statistics;  // [B, HEADS, rows of logits]: a reference, log2 of the sum
    float* logsumexp;
    int64_t logsumexp_batch, logsumexp_head, logsumexp_row;
};

// The keys that the row at a position sees, from `start` to `end`.
struct Seen {
    int start = 0, end = 0;
    DEVICE Seen() {}
    DEVICE Seen(const Arguments& args, int position) {
        if (position < args.first_query || position >= args.keys) return;
        end = CAUSAL ? position + 1 : args.keys;
        if (DOCUMENTS) start = args.documents[position], end = min(end, args.documents[args.keys + position]);
    }
    DEVICE bool some(int first, int count) const { return first < end && first + count > start; }
    DEVICE bool all(int first, int count) const { return first >= start && first + count <= end; }
};

DEVICE float number_of(uint32_t pair, int i) { return to_float(ELEMENT{(uint16_t)(pair >> 16 * i)}); }
