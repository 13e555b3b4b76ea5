// Conv attention backward by overlapping tiles: the gradients of k and v.
//
// A block computes OWN_COLUMNS = 64 - 2 (KEY_TAPS - 1) rows of dk and dv of a KV head. For each query head of its group it
// steps over the queries, OWN_ROWS = 64 - 2 (QUERY_TAPS - 1) at a time, and at each step
//   scores, dP, c, P and dC as in backward_q.cu
//   dv += P^T dO, with P in place of the scores
//   dS = transposed convolution of dC, zero where masked, in place of P; dk += dS^T q
//
// Cost a score that counts, with W as in backward_q.cu:
//   FMAs: W * 2 * QUERY_TAPS * KEY_TAPS of convolutions, float32; W * 4 * HEAD_DIM of products, as in forward.cu
//   bytes of shared memory: twice what the convolution of forward.cu reads; W * 32 for scores, dP, dC, P and dS;
//     W * HEAD_DIM * 18 / 32 read by the products of 16 bits
//
// Compile it alone, with the constants that tiles.cuh lists:
//   nvcc -cubin -arch=sm_80 -std=c++17 -Xptxas=-v -I. -I../../nvrtc -DELEMENT=Half -DTENSOR_CORES=1 -DHEAD_DIM=64
//     -DQUERY_TAPS=7 -DKEY_TAPS=7 backward_kv.cu
#include <tiles.cuh>

struct Arguments {
    Rows q, k, v, grad_out;
    const float* weight;             // [Hq, QUERY_TAPS, KEY_TAPS]
    const float *logsumexp, *delta;  // [B, Hq, N]: of log2; sums of out * grad_out
    Number *dk, *dv;                 // [B, Hkv, N, HEAD_DIM]
    float scale, scale_log2;         // scale * log2(e)
    int kv_heads, group, length, column_blocks, pad, causal;
};

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) conv_attention_backward_kv(const Arguments args) {
    Number* keys = (Number*)shared_bytes();
    Number* values = keys + TILE_NUMBERS;
    Number* tile = values + TILE_NUMBERS;  // of q, of dO, and of q again
    float* scores = (float*)(tile + TILE_NUMBERS);
    float* gradients = scores + SCORE_NUMBERS;
    float* taps = gradients + SCORE_NUMBERS;
    float* taps_back = taps + TAP_NUMBERS;
    float* row_logsumexp = taps_back + TAP_NUMBERS;  // [64]
    float* row_delta = row_logsumexp + TILE;

    const int batch_head = blockIdx.x / args.column_blocks, length = args.length;
    const int batch = batch_head / args.kv_heads, kv_head = batch_head % args.kv_heads;
    const int first_key = blockIdx.x % args.column_blocks * OWN_COLUMNS;  // if causal, the first have the most queries
    const int left = HALO_COLUMNS - args.pad;                             // columns of dC before the first of dS
    const Matrix k = matrix_of(args.k, batch, kv_head, length), v = matrix_of(args.v, batch, kv_head, length);
    float dk[CHUNKS][CHUNK / 2] = {}, dv[CHUNKS][CHUNK / 2] = {};
    bool there = false;

    for (int head = kv_head * args.group; head < (kv_head + 1) * args.group; head++) {
        const int64_t first_of_head = ((int64_t)batch * args.kv_heads * args.group + head) * length;
        const Matrix q = matrix_of(args.q, batch, head, length);
        const Matrix grad_out = matrix_of(args.grad_out, batch, head, length);
        const float* weight = args.weight + head * QUERY_TAPS * KEY_TAPS;
        __syncthreads();  // the last head is finished
        load_taps(taps, weight, args.scale_log2, false);
        load_taps(taps_back, weight, 1, true);

        // If causal, no query before a key sees it, neither through dS, which is masked, nor through P.
        for (int first_row = args.causal ? first_key : 0; first_row < length; first_row += OWN_ROWS) {
            float sum[TILE / 2] = {};
            product_of_rows(sum, {tile, q, first_row - HALO_ROWS, false}, {keys, k, first_key - HALO_COLUMNS, there});
            store_scores(scores, sum, first_row - HALO_ROWS, first_key - HALO_COLUMNS, length, args.causal);
#pragma unroll
            for (int i = 0; i < TILE / 2; i++) sum[i] = 0;
            product_of_rows(sum, {tile, grad_out, first_row, false}, {values, v, first_key - left, there});
            store_tile(gradients, sum);
            for (int i = threadIdx.x; i < TILE; i += THREADS) {
                const int64_t at = first_of_head + min(first_row + i, length - 1);
                row_logsumexp[i] = args.logsumexp[at], row_delta[i] = args.delta[at];
            }
            __syncthreads();

            constexpr int MIXED_EACH = rows_each(MIXED_ROWS), EACH = rows_each(OWN_ROWS);
            const int column = patch_column(), mixed_row = patch_row<MIXED_EACH>(), own_row = patch_row<EACH>();
            float p[MIXED_EACH][4];
            mixed_gradients(p, gradients, scores, taps, row_logsumexp, row_delta, first_row, first_key - left, length,
                            args.causal);
            __syncthreads();  // all have read their scores
#pragma unroll
            for (int i = 0; i < MIXED_EACH; i++)
#pragma unroll
                for (int j = 0; j < 4; j++) {
                    const int own_column = column + j - left;
                    if (own_column >= 0 && own_column < OWN_COLUMNS)
                        scores[(mixed_row + i) * PITCH + own_column] = p[i][j];
                }
#pragma unroll
            for (int chunk = 0; chunk < CHUNKS; chunk++) {
                if (CHUNKS > 1) __syncthreads(), load_tile(tile, grad_out, first_row, chunk), copies_wait();
                __syncthreads();
                multiply_transposed<OWN_ROWS>(dv[chunk], scores, tile);
            }
            __syncthreads();
            load_tile(tile, q, first_row, 0);  // arrives during the convolution

            float ds[EACH][4];
            convolve(ds, gradients, taps_back);
#pragma unroll
            for (int i = 0; i < EACH; i++) {
#pragma unroll
                for (int j = 0; j < 4; j++) {
                    const bool seen = counts(first_row + own_row + i, first_key, column + j, length, args.causal);
                    if (!seen) ds[i][j] = 0;
                }
                *(float4*)(scores + (own_row + i) * PITCH + column) = {ds[i][0], ds[i][1], ds[i][2], ds[i][3]};
            }
#pragma unroll
            for (int chunk = 0; chunk < CHUNKS; chunk++) {
                if (chunk > 0) __syncthreads(), load_tile(tile, q, first_row, chunk);
                copies_wait();
                __syncthreads();
                multiply_transposed<OWN_ROWS>(dk[chunk], scores, tile);
            }
            there = true;
        }
    }

    const int64_t first_of_head = (int64_t)batch_head * length * HEAD_DIM;
    const int end_key = min(first_key + OWN_COLUMNS, length);
#pragma unroll
    for (int chunk = 0; chunk < CHUNKS; chunk++) {
        store_rows(args.dk + first_of_head, dk[chunk], chunk, first_key, end_key, [&](int) { return args.scale; });
        store_rows(args.dv + first_of_head, dv[chunk], chunk, first_key, end_key, [&](int) { return 1.0f; });
    }
}
