// The arguments of the values kernel, how a cluster shares its tile, and the layout of shared memory.
//
// Constants come from the compiler's command line (values.py): ELEMENT, HEADS up to 16, HEAD_DIM a multiple of 16 up to
// 128, CLUSTER blocks that share a tile of ROWS query rows, and how many units of exponentials and stages of values and of
// planes a block has room for (UNITS, VALUE_STAGES, PLANE_STAGES).
#pragma once
#include <matrix.cuh>
#include <mix_instructions.cuh>
#include <pipeline.cuh>

constexpr int KEYS = 32;  // of a step
constexpr int CONSUMERS = 2, MIXING_WARPS = 4, THREADS = 128 * (CONSUMERS + 2);
constexpr int SLOTS = 16 / CLUSTER;                   // heads of a block, and room for more
constexpr int OWN = (HEADS + CLUSTER - 1) / CLUSTER;  // at most
constexpr int TILES = ROWS / 64;                      // a warp group's product has 64 rows
constexpr int PRODUCTS = TILES == CONSUMERS ? OWN : (OWN + 1) / 2;  // of a warp group
constexpr int GROUPS = ROWS / CLUSTER / 8;            // groups of 8 rows that a block mixes
constexpr int PARTS = MIXING_WARPS / GROUPS;          // warps that share the keys of a group
static_assert(TILES <= CONSUMERS && GROUPS * PARTS == MIXING_WARPS && 32 / 16 % PARTS == 0, "no warp is idle");

// A unit: exponentials of 8 rows, 16 heads and 32 keys, [row][head][key], with the copy engine's 64-byte swizzle.
constexpr int UNIT = 8 * 16 * KEYS * 2;
// A slab: 64 columns of the values of 32 keys, with a 128-byte swizzle.
constexpr int SLAB = KEYS * 128, SLABS = (HEAD_DIM + 63) / 64, VALUES = OWN * SLABS * SLAB;
// A piece: mixed probabilities of 8 rows and 32 keys for the heads of one block, [key / 8][head][row][key % 8]. 8 x 8 numbers
// are a core matrix of wgmma. Row r of the n-th of all 16 heads is in row r ^ n % 8, so that a warp's store of 8 heads of a row
// covers all banks. `row_of` undoes it.
constexpr int CORE = 8 * 16, EIGHT_PITCH = SLOTS * CORE, PIECE = KEYS / 8 * EIGHT_PITCH;
constexpr int PLANES = ROWS / 8 * PIECE;  // the pieces of all rows for one block: its left operands
constexpr int SENT = GROUPS * PIECE;      // the pieces that a block computes for another
DEVICE int row_of(int rank, int slot, int row) { return row ^ (rank * SLOTS + slot) % 8; }

// Shared memory, in bytes from its start.
constexpr int VALUES_AT = 0, UNITS_AT = VALUES_AT + VALUE_STAGES * VALUES, PLANES_AT = UNITS_AT + UNITS * UNIT;
constexpr int SENT_AT = PLANES_AT + PLANE_STAGES * PLANES;
constexpr int BARRIERS_AT = SENT_AT + PLANE_STAGES * (CLUSTER - 1) * SENT;
constexpr int SHARED_END = BARRIERS_AT + 16 * (UNITS + VALUE_STAGES + PLANE_STAGES);
static_assert(SHARED_END == SHARED_BYTES, "as in values.py");
static_assert(UNITS % GROUPS == 0, "the same warps wait for a unit in all phases, none a phase ahead of the others");

struct Arguments {
    ELEMENT* out;                                // of the chunk's first row, [B, HEADS, rows, HEAD_DIM]
    int64_t out_batch, out_head, out_row;        // its strides, in numbers
    const float* scale;  // [B, HEADS, rows]: turns exponentials into probabilities
    Matrix post;                                 // [in, out]
    int rows, first_position, keys, causal;      // row r has position first_position + r, and sees `keys` keys at most
    int sequences, group;                        // and query heads that share a head of the values
};

// The state that the roles of a block share.
struct Block {
    uint32_t shared;
    Pipeline<UNITS> units;
    Pipeline<VALUE_STAGES> values;
    Pipeline<PLANE_STAGES> planes;
    int rank;                  // in its cluster
    int sequence, first_row;   // of the cluster's tile
    int end, steps;            // one past the last key that the tile sees

    DEVICE Block(const Arguments& args)
        : shared(shared_memory()), units(shared + BARRIERS_AT), values(units.empty + 8 * UNITS),
          planes(values.empty + 8 * VALUE_STAGES), rank(block_index() % CLUSTER) {
        const int tiles = (args.rows + ROWS - 1) / ROWS, index = block_index() / CLUSTER;
        sequence = index % args.sequences;
        first_row = (tiles - 1 - index / args.sequences) * ROWS;  // the longest come first
        end = keys_end(args, first_row + ROWS), steps = (end + KEYS - 1) / KEYS;
    }
    static DEVICE int keys_end(const Arguments& args, int end_row) {  // one past the last key that rows before it see
        return args.causal ? max(min(args.first_position + min(end_row, args.rows), args.keys), 0) : args.keys;
    }
    DEVICE uint32_t planes_at(int stage) const { return shared + PLANES_AT + stage * PLANES; }
    DEVICE uint32_t sent_at(int stage, int to_rank) const {
        return shared + SENT_AT + (stage * (CLUSTER - 1) + (to_rank - rank + CLUSTER - 1) % CLUSTER) * SENT;
    }
    DEVICE void init_barriers() const {
        units.init(PARTS);
        values.init(4 * CONSUMERS);
        planes.init(4 * CONSUMERS * CLUSTER, MIXING_WARPS);
        barrier_init_done();
    }
};
