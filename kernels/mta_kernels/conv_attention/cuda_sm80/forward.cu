// Conv attention forward for every NVIDIA GPU from sm_80 on: the convolution as banded products on the tensor cores.
//
//   c = sum over taps t of shift_rows(s, t) @ T[t]      s: scores, T[t]: banded, the same at all columns
//
// A block computes BLOCK_ROWS rows of out and loops over the keys in tiles of KEYS. A tile's scores are a product of the
// rows of q and the tile of k. They go to shared memory in fp16, from where all warps convolve their rows: a warp needs
// HALO rows of the one before. The rows of c then go through the online softmax to the product with the tile of v, in
// registers. Registers hold CHUNK columns of scores or of c at a time: more would spill beside the rows of out. c ends LEFT
// columns before the scores, so no score is computed twice along the keys.
//
// Constants come from the compiler's command line (forward.py):
//   ELEMENT  Half or Bfloat16: q, k, v, out         HEAD_DIM   a multiple of 8 up to 256
//   QUERY_TAPS 1 to 8, KEY_TAPS 1 to 17, PAD key padding to the left
//   CAUSAL, SPANS  0 or 1
//   WARPS; ROW_TILES, sets of 16 rows a warp; KEYS; CHUNK; BLOCKS a multiprocessor; OPERANDS_IN_REGISTERS; SHARED_BYTES
// Scores are rounded to fp16. A row that sees one beyond 65504 becomes NaN and is recomputed in float32 (exact_row).
#include "forward_layout.cuh"
#include "forward_products.cuh"
#include "taps.cuh"
#include <forward_rows.cuh>

// A block's buffers hold one tile of keys and one of values. Values arrive while keys are multiplied, the next keys arrive
// while scores are convolved and values multiplied.
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) cuda_forward(const __grid_constant__ Arguments args) {
    const uint32_t shared = shared_memory();
    const WorkTile work(args, blockIdx.x);
    const int first_row = work.first_row - HALO;  // of the tile
    const uint16_t* const keys = row_of(args.inputs.k, work.batch, work.kv_head, 0);
    const uint16_t* const values = row_of(args.inputs.v, work.batch, work.kv_head, 0);
    copy_rows(shared + QUERIES, args.inputs.q, work.batch, work.head, first_row, args.at.query_rows);
    clear_rest<HEAD_DIM, DEPTH, THREADS>(shared + QUERIES, TILE_ROWS);
    clear_rest<HEAD_DIM, DEPTH, THREADS>(shared + KEYS_AT, KEYS);
    copy_tile(shared + KEYS_AT, keys, args.inputs.k, work.first_tile * KEYS, args.at.key_rows);
    const float unit = write_taps(args.inputs.weight, args.scale_log2, work.head, shared + TAPS);

    Operand queries;
    if (OPERANDS_IN_REGISTERS) {
        copies_wait<0>();
        __syncthreads();
#pragma unroll
        for (int step = 0; step < DEPTH_STEPS; step++) load_operand(queries[OPERANDS_IN_REGISTERS ? step : 0], queries_at(shared), step);
        __syncthreads();
    }
    for (int i = threadIdx.x; i < SCORE_BYTES / 16; i += THREADS) store_shared(shared + SCORES + i * 16, uint4{0, 0, 0, 0});

    const WarpRows rows{args.at, first_row + (int)threadIdx.x / 32 * WARP_ROWS};
    Accumulator accumulator = {};
    float reference[ROW_TILES][2], running_sum[ROW_TILES][2];
#pragma unroll
    for (int i = 0; i < 2 * ROW_TILES; i++) reference[i / 2][i % 2] = -1e30f, running_sum[i / 2][i % 2] = 0;

#pragma unroll 1
    for (int first_key = work.first_tile * KEYS; first_key < work.end_tile * KEYS; first_key += KEYS) {
        copies_wait<0>();
        __syncthreads();  // the keys have come; the scores and values of the tile before are not read any more
        copy_tile(shared + VALUES_AT, values, args.inputs.v, first_key - LEFT, args.at.key_rows);
        move_window(shared + SCORES);
#pragma unroll 1
        for (int chunk = 0; chunk < KEYS; chunk += CHUNK) {
            Columns scores = {};
            if (rows.sees_some(first_key + chunk)) {
                multiply_rows(scores, queries, queries_at(shared), keys_at(shared + KEYS_AT) + chunk * DEPTH * 2);
                rows.mask_scores(scores, first_key + chunk);
            }
            Numbers halves;
            pack_columns<Half>(halves, scores);
            store_scores(shared + SCORES, halves, chunk);
        }
        copies_wait<0>();
        __syncthreads();  // the values have come, the scores of all warps are stored; the keys are not read any more
        if (first_key + KEYS < work.end_tile * KEYS)
            copy_tile(shared + KEYS_AT, keys, args.inputs.k, first_key + KEYS, args.at.key_rows);
#pragma unroll 1
        for (int chunk = 0; chunk < KEYS; chunk += CHUNK) {
            const int first_column = first_key - LEFT + chunk;
            if (!rows.sees_some(first_column)) continue;
            Columns c = {};
            convolve(c, scores_at(shared + SCORES) + chunk / 8 * 16, shared + TAPS);
            rows.mask_convolved(c, first_column);
            uint32_t probabilities[ROW_TILES][CHUNK / 4];
            float sums[2];
#pragma unroll
            for (int e = 0; e < ROW_TILES; e++)
                OnlineSoftmax<CHUNK>{unit, reference[e], running_sum[e], sums, probabilities[e]}.update(c[e], accumulator[e]);
            multiply_values(accumulator, probabilities, values_at(shared) + chunk * DEPTH * 2);
        }
    }
    uint32_t probabilities[CHUNK / 4];
    float sums[2];
#pragma unroll
    for (int e = 0; e < ROW_TILES; e++)
        write_rows<ROW_TILES>(args, work, OnlineSoftmax<CHUNK>{unit, reference[e], running_sum[e], sums, probabilities}, accumulator[e],
                              rows.first + e, work.first_row, rows.lane());
}
