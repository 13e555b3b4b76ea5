/* The same attention in tiles that fit the caches, for all cores and their vector units; the scores are never stored.

   A thread takes a block of queries of one head and walks along the keys, a block at a time: the scores of the two
   blocks, their exponentials, the products with the values. The softmax is an online one: a row's running maximum and
   sum are kept, and what was summed up so far is scaled down when the maximum grows. Both products run in one small
   kernel, whose sums stay in registers. Blocks of keys that no query of the block sees are skipped.

   Alone: cc -O3 -march=native -fopenmp -shared -fPIC -o c_tiled.so c_tiled.c
*/
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

enum {
    ROWS = 6, STRIP = 16,     /* sums that `multiply` holds: 12 registers of 8 floats, of the 16 that AVX2 has */
    QUERIES = 96, KEYS = 128, /* of a block: its scores take 54 KiB */
    SPREAD = STRIP,           /* floats between the rows of a tile, lest they compete for the same cache lines */
    STRIDE = KEYS + SPREAD,   /* of rows of KEYS numbers */
};

/* 2^x for x <= 0: relative error below 1.2e-7, and 0 below 2^-126. x = n + f with |f| <= 1/2 is exact here, where e^x
   would need its constant in two parts (Cody and Waite, Software Manual for the Elementary Functions, 1980, ch. 6).
   n goes into the exponent's bits; 2^f = 1 + f P(f), where P of degree 5 has the least largest relative error (Remez's
   algorithm). No branch, no call: a compiler makes each line one instruction on a whole vector. NaN stays NaN. */
static inline float exp2_of_negative(float x)
{
    const float to_integer = 12582912.0f; /* 1.5 * 2^23: floats of that size have no fraction */
    union {
        float number;
        uint32_t bits;
    } power;
    x = x < -127.0f ? -127.0f : x;
    power.number = x + to_integer;
    const float f = x - (power.number - to_integer);
    float p = 1.53533620e-4f;
    p = p * f + 1.33988744e-3f;
    p = p * f + 9.61843736e-3f;
    p = p * f + 5.55033247e-2f;
    p = p * f + 2.40226479e-1f;
    p = p * f + 6.93147203e-1f;
    p = p * f + 1.0f;
    power.bits = (power.bits + 127) << 23; /* its low bits are n, and -127 becomes the number 0 */
    return p * power.number;
}

/* c += a b for a [rows, depth], b [depth, columns], c [rows, columns]; rows and columns multiples of ROWS and STRIP. */
static void multiply(int64_t rows, int64_t columns, int64_t depth, const float *restrict a, int64_t a_stride,
                     const float *restrict b, int64_t b_stride, float *restrict c, int64_t c_stride)
{
    for (int64_t j = 0; j < columns; j += STRIP)
        for (int64_t i = 0; i < rows; i += ROWS) {
            float sums[ROWS][STRIP] = {0}; /* not c: short sums added up lose less than one long sum */
            for (int64_t x = 0; x < depth; x++)
                for (int r = 0; r < ROWS; r++) {
                    const float factor = a[(i + r) * a_stride + x];
#pragma omp simd
                    for (int s = 0; s < STRIP; s++)
                        sums[r][s] += factor * b[x * b_stride + j + s];
                }
            for (int r = 0; r < ROWS; r++)
#pragma omp simd
                for (int s = 0; s < STRIP; s++)
                    c[(i + r) * c_stride + j + s] += sums[r][s];
        }
}

/* Makes weights of a row's scores: 2^(score - maximum), and 0 for keys that the row does not see. Returns the factor
   for what was summed up below the old maximum. */
static inline float online_softmax(float *scores, int64_t seen, float *running_max, float *running_sum)
{
    float max = *running_max, sum = 0;
#pragma omp simd reduction(max : max)
    for (int64_t j = 0; j < seen; j++)
        max = scores[j] > max ? scores[j] : max;
#pragma omp simd reduction(+ : sum)
    for (int64_t j = 0; j < seen; j++) {
        scores[j] = exp2_of_negative(scores[j] - max);
        sum += scores[j];
    }
    memset(scores + seen, 0, (KEYS - seen) * sizeof(float));
    const float correction = exp2_of_negative(*running_max - max);
    *running_max = max;
    *running_sum = *running_sum * correction + sum;
    return correction;
}

static int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

/* What all blocks of a call share, and the tiles of a thread. */
typedef struct {
    int64_t M, N, head_dim, value_dim, value_stride;
    int causal;
    float scale; /* in units of log 2 */
    float *queries, *keys, *values, *scores, *sums; /* [QUERIES, D] [D, KEYS] [KEYS, Dv] [QUERIES, KEYS] [QUERIES, Dv] */
} Tiles;

/* Rows `first` and on, at most QUERIES, of one head's output. */
static void attend(const Tiles *t, int64_t first, const float *q, const float *k, const float *v, float *out)
{
    const int64_t rows = least(QUERIES, t->M - first), padded = (rows + ROWS - 1) / ROWS * ROWS;
    const int64_t position = first + t->N - t->M; /* of the first row: the last key that it sees */
    float running_max[QUERIES], running_sum[QUERIES];
    for (int64_t i = 0; i < rows; i++) {
        running_max[i] = -INFINITY;
        running_sum[i] = 0;
        for (int64_t d = 0; d < t->head_dim; d++)
            t->queries[i * t->head_dim + d] = q[(first + i) * t->head_dim + d] * t->scale;
    }
    memset(t->sums, 0, QUERIES * t->value_stride * sizeof(float));

    const int64_t end = t->causal ? position + rows : t->N;
    for (int64_t start = 0; start < end; start += KEYS) {
        const int64_t keys = least(KEYS, t->N - start);
        for (int64_t d = 0; d < t->head_dim; d++)
            for (int64_t j = 0; j < keys; j++)
                t->keys[d * STRIDE + j] = k[(start + j) * t->head_dim + d];
        for (int64_t j = 0; j < keys; j++)
            memcpy(t->values + j * t->value_stride, v + (start + j) * t->value_dim, t->value_dim * sizeof(float));

        memset(t->scores, 0, QUERIES * STRIDE * sizeof(float));
        multiply(padded, KEYS, t->head_dim, t->queries, t->head_dim, t->keys, STRIDE, t->scores, STRIDE);
        for (int64_t i = 0; i < rows; i++) {
            const int64_t visible = t->causal ? least(keys, position + i + 1 - start) : keys;
            const int64_t seen = visible > 0 ? visible : 0;
            const float correction = online_softmax(t->scores + i * STRIDE, seen, running_max + i, running_sum + i);
            for (int64_t d = 0; d < t->value_dim; d++)
                t->sums[i * t->value_stride + d] *= correction;
        }
        multiply(padded, t->value_stride - SPREAD, keys, t->scores, STRIDE, t->values, t->value_stride, t->sums,
                 t->value_stride);
    }
    for (int64_t i = 0; i < rows; i++)
        for (int64_t d = 0; d < t->value_dim; d++)
            out[(first + i) * t->value_dim + d] = t->sums[i * t->value_stride + d] / running_sum[i];
}

/* q [batch, heads, M, head_dim], k [batch, kv_heads, N, head_dim], v [batch, kv_heads, N, value_dim], all contiguous;
   out [batch, heads, M, value_dim]. Causal: query i is at position i + N - M and sees the keys up to there. `threads`
   share the work where the compiler has OpenMP. Returns 0, or 1 if there is no memory for the tiles. */
int attention(const float *q, const float *k, const float *v, float *out, int64_t batch, int64_t heads,
              int64_t kv_heads, int64_t M, int64_t N, int64_t head_dim, int64_t value_dim, int causal, float scale,
              int threads)
{
    const int64_t value_stride = (value_dim + STRIP - 1) / STRIP * STRIP + SPREAD, group = heads / kv_heads;
    const int64_t sizes[] = {QUERIES * head_dim, head_dim * STRIDE, KEYS * value_stride, QUERIES * STRIDE,
                             QUERIES * value_stride};
    int failed = 0;
    (void)threads;
#pragma omp parallel num_threads(threads) reduction(| : failed)
    {
        Tiles tiles = {.M = M, .N = N, .head_dim = head_dim, .value_dim = value_dim, .value_stride = value_stride,
                       .causal = causal, .scale = scale * 1.44269504f};
        float *memory = calloc(sizes[0] + sizes[1] + sizes[2] + sizes[3] + sizes[4], sizeof(float));
        failed = !memory;
        if (memory) {
            tiles.queries = memory;
            tiles.keys = tiles.queries + sizes[0];
            tiles.values = tiles.keys + sizes[1];
            tiles.scores = tiles.values + sizes[2];
            tiles.sums = tiles.scores + sizes[3];
        }
#pragma omp for collapse(2) schedule(dynamic)
        for (int64_t head = 0; head < batch * heads; head++)
            for (int64_t first = 0; first < M; first += QUERIES)
                if (memory)
                    attend(&tiles, first, q + head * M * head_dim, k + head / group * N * head_dim,
                           v + head / group * N * value_dim, out + head * M * value_dim);
        free(memory);
    }
    return failed;
}
