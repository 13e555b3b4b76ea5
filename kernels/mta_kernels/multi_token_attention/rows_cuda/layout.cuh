// The arguments of the row kernels, the columns of a row that a block has, and the layout of shared memory.
//
// Constants come from the compiler's command line: ELEMENT Half or Bfloat16; HEADS up to 64; CLUSTER blocks that
// share a row; WARPS that compute; BULK, whether one more warp copies rows by the copy engine (sm_90 and later);
// PRE_MIX, whether scores are mixed; OPERANDS, 1 or with gradients 2; BLOCKS an SM, which bounds the registers.
#pragma once
#include <matrix.cuh>
#include <rows_instructions.cuh>

constexpr int COMPUTING = 32 * WARPS, THREADS = COMPUTING + 32 * BULK;
constexpr int SQUARES = (HEADS + 15) / 16;  // products are of 16 x 16 heads: padding heads have weight 0
constexpr int PADDED = 16 * SQUARES;
constexpr int EIGHTS = 2 * SQUARES;         // a lane has two heads of every eight
constexpr int MOST_STAGES = 4;
constexpr int ZEROS = 1024;                 // bytes of zeros, to fill memory with
static_assert(CLUSTER == 1 || BULK, "clusters are of sm_90");

// Shared memory, in bytes from its start. Stages follow, each of OPERANDS buffers of HEADS rows of `pitch` bytes.
constexpr int FULL_AT = 0, DONE_AT = 8 * MOST_STAGES, RECEIVED_AT = 16 * MOST_STAGES;
constexpr int SCRAP_AT = RECEIVED_AT + 16;  // 16 bytes that nobody reads
constexpr int ZEROS_AT = SCRAP_AT + 16 + 16;
constexpr int WEIGHT_PITCH = PADDED * 2 + 16, WEIGHT = PADDED * WEIGHT_PITCH;  // odd units of 16: no bank conflicts
constexpr int PRE_AT = ZEROS_AT + ZEROS, POST_AT = PRE_AT + WEIGHT;
constexpr int OF_WARPS_AT = POST_AT + WEIGHT;                      // pairs [WARPS, PADDED]
constexpr int OF_BLOCKS_AT = OF_WARPS_AT + WARPS * PADDED * 8;     // pairs [2, CLUSTER, PADDED]
constexpr int STAGES_AT = (OF_BLOCKS_AT + 2 * CLUSTER * PADDED * 8 + 127) / 128 * 128;
static_assert(STAGES_AT == FIXED_BYTES, "as in rows.py");

struct Arguments {
    ELEMENT* operands[2];           // [B, HEADS, rows, ld]: scores, and gradients of the mixed probabilities
    Matrix pre, post;               // [out, in] and [in, out]
    float* logsumexp;               // [B, HEADS, rows]
    int64_t sums_batch, sums_head, sums_row;  // its strides
    const int* documents;           // [2, N]: first and end of each position's document; or none
    int64_t documents_stride;
    int64_t ld;
    int rows, all_rows;             // of a sequence, and of all B
    int first_position, keys, causal;
    int block;                      // rows and columns that products read at a time: see `Stored`; or 0
    int clusters;                   // that share the rows
    int pitch, stages;
    float* parts;                   // [blocks, WARPS, 2, HEADS, HEADS]: gradients of pre and of post
    const float* loss_scale;        // of the gradients: of a sequence, or with documents of a position; or none
};

// One row of the scores, all heads: its visible columns, and this block's part of them.
struct Row {
    int sequence, number;
    int low, high;    // visible
    int first, end;   // the same, whole units of 8 columns
    int start, stop;  // of this block
    int64_t offset;   // of head 0, in numbers

    DEVICE Row(const Arguments& args, int index, int rank) {
        sequence = index / args.rows, number = index - sequence * args.rows;
        offset = ((int64_t)sequence * HEADS * args.rows + number) * args.ld;
        const int position = args.first_position + number;
        low = 0, high = args.causal ? min(position + 1, args.keys) : args.keys;
        if (args.documents) {
            low = max(args.documents[position], 0);
            high = min(args.documents[args.documents_stride + position], high);
        }
        if (high <= low) low = high = 0;
        first = low & ~7, end = (high + 7) & ~7;
        const int segment = ((end - first + CLUSTER - 1) / CLUSTER + 63) & ~63;
        start = min(first + rank * segment, end), stop = min(start + segment, end);
    }
    // One over the loss scale of the stored gradients.
    DEVICE float gradient_unit(const Arguments& args) const {
        return args.loss_scale ? 1 / args.loss_scale[args.documents ? args.first_position + number : sequence] : 1;
    }
    DEVICE bool sees(int column) const { return column >= low && column < high; }
    DEVICE int64_t head_stride(const Arguments& args) const { return args.rows * args.ld; }
};

// The columns of a row that are written, zeros where it does not see: all, or only those that its block's products read.
struct Stored {
    int from, to;

    DEVICE Stored(const Arguments& args, const Row& row) {
        from = 0, to = (int)args.ld;
        if (args.block == 0) return;
        const int position = args.first_position + row.number / args.block * args.block;  // of the block's first row
        if (args.causal) to = min(to, (max(position + args.block - 1, -1) / args.block + 1) * args.block);
        if (args.documents) from = min(args.documents[position] / args.block * args.block, row.first);
    }
};

DEVICE uint32_t stage_at(const Arguments& args, uint32_t shared, int stage, int operand) {
    return shared + STAGES_AT + (stage * OPERANDS + operand) * HEADS * args.pitch;
}

// Steps through the stages, and counts the rounds.
struct Turn {
    int stage = 0, round = 0;
    DEVICE void next(int stages) {
        if (++stage == stages) stage = 0, round ^= 1;
    }
};
