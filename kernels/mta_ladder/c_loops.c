/* Attention as it is written down, in plain loops: scores, softmax of each row, weighted sum of the values.

   The scores of one head, M x N floats, lie in memory between the steps. One thread; every element of the scores is
   read again from memory in each step, and a dot product adds its terms one after the other, as C prescribes.

   Alone: cc -O3 -march=native -shared -fPIC -o c_loops.so c_loops.c -lm
*/
#include <math.h>
#include <stdint.h>
#include <stdlib.h>

/* q [batch, heads, M, head_dim], k [batch, kv_heads, N, head_dim], v [batch, kv_heads, N, value_dim], all contiguous;
   out [batch, heads, M, value_dim]. Causal: query i is at position i + N - M and sees the keys up to there. `threads`
   is for c_tiled.c, which has the same interface. Returns 0, or 1 if there is no memory for the scores. */
int attention(const float *q, const float *k, const float *v, float *out, int64_t batch, int64_t heads,
              int64_t kv_heads, int64_t M, int64_t N, int64_t head_dim, int64_t value_dim, int causal, float scale,
              int threads)
{
    (void)threads;
    float *scores = malloc(M * N * sizeof(float));
    if (!scores)
        return 1;
    for (int64_t head = 0; head < batch * heads; head++) {
        const int64_t kv_head = head / (heads / kv_heads); /* as many KV heads a sequence: no need to split `head` */
        const float *queries = q + head * M * head_dim;
        const float *keys = k + kv_head * N * head_dim;
        const float *values = v + kv_head * N * value_dim;

        for (int64_t i = 0; i < M; i++)
            for (int64_t j = 0; j < N; j++) {
                float sum = 0;
                for (int64_t d = 0; d < head_dim; d++)
                    sum += queries[i * head_dim + d] * keys[j * head_dim + d];
                scores[i * N + j] = causal && j > i + N - M ? -INFINITY : scale * sum;
            }

        for (int64_t i = 0; i < M; i++) {
            float *row = scores + i * N;
            float max = -INFINITY;
            double sum = 0; /* of N terms one after the other: in float it would lose digits */
            for (int64_t j = 0; j < N; j++)
                max = row[j] > max ? row[j] : max;
            for (int64_t j = 0; j < N; j++)
                sum += row[j] = expf(row[j] - max); /* the largest is 1: nothing overflows */
            for (int64_t j = 0; j < N; j++)
                row[j] /= (float)sum;
        }

        for (int64_t i = 0; i < M; i++)
            for (int64_t d = 0; d < value_dim; d++) {
                double sum = 0;
                for (int64_t j = 0; j < N; j++)
                    sum += scores[i * N + j] * values[j * value_dim + d];
                out[(head * M + i) * value_dim + d] = (float)sum;
            }
    }
    free(scores);
    return 0;
}
