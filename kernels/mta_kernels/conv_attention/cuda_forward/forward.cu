// Conv attention forward for every NVIDIA GPU from sm_80 on: the convolution as banded products on the tensor cores.
//
//   c = sum over taps t of shift_rows(s, t) @ T[t]      s: scores, T[t]: banded, the same at all columns
//
// A block computes BLOCK_ROWS rows of out and goes through the keys in tiles of KEYS. A tile's scores are a product of the
// rows of q and the tile of k. They go to shared memory in fp16, from where all warps convolve their rows: a warp needs
// HALO rows of the one before. The rows of c then go through the online softmax to the product with the tile of v, in
// registers. c ends LEFT columns before the scores, so no score is computed twice along the keys.
//
// Constants come from the compiler's command line (forward.py):
//   ELEMENT  Half or Bfloat16: q, k, v, out         HEAD_DIM   a multiple of 8 up to 256
//   QUERY_TAPS 1 to 8, KEY_TAPS 1 to 17, PAD key padding to the left
//   CAUSAL, SPANS  0 or 1; MARGINS 0
//   WARPS; ROW_TILES, sets of 16 rows a warp; KEYS; BLOCKS a multiprocessor; QUERIES_IN_REGISTERS; SHARED_BYTES
// Scores go through fp16. A row that sees one beyond 65504 comes out NaN and is computed again, in float32 (exact_row).
#include "rows.cuh"
#include <forward_rows.cuh>

// A block's buffers hold one tile of keys and one of values. Values come while keys are multiplied, the next keys come while
// scores are convolved and values multiplied.
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) cuda_forward(const __grid_constant__ Arguments args) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const uint32_t shared = shared_memory();
    const WorkTile work(args, blockIdx.x);
    const int first_row = work.first_row - HALO;  // of the tile
    const int first_key = work.first_tile * KEYS;
    Tiles keys(args.inputs.k, work.batch, work.kv_head, first_key, args.at.key_rows);
    Tiles values(args.inputs.v, work.batch, work.kv_head, first_key - LEFT, args.at.key_rows);
    copy_queries(shared + QUERIES, args.inputs.q, work.batch, work.head, first_row, args.at.query_rows);
    clear_rest<HEAD_DIM, DEPTH, THREADS>(shared + QUERIES, TILE_ROWS);
    clear_rest<HEAD_DIM, DEPTH, THREADS>(shared + KEYS_AT, KEYS);
    keys.copy(shared + KEYS_AT);
    copies_commit();
    const float unit = write_taps(args, work.head, shared + TAPS);

    const uint32_t queries_at = shared + QUERIES + in_tile<DEPTH>(warp * WARP_ROWS + lane % 16, lane / 16);
    const uint32_t keys_at = shared + KEYS_AT + in_tile<DEPTH>(lane / 16 * 8 + lane % 8, lane / 8 % 2);
    const uint32_t values_at = shared + VALUES_AT + in_tile<DEPTH>(lane % 16, lane / 16);
    Queries queries;
    if (QUERIES_IN_REGISTERS) {
        copies_wait<0>();
        __syncthreads();
#pragma unroll
        for (int step = 0; step < DEPTH_STEPS; step++) load_queries(queries[QUERIES_IN_REGISTERS ? step : 0], queries_at, step);
        __syncthreads();
    }
    for (int i = threadIdx.x; i < SCORE_BYTES / 16; i += THREADS) store_shared(shared + SCORES + i * 16, uint4{0, 0, 0, 0});

    const WarpRows rows{args.at, first_row + warp * WARP_ROWS};
    Accumulator accumulator = {};
    float reference[ROW_TILES][2], running_sum[ROW_TILES][2];
#pragma unroll
    for (int i = 0; i < 2 * ROW_TILES; i++) reference[i / 2][i % 2] = -1e30f, running_sum[i / 2][i % 2] = 0;

#pragma unroll 1
    for (int first_key = work.first_tile * KEYS; first_key < work.end_tile * KEYS; first_key += KEYS) {
        copies_wait<0>();
        __syncthreads();  // the keys have come; the scores and values of the tile before are not read any more
        values.copy(shared + VALUES_AT);
        copies_commit();
        const ScoreTile score_tile(shared + SCORES, thread_index());
        score_tile.move_window();
        {
            Scores scores = {};
            if (rows.sees_some(first_key)) {
                multiply_keys(scores, queries, queries_at, keys_at);
                rows.mask_scores(scores, first_key);
            }
            score_tile.store(scores);
        }
        copies_wait<0>();
        __syncthreads();  // the values have come, the scores of all warps are stored; the keys are not read any more
        if (first_key + KEYS < work.end_tile * KEYS) keys.copy(shared + KEYS_AT);
        copies_commit();
        if (!rows.sees_some(first_key - LEFT)) continue;

        Scores c = {};
        convolve(c, score_tile.loads_at, shared + TAPS);
        rows.mask_convolved(c, first_key - LEFT);
        uint32_t probabilities[ROW_TILES][KEYS / 4];
        float sums[2];
#pragma unroll
        for (int e = 0; e < ROW_TILES; e++)
            OnlineSoftmax{unit, reference[e], running_sum[e], sums, probabilities[e]}.update(c[e], accumulator[e]);
        multiply_values(accumulator, probabilities, values_at);
    }
    uint32_t probabilities[KEYS / 4];
    float sums[2];
#pragma unroll
    for (int e = 0; e < ROW_TILES; e++)
        write_rows<ROW_TILES>(args, work, OnlineSoftmax{unit, reference[e], running_sum[e], sums, probabilities}, accumulator[e],
                              rows.first + e, work.first_row, lane);
}
