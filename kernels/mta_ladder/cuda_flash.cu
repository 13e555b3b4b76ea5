// Attention in one fused kernel on the tensor cores (FlashAttention-2): no score is ever stored.
//
//   out[i] = sum over j of exp(s[i, j] - max_i) v[j] / sum over j of exp(s[i, j] - max_i),  s[i, j] = scale q[i] . k[j]
//
// A block of threads computes BLOCK_ROWS rows of out, each warp 16 ROW_TILES of them, and steps over the keys in tiles
// of KEYS. A tile's scores, the product of rows of q and a tile of k, live in registers. The online softmax keeps a
// running maximum and sum of each row; where the maximum grows, it rescales the sums so far. The probabilities, still
// in registers, are the left operand of the product with the tile of v. The accumulator layout of one product is the
// operand layout of the next. Copies into shared memory run while the warps multiply: tiles of k and v arrive in turn,
// in STAGES buffers each. With one stage, v arrives while k is multiplied, and the next k while v is multiplied.
//
// FLOP: 2 (HEAD_DIM + VALUE_DIM) a score; a head has N^2 scores, causal half of them. Bytes: q and out once, k and v
// once for every BLOCK_ROWS rows, mostly from L2: with 128 rows of head dim 128 that is 128 FLOP a byte.
//
// Constants come from the compiler's command line: ELEMENT Half or Bfloat16; HEAD_DIM and VALUE_DIM, multiples of 8
// up to 256; and the shape of a block, which cuda_flash.py chooses. Alone, with registers and spills:
//   nvcc -arch=sm_80 -cubin -Xptxas -v -I. -I../nvrtc cuda_flash.cu
//     -DELEMENT=Bfloat16,HEAD_DIM=128,VALUE_DIM=128,WARPS=4,ROW_TILES=2,KEYS=64,STAGES=1,BLOCKS=2
#include <mma.cuh>
#include <swizzle.cuh>

constexpr int THREADS = 32 * WARPS, WARP_ROWS = 16 * ROW_TILES, BLOCK_ROWS = WARPS * WARP_ROWS;
constexpr int QK_STEPS = (HEAD_DIM + 15) / 16, PV_STEPS = KEYS / 16;              // products are 16 deep
constexpr int DEPTH = 16 * QK_STEPS, VALUE_COLUMNS = (VALUE_DIM + 15) / 16 * 16;  // of tiles in shared memory
constexpr bool QUERIES_IN_REGISTERS = DEPTH <= 64;                                // else they would spill
static_assert(HEAD_DIM % 8 == 0 && VALUE_DIM % 8 == 0, "copies are of 16 bytes");

// Shared memory, in bytes from its start. At the end the block's rows of out overwrite all of it.
constexpr int KEY_TILE = KEYS * DEPTH * 2, VALUE_TILE = KEYS * VALUE_COLUMNS * 2;
constexpr int QUERIES = 0, KEYS_AT = QUERIES + BLOCK_ROWS * DEPTH * 2, VALUES_AT = KEYS_AT + STAGES * KEY_TILE;

struct Rows {  // [B, heads, rows, numbers]; strides in numbers, multiples of 8, as the start is of 16 bytes
    const uint16_t* start;
    int64_t stride_batch, stride_head;
    int stride_row;  // the lower half of what the host gives, an int64
};
struct Arguments {
    Rows q, k, v;
    uint16_t* out;     // [B, heads, queries, VALUE_DIM]
    float scale_log2;  // scale * log2(e), above zero
    int batch_heads, heads, group, queries, keys;
    int diagonal;        // row i sees the keys up to i + diagonal
    int heads_together;  // so many heads' keys and values fit L2
};

// Eight threads copy a row of a tile: thread t takes chunks t % 8, t % 8 + 8, .. of rows t / 8, t / 8 + THREADS / 8, ..

// This thread's first chunk in rows from `row` on.
DEVICE const uint16_t* chunk_of(const Rows& x, int batch, int head, int row) {
    const uint16_t* rows = x.start + batch * x.stride_batch + head * x.stride_head;
    return rows + (row + (int)threadIdx.x / 8) * (int64_t)x.stride_row + threadIdx.x % 8 * 8;
}

// Begin to copy `Count` rows of a tile; rows from `end` on are zeros. `source` advances to the row after them.
template <int Numbers, int Columns, int Count>
DEVICE void copy_tile(uint32_t tile, const uint16_t*& source, int stride, int end) {
    constexpr int chunks = Numbers / 8;
    const int first = threadIdx.x / 8, chunk = threadIdx.x % 8;
#pragma unroll
    for (int row = 0; row < Count; row += THREADS / 8, source += THREADS / 8 * stride)
#pragma unroll
        for (int on = 0; on < chunks; on += 8)
            if (on + 8 <= chunks || chunk + on < chunks)
                copy_async(tile + in_tile<Columns>(first + row, chunk + on), source + on * 8, first + row < end);
}

// What a block computes. Blocks with the most keys come first, so that the last ones to run are short. Only a few heads
// run at a time, whose keys and values fit L2.
struct Work {
    int batch_head, first_row;
};
DEVICE Work work_of(const Arguments& args) {
    const int row_blocks = (args.queries + BLOCK_ROWS - 1) / BLOCK_ROWS, block = block_index();
    const int first_head = block / (row_blocks * args.heads_together) * args.heads_together;
    const int heads = min(args.heads_together, args.batch_heads - first_head);
    const int turn = block - first_head * row_blocks;
    return {first_head + turn % heads, (row_blocks - 1 - turn / heads) * BLOCK_ROWS};
}

// The tiles of a head's keys or values, copied in turn into STAGES buffers. Each copy is a group, empty past `end_key`.
template <int Numbers, int Columns> struct Tiles {
    const uint16_t* next;  // this thread's first chunk of the next tile to copy
    uint32_t buffers;
    int stride;

    DEVICE void copy(int first_key, int end_key) {
        const uint32_t tile = buffers + first_key / KEYS % STAGES * (KEYS * Columns * 2);
        if (first_key < end_key) copy_tile<Numbers, Columns, KEYS>(tile, next, stride, end_key - first_key);
        copies_commit();
    }
};

// A thread holds rows lane / 4 + 8 h + 16 r of its warp, and two neighbouring numbers of every eight columns; see
// `multiply`.
using Scores = float[ROW_TILES][KEYS / 8][4];
using Sums = float[ROW_TILES][VALUE_COLUMNS / 8][4];
using Statistic = float[ROW_TILES][2];
using Queries = uint32_t[QUERIES_IN_REGISTERS ? QK_STEPS : 1][ROW_TILES][4];

DEVICE void load_queries(uint32_t (&a)[ROW_TILES][4], uint32_t queries_at, int step) {
#pragma unroll
    for (int r = 0; r < ROW_TILES; r++)
        load_matrices(a[r], at_step<DEPTH>(queries_at, step) + 16 * r * DEPTH * 2);
}

// scores += q k, for a tile of k. The loads of 16 keys overlap the products of the 16 before; the compiler does not
// arrange this itself.
DEVICE void multiply_keys(Scores& scores, Queries& queries, uint32_t queries_at, uint32_t key_tile) {
    uint32_t next_keys[2][4];
    auto load_keys = [&](int i) {
        const uint32_t address = at_step<DEPTH>(key_tile, i / (KEYS / 16));
        load_matrices(next_keys[i % 2], address + 16 * (i % (KEYS / 16)) * DEPTH * 2);
    };
    load_keys(0);
#pragma unroll
    for (int i = 0; i < QK_STEPS * (KEYS / 16); i++) {
        const int step = i / (KEYS / 16), n = i % (KEYS / 16);
        auto& a = queries[QUERIES_IN_REGISTERS ? step : 0];
        const auto& b = next_keys[i % 2];
        if (!QUERIES_IN_REGISTERS && n == 0) load_queries(a, queries_at, step);
        if (i + 1 < QK_STEPS * (KEYS / 16)) load_keys(i + 1);
#pragma unroll
        for (int r = 0; r < ROW_TILES; r++) {
            multiply<ELEMENT>(scores[r][2 * n], a[r], b[0], b[1]);
            multiply<ELEMENT>(scores[r][2 * n + 1], a[r], b[2], b[3]);
        }
    }
}

// Minus infinity where a row does not see a key. `last_key` is the last that this thread's first row sees.
DEVICE void mask(Scores& scores, int first_key, int last_key, int keys) {
    const int column = threadIdx.x % 4 * 2;
#pragma unroll
    for (int r = 0; r < ROW_TILES; r++)
#pragma unroll
        for (int i = 0; i < KEYS / 2; i++) {
            const int key = first_key + i / 4 * 8 + column + i % 2;
            const int last = min(last_key + 16 * r + i / 2 % 2 * 8, keys - 1);
            if (key > last) scores[r][i / 4][i % 4] = MINUS_INFINITY;
        }
}

// The running maximum with these scores, in powers of two. It moves only where it has grown by more than 8: sum and
// accumulator share it, so the result is the same, and rescaling is rare.
DEVICE void follow_maximum(const Scores& scores, float scale_log2, Statistic& running_max, Statistic& running_sum,
                           Sums& accumulator) {
    Statistic rescale;
    bool moved = false;
#pragma unroll
    for (int r = 0; r < ROW_TILES; r++)
#pragma unroll
        for (int h = 0; h < 2; h++) {
            float largest = MINUS_INFINITY;
#pragma unroll
            for (int n = 0; n < KEYS / 8; n++)
                largest = fmaxf(largest, fmaxf(scores[r][n][2 * h], scores[r][n][2 * h + 1]));
            largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 1));
            largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 2));
            largest *= scale_log2;
            const bool moves = largest > running_max[r][h] + 8;
            rescale[r][h] = moves ? exp2_fast(running_max[r][h] - largest) : 1;
            running_max[r][h] = moves ? largest : running_max[r][h];
            moved |= moves;
        }
    if (!__any_sync(~0u, moved)) return;
#pragma unroll
    for (int r = 0; r < ROW_TILES; r++)
#pragma unroll
        for (int h = 0; h < 2; h++) running_sum[r][h] *= rescale[r][h];
#pragma unroll
    for (int r = 0; r < ROW_TILES; r++)
#pragma unroll
        for (int i = 0; i < VALUE_COLUMNS / 2; i++) accumulator[r][i / 4][i % 4] *= rescale[r][i / 2 % 2];
}

// running_sum += p and accumulator += p v, for a tile of v and its probabilities p.
DEVICE void add_values(const Scores& scores, float scale_log2, const Statistic& running_max, Statistic& running_sum,
                       Sums& accumulator, uint32_t value_tile) {
#pragma unroll
    for (int step = 0; step < PV_STEPS; step++) {
        uint32_t probabilities[ROW_TILES][4];
#pragma unroll
        for (int r = 0; r < ROW_TILES; r++)
#pragma unroll
            for (int i = 0; i < 4; i++) {  // as `multiply` takes its left operand
                const float* pair = scores[r][2 * step + i / 2] + i % 2 * 2;
                const float first = exp2_fast(fmaf(pair[0], scale_log2, -running_max[r][i % 2]));
                const float second = exp2_fast(fmaf(pair[1], scale_log2, -running_max[r][i % 2]));
                running_sum[r][i % 2] += first + second;
                probabilities[r][i] = pack<ELEMENT>(first, second);
            }
#pragma unroll
        for (int n = 0; n < VALUE_COLUMNS / 16; n++) {
            uint32_t b[4];
            load_matrices_transposed(b, at_step<VALUE_COLUMNS>(value_tile, n) + 16 * step * VALUE_COLUMNS * 2);
#pragma unroll
            for (int r = 0; r < ROW_TILES; r++) {
                multiply<ELEMENT>(accumulator[r][2 * n], probabilities[r], b[0], b[1]);
                multiply<ELEMENT>(accumulator[r][2 * n + 1], probabilities[r], b[2], b[3]);
            }
        }
    }
}

// The block's rows of out, through shared memory, so that a thread writes 16 bytes of a row. Indices of the block and
// thread are computed anew: kept in registers across the loop over keys, they would spill.
DEVICE void write_out(const Arguments& args, uint32_t shared, const Sums& accumulator, const Statistic& running_sum) {
    __syncthreads();
    const int thread = thread_index(), out_row = thread / 32 * WARP_ROWS + thread % 32 / 4;
#pragma unroll
    for (int r = 0; r < ROW_TILES; r++)
#pragma unroll
        for (int h = 0; h < 2; h++) {
            float sum = running_sum[r][h];
            sum += __shfl_xor_sync(~0u, sum, 1);
            sum += __shfl_xor_sync(~0u, sum, 2);
            const float inverse = reciprocal_fast(sum);
#pragma unroll
            for (int n = 0; n < VALUE_COLUMNS / 8; n++)
                store_shared(shared + in_tile<VALUE_COLUMNS>(out_row + 16 * r + 8 * h, n) + thread % 4 * 4,
                             pack<ELEMENT>(accumulator[r][n][2 * h] * inverse, accumulator[r][n][2 * h + 1] * inverse));
        }
    __syncthreads();
    const Work work = work_of(args);
    const int rows = min(args.queries - work.first_row, BLOCK_ROWS);
    uint16_t* out = args.out + ((int64_t)work.batch_head * args.queries + work.first_row) * VALUE_DIM;
    for (int i = thread; i < rows * (VALUE_DIM / 8); i += THREADS) {
        const int from_row = i / (VALUE_DIM / 8), chunk = i % (VALUE_DIM / 8);
        *(uint4*)(out + i * 8) = load_shared_16(shared + in_tile<VALUE_COLUMNS>(from_row, chunk));
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) cuda_flash(const __grid_constant__ Arguments args) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const uint32_t shared = shared_memory();
    const Work work = work_of(args);
    const int batch = work.batch_head / args.heads, head = work.batch_head % args.heads;
    const int end_row = min(work.first_row + BLOCK_ROWS, args.queries);
    const int end_key = min(end_row + args.diagonal, args.keys);

    const uint16_t* queries = chunk_of(args.q, batch, head, work.first_row);
    const int kv_head = head / args.group;
    Tiles<HEAD_DIM, DEPTH> keys = {chunk_of(args.k, batch, kv_head, 0), shared + KEYS_AT, args.k.stride_row};
    Tiles<VALUE_DIM, VALUE_COLUMNS> values = {chunk_of(args.v, batch, kv_head, 0), shared + VALUES_AT,
                                              args.v.stride_row};
    clear_rest<HEAD_DIM, DEPTH, THREADS>(shared + QUERIES, BLOCK_ROWS);
    clear_rest<HEAD_DIM, DEPTH, THREADS>(shared + KEYS_AT, STAGES * KEYS);
    copy_tile<HEAD_DIM, DEPTH, BLOCK_ROWS>(shared + QUERIES, queries, args.q.stride_row, end_row - work.first_row);
    keys.copy(0, end_key);
    for (int stage = 1; stage < STAGES; stage++) {
        values.copy((stage - 1) * KEYS, end_key);
        keys.copy(stage * KEYS, end_key);
    }

    // A thread passes `ldmatrix` the address of one row of one of four matrices. Of q and v, the first 16 rows of eight
    // columns and then of the next eight. Of k, 16 columns of the first eight rows and then of the next.
    const uint32_t queries_at = shared + QUERIES + in_tile<DEPTH>(warp * WARP_ROWS + lane % 16, lane / 16);
    const uint32_t keys_at = shared + KEYS_AT + in_tile<DEPTH>(lane / 16 * 8 + lane % 8, lane / 8 % 2);
    const uint32_t values_at = shared + VALUES_AT + in_tile<VALUE_COLUMNS>(lane % 16, lane / 16);
    const int last_key = work.first_row + warp * WARP_ROWS + lane / 4 + args.diagonal;  // that its first row sees
    Queries query_tiles;
    if (QUERIES_IN_REGISTERS) {
        copies_wait<2 * STAGES - 2>();
        __syncthreads();
#pragma unroll
        for (int step = 0; step < QK_STEPS; step++)
            load_queries(query_tiles[QUERIES_IN_REGISTERS ? step : 0], queries_at, step);
    }

    Sums accumulator = {};
    Statistic running_max, running_sum;
#pragma unroll
    for (int i = 0; i < 2 * ROW_TILES; i++) running_max[i / 2][i % 2] = MINUS_INFINITY, running_sum[i / 2][i % 2] = 0;

    for (int first_key = 0; first_key < end_key; first_key += KEYS) {
        const int stage = first_key / KEYS % STAGES;

        // The keys of this tile have arrived, and no warp still reads the values before the last ones.
        copies_wait<2 * STAGES - 2>();
        __syncthreads();
        values.copy(first_key + (STAGES - 1) * KEYS, end_key);
        Scores scores = {};
        multiply_keys(scores, query_tiles, queries_at, keys_at + stage * KEY_TILE);

        // The values of this tile have arrived, and no warp still reads its keys.
        copies_wait<2 * STAGES - 2>();
        __syncthreads();
        keys.copy(first_key + STAGES * KEYS, end_key);

        // Only tiles on the diagonal, and the last one, have keys that a row does not see.
        if (first_key + KEYS - 1 > min(last_key, args.keys - 1)) mask(scores, first_key, last_key, args.keys);
        follow_maximum(scores, args.scale_log2, running_max, running_sum, accumulator);
        add_values(scores, args.scale_log2, running_max, running_sum, accumulator, values_at + stage * VALUE_TILE);
    }
    write_out(args, shared, accumulator, running_sum);
}
