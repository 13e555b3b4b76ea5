// Attention as it is defined, in three kernels, with the matrix of scores in memory. One thread computes one number.
//
//   scores        scores[i, j] = scale q[i] . k[j], minus infinity if j is after i and causal
//   softmax_rows  scores[i] = exp(scores[i] - max) / sum, in place; one thread a row
//   weighted_sum  out[i] = sum over j of scores[i, j] v[j]
//
// FLOP: 2 (D + Dv) M N a head. Bytes: the matrix of 4 M N bytes is written once, read three times and written twice by
// the softmax, and read by the weighted sum. Nothing is reused on the chip by design: a thread of the products reads
// two numbers for each two FLOP, so the caches bound its speed. cuda_tiled.cu reads less often, and cuda_flash.cu
// stores no scores.
//
// ELEMENT, float, Half or Bfloat16, comes from the compiler's command line. Alone:
//   nvcc -arch=sm_80 -cubin -I. -I../nvrtc -DELEMENT=Bfloat16 cuda_naive.cu
#include <elements.cuh>

struct Arguments {  // contiguous
    const ELEMENT* q;  // [batch * heads, queries, head_dim]
    const ELEMENT* k;  // [batch * heads / group, keys, head_dim]
    const ELEMENT* v;  // [batch * heads / group, keys, value_dim]
    ELEMENT* out;      // [batch * heads, queries, value_dim]
    float* scores;     // [batch * heads, queries, keys]
    float scale;
    int batch_heads, group, queries, keys, head_dim, value_dim;
    int diagonal;  // query i sees the keys up to i + diagonal
};

extern "C" __global__ void scores(const __grid_constant__ Arguments args) {
    const int64_t at = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
    const int key = at % args.keys;
    const int64_t row = at / args.keys, head = row / args.queries;
    if (head >= args.batch_heads) return;

    const ELEMENT* q = args.q + row * args.head_dim;
    const ELEMENT* k = args.k + (head / args.group * args.keys + key) * args.head_dim;
    float sum = 0;
    for (int d = 0; d < args.head_dim; d++) sum += to_float(q[d]) * to_float(k[d]);
    args.scores[at] = key <= row % args.queries + args.diagonal ? sum * args.scale : MINUS_INFINITY;
}

extern "C" __global__ void softmax_rows(const __grid_constant__ Arguments args) {
    const int64_t row = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (row >= (int64_t)args.batch_heads * args.queries) return;

    float* scores = args.scores + row * args.keys;
    float largest = MINUS_INFINITY, sum = 0;
    for (int key = 0; key < args.keys; key++) largest = fmaxf(largest, scores[key]);
    for (int key = 0; key < args.keys; key++) {
        scores[key] = expf(scores[key] - largest);
        sum += scores[key];
    }
    for (int key = 0; key < args.keys; key++) scores[key] /= sum;
}

extern "C" __global__ void weighted_sum(const __grid_constant__ Arguments args) {
    const int64_t at = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
    const int d = at % args.value_dim;
    const int64_t row = at / args.value_dim, head = row / args.queries;
    if (head >= args.batch_heads) return;

    const float* scores = args.scores + row * args.keys;
    const ELEMENT* v = args.v + head / args.group * args.keys * args.value_dim + d;
    float sum = 0;
    for (int key = 0; key < args.keys; key++) sum += scores[key] * to_float(v[(int64_t)key * args.value_dim]);
    args.out[at] = from_float<ELEMENT>(sum);
}
