// What the kernels of overlapping tiles share: tiles in shared memory, and the convolution.
//
// A block has 128 threads and works on tiles of 64 x 64 scores. The convolution of a tile is known where all of its taps
// lie inside, which leaves 64 - HALO_ROWS by 64 - HALO_COLUMNS numbers; so tiles overlap by the halos, and what they
// share is computed twice. Constants come from the compiler's command line:
//   ELEMENT      Half, Bfloat16 or float: the numbers in memory
//   TENSOR_CORES 1 for the first two: products by mma.sync with float32 sums; 0 for float: products by FMAs
//   HEAD_DIM     a multiple of 8 up to 128          QUERY_TAPS, KEY_TAPS  1 to 11
#pragma once
#include <instructions.cuh>

template <class Element> struct Stored { using Number = uint16_t; };
template <> struct Stored<float> { using Number = float; };
using Number = Stored<ELEMENT>::Number;

constexpr int THREADS = 128, TILE = 64;
constexpr int HALO_ROWS = QUERY_TAPS - 1, HALO_COLUMNS = KEY_TAPS - 1;
constexpr int MIXED_ROWS = TILE - HALO_ROWS, MIXED_COLUMNS = TILE - HALO_COLUMNS;  // "mixed": convolved scores
constexpr int OWN_ROWS = MIXED_ROWS - HALO_ROWS, OWN_COLUMNS = MIXED_COLUMNS - HALO_COLUMNS;  // convolved twice

// Tiles of q, k, v and dO: 64 rows of CHUNK numbers, all of the head dim or (float32) a part of it. Rows are 16 bytes
// longer than that, so that eight of them lie in different banks.
constexpr int PIECE = 16 / (int)sizeof(Number);
constexpr int WIDEST = TENSOR_CORES ? 128 : 64;
constexpr int CHUNKS = (HEAD_DIM + WIDEST - 1) / WIDEST;
constexpr int CHUNK = ((HEAD_DIM + CHUNKS - 1) / CHUNKS + 15) / 16 * 16;
constexpr int ROW_PITCH = CHUNK + PIECE, TILE_NUMBERS = TILE * ROW_PITCH;

constexpr int BLOCKS = TENSOR_CORES && CHUNK <= 64 ? 3 : 2;  // on a multiprocessor, as far as registers decide

// Tiles of scores, float32. Patches of the last threads reach over the end by up to eight rows; what is read there
// only goes into numbers that are not used.
constexpr int PITCH = 72, SCORE_NUMBERS = (TILE + 8) * PITCH;
constexpr int TAP_PITCH = (KEY_TAPS + 3) / 4 * 4, TAP_NUMBERS = QUERY_TAPS * TAP_PITCH;

struct Rows {  // [B, heads, N, HEAD_DIM]; strides in numbers, multiples of 16 bytes
    const Number* start;
    int64_t stride_batch, stride_head, stride_row;
};

struct Matrix {  // [N, HEAD_DIM], of one head
    const Number* start;
    int64_t stride_row;
    int rows;
};

DEVICE Matrix matrix_of(const Rows& x, int batch, int head, int rows) {
    return {x.start + batch * x.stride_batch + head * x.stride_head, x.stride_row, rows};
}

// Begin to copy 64 rows of a chunk of columns, with zeros outside the matrix; `copies_wait` ends it.
DEVICE void load_tile(Number* tile, const Matrix& x, int first_row, int chunk) {
    constexpr int PIECES = CHUNK / PIECE;
#pragma unroll
    for (int i = 0; i < TILE * PIECES / THREADS; i++) {
        const int at = threadIdx.x + i * THREADS;
        const int row = at / PIECES, column = at % PIECES * PIECE;
        const int position = first_row + row, dim = chunk * CHUNK + column;
        const bool inside = position >= 0 && position < x.rows && dim < HEAD_DIM;
        copy_16(tile + row * ROW_PITCH + column, inside ? x.start + position * x.stride_row + dim : x.start, inside);
    }
}

#if TENSOR_CORES
#include <products_mma.cuh>
#else
#include <products_fma.cuh>
#endif

// 64 rows of a matrix and where they lie in shared memory; `there`: they are loaded already, if one tile holds them.
struct Operand {
    Number* tile;
    const Matrix& x;
    int first_row;
    bool there;
};

// sum[r][c] += sum over d of a[r][d] * b[c][d].
DEVICE void product_of_rows(float (&sum)[TILE / 2], const Operand& a, const Operand& b) {
    for (int chunk = 0; chunk < CHUNKS; chunk++) {
        __syncthreads();  // the last use of the tiles is over
        if (CHUNKS > 1 || !a.there) load_tile(a.tile, a.x, a.first_row, chunk);
        if (CHUNKS > 1 || !b.there) load_tile(b.tile, b.x, b.first_row, chunk);
        copies_wait();
        __syncthreads();
        multiply_rows(sum, a.tile, b.tile);
    }
}

// A thread's patch of a convolved tile: ROWS rows by 4 columns from (patch_row<ROWS>(), patch_column()).
template <int ROWS> DEVICE int patch_row() { return threadIdx.x / 16 * ROWS; }
DEVICE int patch_column() { return threadIdx.x % 16 * 4; }
DEVICE constexpr int rows_each(int rows) { return (rows + 7) / 8; }

constexpr int WINDOW = (4 + HALO_COLUMNS + 3) / 4 * 4;
DEVICE void load_window(float (&window)[WINDOW], const float* from) {
#pragma unroll
    for (int i = 0; i < WINDOW; i += 4) {
        const float4 four = *(const float4*)(from + i);
        window[i] = four.x, window[i + 1] = four.y, window[i + 2] = four.z, window[i + 3] = four.w;
    }
}

// out[i][j] = sum over a, b of taps[a][b] * tile[patch_row + i + a][patch_column + j + b].
template <int ROWS> DEVICE void convolve(float (&out)[ROWS][4], const float* tile, const float* taps) {
    const float* patch = tile + patch_row<ROWS>() * PITCH + patch_column();
#pragma unroll
    for (int i = 0; i < ROWS; i++) out[i][0] = out[i][1] = out[i][2] = out[i][3] = 0;
#pragma unroll
    for (int row = 0; row < ROWS + HALO_ROWS; row++) {
        float window[WINDOW];
        load_window(window, patch + row * PITCH);
#pragma unroll
        for (int tap = 0; tap < QUERY_TAPS; tap++) {
            const int i = row - tap;
            if (i < 0 || i >= ROWS) continue;
#pragma unroll
            for (int b = 0; b < KEY_TAPS; b++) {
                const float weight = taps[tap * TAP_PITCH + b];
#pragma unroll
                for (int j = 0; j < 4; j++) out[i][j] = fmaf(weight, window[b + j], out[i][j]);
            }
        }
    }
}

// The weight of a head times `factor`; `back`: with both axes reversed, which makes `convolve` its own transpose.
DEVICE void load_taps(float* taps, const float* weight, float factor, bool back) {
    for (int at = threadIdx.x; at < QUERY_TAPS * KEY_TAPS; at += THREADS) {
        const int from = back ? QUERY_TAPS * KEY_TAPS - 1 - at : at;
        taps[at / KEY_TAPS * TAP_PITCH + at % KEY_TAPS] = weight[from] * factor;
    }
}

// Whether the score of a row and of column `first_column + column` counts: it lies inside the matrix and, if causal, its
// key is not after its query. Step 2 of the definition makes the others zero, step 4 minus infinity.
DEVICE bool counts(int row, int first_column, int column, int length, bool causal) {
    const int end = row >= 0 && row < length ? (causal ? row + 1 : length) - first_column : 0;
    return column >= -first_column && column < end;
}

// Write a product to a tile of scores, whose first row and column are given, with zeros where a score does not count.
DEVICE void store_scores(float* tile, float (&sum)[TILE / 2], int first_row, int first_column, int length, bool causal) {
#pragma unroll
    for (int i = 0; i < TILE / 2; i++)
        if (!counts(first_row + row_of<TILE>(i), first_column, column_of<TILE>(i), length, causal)) sum[i] = 0;
    store_tile(tile, sum);
}

// The gradients of the convolved scores: dC = P * (dP - delta), and P, for a thread's patch.
//
// dP lies in `gradients` and dC takes its place; row and column 0 of the patches' tile are `first_row`, `first_column`.
DEVICE void mixed_gradients(float (&p)[rows_each(MIXED_ROWS)][4], float* gradients, const float* scores,
                            const float* taps, const float* row_logsumexp, const float* row_delta, int first_row,
                            int first_column, int length, bool causal) {
    constexpr int EACH = rows_each(MIXED_ROWS);
    const int own_row = patch_row<EACH>(), own_column = patch_column();
    convolve(p, scores, taps);
#pragma unroll
    for (int i = 0; i < EACH; i++) {
        const float logsumexp = row_logsumexp[own_row + i], delta = row_delta[own_row + i];
        float4* at = (float4*)(gradients + (own_row + i) * PITCH + own_column);
        const float4 four = *at;
        float gradient[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
        for (int j = 0; j < 4; j++) {
            const bool seen = counts(first_row + own_row + i, first_column, own_column + j, length, causal) &&
                              own_row + i < MIXED_ROWS && own_column + j < MIXED_COLUMNS;
            const float probability = exp2_fast(p[i][j] - logsumexp);
            p[i][j] = seen ? probability : 0;
            gradient[j] = seen ? probability * (gradient[j] - delta) : 0;
        }
        *at = {gradient[0], gradient[1], gradient[2], gradient[3]};
    }
}

#if TENSOR_CORES
DEVICE float widen(Number x) { return unpack<ELEMENT>(x); }
DEVICE Number narrow(float x) { return (Number)pack<ELEMENT>(x, 0); }
#else
DEVICE float widen(Number x) { return x; }
DEVICE Number narrow(float x) { return x; }
#endif

// Columns of a chunk of out[row] = factor * sum, for the rows of the tile from `first_row` that are below `end_row`.
template <class Factor>
DEVICE void store_rows(Number* out, const float (&sum)[CHUNK / 2], int chunk, int first_row, int end_row, Factor factor) {
#pragma unroll
    for (int i = 0; i < CHUNK / 2; i++) {
        const int row = row_of<CHUNK>(i), dim = chunk * CHUNK + column_of<CHUNK>(i);
        if (first_row + row < end_row && dim < HEAD_DIM)
            out[(int64_t)(first_row + row) * HEAD_DIM + dim] = narrow(factor(row) * sum[i]);
    }
}
