// Conv attention forward by overlapping tiles, the convolution on CUDA cores.
//
// A block computes MIXED_ROWS = 64 - (QUERY_TAPS - 1) rows of out. It steps over the keys, MIXED_COLUMNS = 64 -
// (KEY_TAPS - 1) at a time, and at each step
//   scores = q k^T, 64 x 64 from QUERY_TAPS - 1 rows above and PAD columns left of what it computes, zero where masked
//   c = convolution of the scores in shared memory: patches of 8 rows by 4 columns in a thread's registers
//   p = exp2(c - running maximum), in place of the scores; out = out * rescale + p v, in registers
// The algorithm is from github.com/Gusanidas/flash-multi-token-attention, which calls the strides B - P_q and B - 2
// P_k. This kernel keeps out in registers; the original adds it to memory at each step.
//
// Cost a score that counts, where W = 64 * 64 / (MIXED_ROWS * MIXED_COLUMNS) is what the overlap costs (1.22 at 7 x 7,
// 1.40 at 11 x 11):
//   FMAs: W * QUERY_TAPS * KEY_TAPS of the convolution, float32; W * 2 * HEAD_DIM of products, for 16 bits on the tensor
//     cores, with float32 sums and p rounded to 16 bits, for float32 on CUDA cores
//   bytes of shared memory: W * (7 + QUERY_TAPS) / 8 * WINDOW read by the convolution, where WINDOW = 3 + KEY_TAPS
//     rounded up to a multiple of 4 (26 bytes at 7 x 7); W * 12 for scores and p; W * HEAD_DIM * 9 / 32 read by the
//     16-bit products, W * HEAD_DIM * 3 by the float32 products
//
// Compile it alone, say for its registers, with the constants that tiles.cuh lists:
//   nvcc -cubin -arch=sm_80 -std=c++17 -Xptxas=-v -I. -I../../nvrtc -DELEMENT=Half -DTENSOR_CORES=1 -DHEAD_DIM=64
//     -DQUERY_TAPS=7 -DKEY_TAPS=7 forward.cu
#include <tiles.cuh>

struct Arguments {
    Rows q, k, v;
    const float* weight;  // [Hq, QUERY_TAPS, KEY_TAPS]
    Number* out;          // [B, Hq, N, HEAD_DIM]
    float* logsumexp;     // [B, Hq, N], of log2
    float scale_log2;     // scale * log2(e)
    int heads, group, length, row_blocks, pad, causal;
};

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) conv_attention_forward(const Arguments args) {
    Number* queries = (Number*)shared_bytes();
    Number* tile = queries + TILE_NUMBERS;  // of k, then of v
    float* scores = (float*)(tile + TILE_NUMBERS);
    float* taps = scores + SCORE_NUMBERS;
    float* row_factors = taps + TAP_NUMBERS;  // [64]

    const int batch_head = blockIdx.x / args.row_blocks, length = args.length;
    const int batch = batch_head / args.heads, head = batch_head % args.heads;
    const int row_block = args.row_blocks - 1 - blockIdx.x % args.row_blocks;  // if causal, the last have the most keys
    const int first_row = row_block * MIXED_ROWS;
    const int end_key = args.causal ? min(first_row + MIXED_ROWS, length) : length;
    const Matrix q = matrix_of(args.q, batch, head, length);
    const Matrix k = matrix_of(args.k, batch, head / args.group, length);
    const Matrix v = matrix_of(args.v, batch, head / args.group, length);
    load_taps(taps, args.weight + head * QUERY_TAPS * KEY_TAPS, args.scale_log2, false);

    constexpr int EACH = rows_each(MIXED_ROWS);
    const int own_row = patch_row<EACH>(), own_column = patch_column();
    float running_max[EACH], running_sum[EACH];  // the sum is of the columns of this thread
#pragma unroll
    for (int i = 0; i < EACH; i++) running_max[i] = MINUS_INFINITY, running_sum[i] = 0;
    float out[CHUNKS][CHUNK / 2] = {};

    for (int key = 0; key < end_key; key += MIXED_COLUMNS) {
        float sum[TILE / 2] = {};
        product_of_rows(sum, {queries, q, first_row - HALO_ROWS, key > 0}, {tile, k, key - args.pad, false});
        store_scores(scores, sum, first_row - HALO_ROWS, key - args.pad, length, args.causal);
        __syncthreads();
        load_tile(tile, v, key, 0);  // arrives during the convolution

        float mixed[EACH][4];
        convolve(mixed, scores, taps);
        float factor[EACH];
#pragma unroll
        for (int i = 0; i < EACH; i++) {
            float largest = running_max[i];
#pragma unroll
            for (int j = 0; j < 4; j++) {
                const bool seen = counts(first_row + own_row + i, key, own_column + j, length, args.causal) &&
                                  own_column + j < MIXED_COLUMNS;
                if (!seen) mixed[i][j] = MINUS_INFINITY;
                largest = fmaxf(largest, mixed[i][j]);
            }
            for (int other = 1; other < 16; other *= 2) largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, other));
            const float reference = largest == MINUS_INFINITY ? 0 : largest;
            factor[i] = exp2_fast(running_max[i] - reference);
            running_max[i] = largest;
            running_sum[i] *= factor[i];
#pragma unroll
            for (int j = 0; j < 4; j++) running_sum[i] += mixed[i][j] = exp2_fast(mixed[i][j] - reference);
        }
        __syncthreads();  // all have read their scores
#pragma unroll
        for (int i = 0; i < EACH; i++) {
            *(float4*)(scores + (own_row + i) * PITCH + own_column) = {mixed[i][0], mixed[i][1], mixed[i][2], mixed[i][3]};
            if (own_column == 0) row_factors[own_row + i] = factor[i];
        }
#pragma unroll
        for (int chunk = 0; chunk < CHUNKS; chunk++) {
            if (chunk > 0) __syncthreads(), load_tile(tile, v, key, chunk);
            copies_wait();
            __syncthreads();
#pragma unroll
            for (int i = 0; i < CHUNK / 2; i++) out[chunk][i] *= row_factors[row_of<CHUNK>(i)];
            multiply<MIXED_COLUMNS>(out[chunk], scores, tile);
        }
    }

    __syncthreads();
#pragma unroll
    for (int i = 0; i < EACH; i++) {
        for (int other = 1; other < 16; other *= 2) running_sum[i] += __shfl_xor_sync(~0u, running_sum[i], other);
        const int row = first_row + own_row + i;
        if (own_column > 0) continue;
        row_factors[own_row + i] = 1 / running_sum[i];
        if (own_row + i < MIXED_ROWS && row < length)
            args.logsumexp[(int64_t)batch_head * length + row] = running_max[i] + log2f(running_sum[i]);
    }
    __syncthreads();
#pragma unroll
    for (int chunk = 0; chunk < CHUNKS; chunk++)
        store_rows(args.out + (int64_t)batch_head * length * HEAD_DIM, out[chunk], chunk, first_row,
                   min(first_row + MIXED_ROWS, length), [&](int row) { return row_factors[row]; });
}
