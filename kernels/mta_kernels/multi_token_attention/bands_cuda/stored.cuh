// Which keys of a chunk's rows are visible, and which are stored.
//
// Constants come from the compiler's command line: CAUSAL, DOCUMENTS. Each kernel defines `Arguments`.
#pragma once
#include <mma.cuh>

constexpr int BLOCK = 128;  // of rows and keys, as in triton/chunks.py

// One past the last key at which a row is stored.
template <class Arguments> DEVICE int stored_end(const Arguments& args, int row) {
    if (!CAUSAL) return args.pitch;
    return min((max(args.first_position + row + BLOCK - 1, -1) + BLOCK) / BLOCK * BLOCK, args.pitch);
}

// The keys that a row sees, from `start` to `end`.
struct Seen {
    int start = 0, end = 0;
    DEVICE Seen() {}
    template <class Arguments> DEVICE Seen(const Arguments& args, int row) {
        const int query = args.first_row + row, position = args.first_position + row;
        if (query < 0 || query >= args.query_rows) return;
        end = CAUSAL ? position + 1 : args.key_rows;
        if (DOCUMENTS) start = args.documents[position], end = min(end, args.documents[args.key_rows + position]);
    }
    DEVICE bool all(int first, int count) const { return first >= start && first + count <= end; }
};

// Whether stored gradients are times a loss scale: of each sequence, or with DOCUMENTS of each position.
template <class Element> constexpr bool SCALED = false;
template <> constexpr bool SCALED<Half> = true;

// One over a row's loss scale, to multiply stored gradients by; rows that are no queries have no loss scale.
template <class Arguments> DEVICE float gradient_unit(const Arguments& args, int batch, int row) {
    if (!SCALED<ELEMENT> || !args.loss_scale) return 1;
    const int query = args.first_row + row;
    if (DOCUMENTS && (query < 0 || query >= args.query_rows)) return 1;
    return 1 / args.loss_scale[DOCUMENTS ? args.first_position + row : batch];
}

DEVICE float number_of(uint32_t pair, int i) { return to_float(ELEMENT{(uint16_t)(pair >> 16 * i)}); }

template <bool Value> struct Constant {
    static constexpr bool value = Value;
};
