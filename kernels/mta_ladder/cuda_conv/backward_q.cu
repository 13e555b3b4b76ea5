// Conv attention backward by overlapping tiles: the gradients of q and of the weight.
//
// A block computes OWN_ROWS = 64 - 2 (QUERY_TAPS - 1) rows of dq. It steps over the keys, OWN_COLUMNS = 64 -
// 2 (KEY_TAPS - 1) at a time, and at each step, with a margin for two convolutions,
//   scores = q k^T and dP = dO v^T, 64 x 64; c = convolution of the scores; P = exp2(c - logsumexp)
//   dC = P * (dP - delta), in place of dP
//   dweight += dC against the scores, one sum a tap, over the OWN_ROWS x OWN_COLUMNS of dC that no other step has
//   dS = transposed convolution of dC, zero where masked, in place of the scores; dq += dS k
// All sums stay in registers. Atomics add the sums of dweight to memory, so their last bits vary from run to run.
//
// Cost a score that counts, where W = 64 * 64 / (OWN_ROWS * OWN_COLUMNS) is what the overlap costs (1.51 at 7 x 7, 2.12
// at 11 x 11):
//   FMAs: W * 3 * QUERY_TAPS * KEY_TAPS of convolutions, float32; W * 3 * HEAD_DIM of products, as in forward.cu
//   bytes of shared memory: three times what the convolution of forward.cu reads; W * 28 for scores, dP, dC and dS;
//     W * HEAD_DIM * 14 / 32 read by the products of 16 bits
//
// Compile it alone, with the constants that tiles.cuh lists:
//   nvcc -cubin -arch=sm_80 -std=c++17 -Xptxas=-v -I. -I../../nvrtc -DELEMENT=Half -DTENSOR_CORES=1 -DHEAD_DIM=64
//     -DQUERY_TAPS=7 -DKEY_TAPS=7 backward_q.cu
#include <tiles.cuh>

struct Arguments {
    Rows q, k, v, grad_out;
    const float* weight;              // [Hq, QUERY_TAPS, KEY_TAPS]
    const float *logsumexp, *delta;   // [B, Hq, N]: of log2; sums of out * grad_out
    Number* dq;                       // [B, Hq, N, HEAD_DIM]
    float* dweight;                   // [Hq, QUERY_TAPS, KEY_TAPS], zero before
    float scale, scale_log2;          // scale * log2(e)
    int heads, group, length, row_blocks, pad, causal;
};

// The weight's gradients that a thread sums: GROUP_TAPS rows of taps, so that they fit in its registers. With two
// groups, half of the warps work on each, and a thread on two patches.
constexpr int GROUPS = QUERY_TAPS * KEY_TAPS > 56 ? 2 : 1;
constexpr int GROUP_TAPS = (QUERY_TAPS + GROUPS - 1) / GROUPS;

// dweight[a][b] += sum over the patch of dC[row][column] * scores[row + a][column + b], where a counts from `first_tap`.
DEVICE void weight_gradient(float (&dweight)[GROUP_TAPS][KEY_TAPS], const float* gradients, const float* scores,
                            int first_row, int first_tap, int left) {
    constexpr int EACH = rows_each(OWN_ROWS);
    const int column = patch_column();
    float gradient[EACH][4];
#pragma unroll
    for (int i = 0; i < EACH; i++) {
        const float4 four = *(const float4*)(gradients + (first_row + i) * PITCH + column);
        gradient[i][0] = four.x, gradient[i][1] = four.y, gradient[i][2] = four.z, gradient[i][3] = four.w;
#pragma unroll
        for (int j = 0; j < 4; j++)
            if (first_row + i >= OWN_ROWS || column + j < left || column + j >= left + OWN_COLUMNS) gradient[i][j] = 0;
    }
#pragma unroll
    for (int row = 0; row < EACH + GROUP_TAPS - 1; row++) {
        float window[WINDOW];
        load_window(window, scores + (first_row + first_tap + row) * PITCH + column);
#pragma unroll
        for (int tap = 0; tap < GROUP_TAPS; tap++) {
            const int i = row - tap;
            if (i < 0 || i >= EACH) continue;
#pragma unroll
            for (int b = 0; b < KEY_TAPS; b++)
#pragma unroll
                for (int j = 0; j < 4; j++) dweight[tap][b] = fmaf(gradient[i][j], window[b + j], dweight[tap][b]);
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) conv_attention_backward_q(const Arguments args) {
    Number* queries = (Number*)shared_bytes();
    Number* grads = queries + TILE_NUMBERS;  // of dO
    Number* tile = grads + TILE_NUMBERS;     // of k, of v, and of k again
    float* scores = (float*)(tile + TILE_NUMBERS);
    float* gradients = scores + SCORE_NUMBERS;
    float* taps = gradients + SCORE_NUMBERS;
    float* taps_back = taps + TAP_NUMBERS;
    float* row_logsumexp = taps_back + TAP_NUMBERS;  // [64]
    float* row_delta = row_logsumexp + TILE;

    const int batch_head = blockIdx.x / args.row_blocks, length = args.length;
    const int batch = batch_head / args.heads, head = batch_head % args.heads;
    const int row_block = args.row_blocks - 1 - blockIdx.x % args.row_blocks;  // if causal, the last have the most keys
    const int first_row = row_block * OWN_ROWS;
    const int end_key = args.causal ? min(first_row + OWN_ROWS, length) : length;
    const int left = HALO_COLUMNS - args.pad;  // columns of dC before the first of dS
    const Matrix q = matrix_of(args.q, batch, head, length), grad_out = matrix_of(args.grad_out, batch, head, length);
    const Matrix k = matrix_of(args.k, batch, head / args.group, length);
    const Matrix v = matrix_of(args.v, batch, head / args.group, length);
    const float* weight = args.weight + head * QUERY_TAPS * KEY_TAPS;
    load_taps(taps, weight, args.scale_log2, false);
    load_taps(taps_back, weight, 1, true);
    // The products multiply zero gradients by what surrounds the scores, which must be finite.
    for (int i = threadIdx.x; i < SCORE_NUMBERS; i += THREADS) scores[i] = 0;
    for (int i = threadIdx.x; i < TILE; i += THREADS) {
        const int64_t at = (int64_t)batch_head * length + min(first_row + i, length - 1);
        row_logsumexp[i] = args.logsumexp[at], row_delta[i] = args.delta[at];
    }

    const int warps_each = THREADS / 32 / GROUPS, group_warp = threadIdx.x / 32 % warps_each;
    const int first_tap = threadIdx.x / 32 / warps_each * GROUP_TAPS;
    float dweight[GROUP_TAPS][KEY_TAPS] = {};
    float dq[CHUNKS][CHUNK / 2] = {};

    for (int key = 0; key < end_key; key += OWN_COLUMNS) {
        float sum[TILE / 2] = {};
        product_of_rows(sum, {queries, q, first_row - HALO_ROWS, key > 0}, {tile, k, key - HALO_COLUMNS, false});
        store_scores(scores, sum, first_row - HALO_ROWS, key - HALO_COLUMNS, length, args.causal);
#pragma unroll
        for (int i = 0; i < TILE / 2; i++) sum[i] = 0;
        product_of_rows(sum, {grads, grad_out, first_row, key > 0}, {tile, v, key - left, false});
        store_tile(gradients, sum);
        __syncthreads();
        load_tile(tile, k, key, 0);  // arrives during the convolutions

        float p[rows_each(MIXED_ROWS)][4];
        mixed_gradients(p, gradients, scores, taps, row_logsumexp, row_delta, first_row, key - left, length, args.causal);
        __syncthreads();
        for (int part = 0; part < GROUPS; part++) {
            const int row = (part * 8 / GROUPS + group_warp * 2 + threadIdx.x / 16 % 2) * rows_each(OWN_ROWS);
            weight_gradient(dweight, gradients, scores, row, first_tap, left);
        }
        constexpr int EACH = rows_each(OWN_ROWS);
        const int own_row = patch_row<EACH>(), own_column = patch_column();
        float ds[EACH][4];
        convolve(ds, gradients, taps_back);
        __syncthreads();  // all have read their scores
#pragma unroll
        for (int i = 0; i < EACH; i++) {
#pragma unroll
            for (int j = 0; j < 4; j++) {
                const bool seen = counts(first_row + own_row + i, key, own_column + j, length, args.causal) &&
                                  own_column + j < OWN_COLUMNS;
                if (!seen) ds[i][j] = 0;
            }
            *(float4*)(scores + (own_row + i) * PITCH + own_column) = {ds[i][0], ds[i][1], ds[i][2], ds[i][3]};
        }
#pragma unroll
        for (int chunk = 0; chunk < CHUNKS; chunk++) {
            if (chunk > 0) __syncthreads(), load_tile(tile, k, key, chunk);
            copies_wait();
            __syncthreads();
            multiply<OWN_COLUMNS>(dq[chunk], scores, tile);
        }
    }

#pragma unroll
    for (int chunk = 0; chunk < CHUNKS; chunk++)
        store_rows(args.dq + (int64_t)batch_head * length * HEAD_DIM, dq[chunk], chunk, first_row,
                   min(first_row + OWN_ROWS, length), [&](int) { return args.scale; });
#pragma unroll
    for (int tap = 0; tap < GROUP_TAPS; tap++)
#pragma unroll
        for (int b = 0; b < KEY_TAPS; b++) {
            float sum = dweight[tap][b];
            for (int other = 1; other < 32; other *= 2) sum += __shfl_xor_sync(~0u, sum, other);
            if (threadIdx.x % 32 == 0 && first_tap + tap < QUERY_TAPS)
                atomicAdd(args.dweight + (head * QUERY_TAPS + first_tap + tap) * KEY_TAPS + b, args.scale * sum);
        }
}
