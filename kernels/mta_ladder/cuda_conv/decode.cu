// Conv attention of one new query against a KV cache, the keys shared among splits, and the kernel that combines them.
//
// A block of the first kernel has one query head and one split. It steps over the split's keys, STEP = 128 -
// (KEY_TAPS - 1) at a time, and at each step
//   scores of the last QUERY_TAPS queries, one of 128 keys a thread, from PAD keys before those it computes; zero where
//     a query does not see the key; all of them in shared memory
//   c = convolution, of the newest row alone, one key a thread; p = exp2(c - running maximum)
//   out = out * rescale + p v, v straight from memory, while the next keys arrive in shared memory
// It leaves out (not normalized), its maximum and its sum; `conv_attention_decode_combine` puts the splits together.
// Query heads of a group each read their keys and values.
//
// Cost a key and query head: QUERY_TAPS * HEAD_DIM * 128 / STEP FMAs for scores, QUERY_TAPS * KEY_TAPS for the
// convolution, HEAD_DIM for out, all float32 on CUDA cores; 2 * HEAD_DIM numbers read from memory. Shared memory, in
// bytes: twice the HEAD_DIM numbers of a key, QUERY_TAPS * HEAD_DIM / 8 of queries (each read serves 32 keys), and
// 4 * QUERY_TAPS * (KEY_TAPS + 1) of scores.
//
// Compile it alone, with the constants that tiles.cuh lists:
//   nvcc -cubin -arch=sm_80 -std=c++17 -Xptxas=-v -I. -I../../nvrtc -DELEMENT=Half -DTENSOR_CORES=1 -DHEAD_DIM=64
//     -DQUERY_TAPS=7 -DKEY_TAPS=7 decode.cu
#include <tiles.cuh>

struct Arguments {
    Rows q, k, v;          // q: [B, Hq, window, HEAD_DIM], the newest queries; caches: [B, Hkv, S, HEAD_DIM]
    const float* weight;   // [Hq, QUERY_TAPS, KEY_TAPS]
    const int* lengths;    // [B]: tokens of each sequence, the new one included
    float* partial;        // [B * Hq, splits, HEAD_DIM]
    float *maxima, *sums;  // [B * Hq, splits]
    Number* out;           // [B * Hq, HEAD_DIM]
    float scale_log2;      // scale * log2(e)
    int heads, group, window, splits, pad;
};

constexpr int KEYS = THREADS, STEP = KEYS - HALO_COLUMNS;
constexpr int KEY_PITCH = HEAD_DIM + PIECE, PIECES = HEAD_DIM / PIECE;
constexpr int SLICES = THREADS / PIECES;  // keys whose values are added side by side
static_assert(KEYS * KEY_PITCH * sizeof(Number) >= THREADS * PIECE * sizeof(float), "the last sums lie over the keys");

union Piece {
    uint4 bytes;
    Number numbers[PIECE];
};

DEVICE void load_keys(Number* keys, const Matrix& k, int first_key) {
#pragma unroll
    for (int i = 0; i < PIECES; i++) {
        const int at = threadIdx.x + i * THREADS, key = at / PIECES, dim = at % PIECES * PIECE;
        const int position = first_key + key;
        const bool inside = position >= 0 && position < k.rows;
        copy_16(keys + key * KEY_PITCH + dim, inside ? k.start + position * k.stride_row + dim : k.start, inside);
    }
}

// scores[a] = the dot product of a thread's key with query a.
DEVICE void score_key(float (&scores)[QUERY_TAPS], const Number* key, const float* queries) {
#pragma unroll 2
    for (int dim = 0; dim < HEAD_DIM; dim += PIECE) {
        Piece piece;
        piece.bytes = *(const uint4*)(key + dim);
#pragma unroll
        for (int a = 0; a < QUERY_TAPS; a++)
#pragma unroll
            for (int i = 0; i < PIECE; i += 4) {
                const float4 query = *(const float4*)(queries + a * HEAD_DIM + dim + i);
                scores[a] = fmaf(query.x, widen(piece.numbers[i]), scores[a]);
                scores[a] = fmaf(query.y, widen(piece.numbers[i + 1]), scores[a]);
                scores[a] = fmaf(query.z, widen(piece.numbers[i + 2]), scores[a]);
                scores[a] = fmaf(query.w, widen(piece.numbers[i + 3]), scores[a]);
            }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS) conv_attention_decode_split(const Arguments args) {
    Number* keys = (Number*)shared_bytes();
    float* queries = (float*)(keys + KEYS * KEY_PITCH);
    float* scores = queries + QUERY_TAPS * HEAD_DIM;
    float* probabilities = scores + QUERY_TAPS * KEYS;
    float* taps = probabilities + KEYS;
    float* warp_values = taps + TAP_NUMBERS;  // [4]

    const int split = blockIdx.x % args.splits, batch_head = blockIdx.x / args.splits;
    const int batch = batch_head / args.heads, head = batch_head % args.heads;
    const int thread = threadIdx.x, slice = thread / PIECES, dim = thread % PIECES * PIECE;
    const int length = args.lengths[batch], each = (length + args.splits - 1) / args.splits;
    const int first_key = split * each, end_key = min(first_key + each, length);
    const Matrix q = matrix_of(args.q, batch, head, args.window);
    const Matrix k = matrix_of(args.k, batch, head / args.group, length);
    const Matrix v = matrix_of(args.v, batch, head / args.group, length);

    if (first_key < end_key) load_keys(keys, k, first_key - args.pad);
    load_taps(taps, args.weight + head * QUERY_TAPS * KEY_TAPS, args.scale_log2, false);
    for (int at = thread; at < QUERY_TAPS * HEAD_DIM; at += THREADS) {
        const int row = args.window - QUERY_TAPS + at / HEAD_DIM;  // none before the first token, and none is needed
        queries[at] = row >= 0 ? widen(q.start[row * q.stride_row + at % HEAD_DIM]) : 0;
    }

    float running_max = MINUS_INFINITY, running_sum = 0;  // the maximum of the block, the sum of this thread
    float out[PIECE] = {};
    for (int key = first_key; key < end_key; key += STEP) {
        copies_wait();
        __syncthreads();
        float score[QUERY_TAPS] = {};
        score_key(score, keys + thread * KEY_PITCH, queries);
        const int position = key - args.pad + thread;
#pragma unroll
        for (int a = 0; a < QUERY_TAPS; a++) {
            const bool seen = position >= 0 && position <= length - QUERY_TAPS + a;  // step 2: not after the query
            scores[a * KEYS + thread] = seen ? score[a] : 0;
        }
        __syncthreads();
        if (key + STEP < end_key) load_keys(keys, k, key + STEP - args.pad);  // arrive during what follows

        const int count = min(STEP, end_key - key);
        float mixed = MINUS_INFINITY;
        if (thread < count) {
            mixed = 0;
#pragma unroll
            for (int a = 0; a < QUERY_TAPS; a++)
#pragma unroll
                for (int b = 0; b < KEY_TAPS; b++)
                    mixed = fmaf(taps[a * TAP_PITCH + b], scores[a * KEYS + thread + b], mixed);
        }
        float largest = mixed;
        for (int other = 1; other < 32; other *= 2) largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, other));
        if (thread % 32 == 0) warp_values[thread / 32] = largest;
        __syncthreads();
        largest = running_max;
        for (int warp = 0; warp < THREADS / 32; warp++) largest = fmaxf(largest, warp_values[warp]);
        const float reference = largest == MINUS_INFINITY ? 0 : largest;
        const float factor = exp2_fast(running_max - reference), probability = exp2_fast(mixed - reference);
        running_max = largest;
        running_sum = running_sum * factor + probability;
        probabilities[thread] = probability;
        __syncthreads();

#pragma unroll
        for (int i = 0; i < PIECE; i++) out[i] *= factor;
        if (slice < SLICES) {
#pragma unroll 4
            for (int j = slice; j < count; j += SLICES) {
                Piece piece;
                piece.bytes = *(const uint4*)(v.start + (key + j) * v.stride_row + dim);
#pragma unroll
                for (int i = 0; i < PIECE; i++) out[i] = fmaf(probabilities[j], widen(piece.numbers[i]), out[i]);
            }
        }
    }

    // Add up what the slices have, and the sums of the threads.
    float* sums = (float*)keys;  // [SLICES][HEAD_DIM]
    for (int other = 1; other < 32; other *= 2) running_sum += __shfl_xor_sync(~0u, running_sum, other);
    __syncthreads();
    if (thread % 32 == 0) warp_values[thread / 32] = running_sum;
#pragma unroll
    for (int i = 0; i < PIECE; i++)
        if (slice < SLICES) sums[slice * HEAD_DIM + dim + i] = out[i];
    __syncthreads();
    if (thread < HEAD_DIM) {
        float sum = 0;
        for (int other = 0; other < SLICES; other++) sum += sums[other * HEAD_DIM + thread];
        args.partial[(int64_t)blockIdx.x * HEAD_DIM + thread] = sum;
    }
    if (thread == 0) {
        args.maxima[blockIdx.x] = running_max;
        args.sums[blockIdx.x] = warp_values[0] + warp_values[1] + warp_values[2] + warp_values[3];
    }
}

// One block a query head; a thread has one number of out. Nothing but zeros where there are no keys.
extern "C" __global__ void __launch_bounds__(THREADS) conv_attention_decode_combine(const Arguments args) {
    const int64_t first = (int64_t)blockIdx.x * args.splits;
    if (threadIdx.x >= HEAD_DIM) return;
    float largest = MINUS_INFINITY;
    for (int split = 0; split < args.splits; split++) largest = fmaxf(largest, args.maxima[first + split]);
    const float reference = largest == MINUS_INFINITY ? 0 : largest;
    float total = 0, out = 0;
    for (int split = 0; split < args.splits; split++) {
        const float factor = exp2_fast(args.maxima[first + split] - reference);
        total = fmaf(factor, args.sums[first + split], total);
        out = fmaf(factor, args.partial[(first + split) * HEAD_DIM + threadIdx.x], out);
    }
    args.out[(int64_t)blockIdx.x * HEAD_DIM + threadIdx.x] = narrow(total > 0 ? out / total : 0);
}
