// Attention in three kernels, as cuda_naive.cu, with both products in tiles: numbers are read from memory once a tile,
// not once a product, and from shared memory once for every EACH of them.
//
//   scores        a block computes TILE x TILE scores, a thread EACH x EACH of them, from slabs of q and k, DEPTH deep
//   softmax_rows  a warp a row
//   weighted_sum  a block computes TILE rows x TILE columns of out, from slabs of scores and v, DEPTH deep
//
// Causal: tiles of scores that no query sees are neither computed nor read.
//
// FLOP: 2 (D + Dv) a score of a tile that any query sees. Bytes: a product reads each number of one operand once for
// every TILE numbers of the other: TILE / 4 FLOP a byte of float32, instead of a quarter. The matrix of scores still
// goes to memory and back: 4 bytes a score written, 12 read and 8 written by the softmax, and 4 read for every TILE
// columns of out.
//
// ELEMENT, float, Half or Bfloat16, comes from the compiler's command line; products are of float32 on the CUDA
// cores. Alone:
//   nvcc -arch=sm_80 -cubin -I. -I../nvrtc -DELEMENT=Bfloat16 cuda_tiled.cu
#include <elements.cuh>

constexpr int TILE = 64, DEPTH = 16, EACH = 4, ACROSS = TILE / EACH, THREADS = ACROSS * ACROSS;
constexpr int PITCH = TILE + 4;  // of a slab: EACH numbers of a row begin at a multiple of 16 bytes

struct Arguments {  // contiguous
    const ELEMENT* q;  // [batch * heads, queries, head_dim]
    const ELEMENT* k;  // [batch * heads / group, keys, head_dim]
    const ELEMENT* v;  // [batch * heads / group, keys, value_dim]
    ELEMENT* out;      // [batch * heads, queries, value_dim]
    float* scores;     // [batch * heads, queries, keys]; what a query does not see is not written
    float scale;
    int batch_heads, group, queries, keys, head_dim, value_dim;
    int diagonal;  // query i sees the keys up to i + diagonal
};

// One past the last key that a query sees.
DEVICE int end_key(const Arguments& args, int query) { return min(query + args.diagonal + 1, args.keys); }

// One past the last key that any query in the tile of rows from `first` on sees.
DEVICE int end_key_of_tile(const Arguments& args, int first) {
    return end_key(args, min(first + TILE, args.queries) - 1);
}

// A slab of a matrix [rows, columns]: slab[d][r] = matrix[first_row + r][first_column + d], zeros outside.
template <class Element>
DEVICE void load_transposed(float (&slab)[DEPTH][PITCH], const Element* matrix, int64_t stride, int rows, int columns,
                            int first_row, int first_column) {
#pragma unroll
    for (int from = 0; from < TILE * DEPTH; from += THREADS) {
        const int i = from + threadIdx.x;
        const int row = first_row + i / DEPTH, column = first_column + i % DEPTH;
        slab[i % DEPTH][i / DEPTH] = row < rows && column < columns ? to_float(matrix[row * stride + column]) : 0;
    }
}

// The same as it lies: slab[d][c] = matrix[first_row + d][first_column + c].
template <class Element>
DEVICE void load(float (&slab)[DEPTH][PITCH], const Element* matrix, int64_t stride, int rows, int columns,
                 int first_row, int first_column) {
#pragma unroll
    for (int from = 0; from < DEPTH * TILE; from += THREADS) {
        const int i = from + threadIdx.x;
        const int row = first_row + i / TILE, column = first_column + i % TILE;
        slab[i / TILE][i % TILE] = row < rows && column < columns ? to_float(matrix[row * stride + column]) : 0;
    }
}

// sums[i][j] += sum over d of left[d][row + i] * right[d][column + j]
DEVICE void multiply(float (&sums)[EACH][EACH], const float (&left)[DEPTH][PITCH], const float (&right)[DEPTH][PITCH],
                     int row, int column) {
#pragma unroll
    for (int d = 0; d < DEPTH; d++)
#pragma unroll
        for (int i = 0; i < EACH; i++)
#pragma unroll
            for (int j = 0; j < EACH; j++) sums[i][j] += left[d][row + i] * right[d][column + j];
}

extern "C" __global__ void __launch_bounds__(THREADS, 3) scores(const __grid_constant__ Arguments args) {
    __shared__ __align__(16) float queries[DEPTH][PITCH], keys[DEPTH][PITCH];
    const int tiles = (args.keys + TILE - 1) / TILE, row_tiles = (args.queries + TILE - 1) / TILE;
    const int first_key = blockIdx.x % tiles * TILE, first_row = blockIdx.x / tiles % row_tiles * TILE;
    const int64_t head = blockIdx.x / tiles / row_tiles;
    if (first_key >= end_key_of_tile(args, first_row)) return;

    const ELEMENT* q = args.q + head * args.queries * args.head_dim;
    const ELEMENT* k = args.k + head / args.group * args.keys * args.head_dim;
    const int row = threadIdx.x / ACROSS * EACH, column = threadIdx.x % ACROSS * EACH;  // of the tile
    float sums[EACH][EACH] = {};
    for (int d = 0; d < args.head_dim; d += DEPTH) {
        load_transposed(queries, q, args.head_dim, args.queries, args.head_dim, first_row, d);
        load_transposed(keys, k, args.head_dim, args.keys, args.head_dim, first_key, d);
        __syncthreads();
        multiply(sums, queries, keys, row, column);
        __syncthreads();
    }
    float* scores = args.scores + head * args.queries * args.keys;
    for (int i = 0; i < EACH; i++)
        for (int j = 0; j < EACH; j++) {
            const int query = first_row + row + i, key = first_key + column + j;
            if (query < args.queries && key < end_key(args, query))
                scores[(int64_t)query * args.keys + key] = sums[i][j] * args.scale;
        }
}

extern "C" __global__ void __launch_bounds__(THREADS) softmax_rows(const __grid_constant__ Arguments args) {
    const int64_t row = (int64_t)blockIdx.x * (THREADS / 32) + threadIdx.x / 32;
    const int lane = threadIdx.x % 32;
    if (row >= (int64_t)args.batch_heads * args.queries) return;

    float* scores = args.scores + row * args.keys;
    const int query = row % args.queries, end = end_key(args, query);
    float largest = MINUS_INFINITY, sum = 0;
    for (int key = lane; key < end; key += 32) largest = fmaxf(largest, scores[key]);
    for (int other = 1; other < 32; other *= 2) largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, other));
    for (int key = lane; key < end; key += 32) {
        scores[key] = expf(scores[key] - largest);
        sum += scores[key];
    }
    for (int other = 1; other < 32; other *= 2) sum += __shfl_xor_sync(~0u, sum, other);
    const float inverse = 1 / sum;
    for (int key = lane; key < end; key += 32) scores[key] *= inverse;
    // Other queries of the tile see more keys; their weighted sum is computed with this one.
    for (int key = end + lane; key < end_key_of_tile(args, query / TILE * TILE); key += 32) scores[key] = 0;
}

extern "C" __global__ void __launch_bounds__(THREADS, 3) weighted_sum(const __grid_constant__ Arguments args) {
    __shared__ __align__(16) float weights[DEPTH][PITCH], values[DEPTH][PITCH];
    const int tiles = (args.value_dim + TILE - 1) / TILE, row_tiles = (args.queries + TILE - 1) / TILE;
    const int first_column = blockIdx.x % tiles * TILE, first_row = blockIdx.x / tiles % row_tiles * TILE;
    const int64_t head = blockIdx.x / tiles / row_tiles;

    const float* scores = args.scores + head * args.queries * args.keys;
    const ELEMENT* v = args.v + head / args.group * args.keys * args.value_dim;
    const int row = threadIdx.x / ACROSS * EACH, column = threadIdx.x % ACROSS * EACH;
    const int end = end_key_of_tile(args, first_row);
    float sums[EACH][EACH] = {};
    for (int key = 0; key < end; key += DEPTH) {
        load_transposed(weights, scores, args.keys, args.queries, end, first_row, key);
        load(values, v, args.value_dim, end, args.value_dim, key, first_column);
        __syncthreads();
        multiply(sums, weights, values, row, column);
        __syncthreads();
    }
    ELEMENT* out = args.out + head * args.queries * args.value_dim;
    for (int i = 0; i < EACH; i++)
        for (int j = 0; j < EACH; j++) {
            const int query = first_row + row + i, at = first_column + column + j;
            if (query < args.queries && at < args.value_dim)
                out[(int64_t)query * args.value_dim + at] = from_float<ELEMENT>(sums[i][j]);
        }
}
