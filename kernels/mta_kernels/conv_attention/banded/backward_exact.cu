// Adds the gradients of rows that backward.cu skips: rows that the forward computed in float32, and rows with huge scores.
// One block a head, one row after another. Nearly always there are none, and a block only reads the logsumexps. The last
// block of a query head then adds up its weight's gradient.
//
// Probabilities come from a recomputed softmax: a float32 logsumexp has too few digits for scores of a million.
// Constants besides the ones of exact.cuh: none.
#include <elements.cuh>
#include <counters.cuh>
#include <exact.cuh>

// A chunk is a column of scores a thread. Its outer columns, which c and ds reach across, belong to its neighbours.
constexpr int THREADS = 256, EDGE = KEY_TAPS - 1, OWN = THREADS - 2 * EDGE;
static_assert(QUERY_TAPS * KEY_TAPS <= THREADS, "a thread has a tap's gradient");

// Shared memory: arrays of floats.
constexpr int SCORES = 0;                                      // [QUERY_TAPS, THREADS]
constexpr int P = SCORES + QUERY_TAPS * THREADS;               // [THREADS]
constexpr int GRADS = P + THREADS;                             // dc [THREADS]
constexpr int SCORE_GRADS = GRADS + THREADS;                   // ds [QUERY_TAPS, THREADS]
constexpr int ROW_GRADS = SCORE_GRADS + QUERY_TAPS * THREADS;  // dq of open rows, row % QUERY_TAPS: [QUERY_TAPS, HEAD_DIM]

struct Arguments {
    Positions at;
    Inputs inputs;
    Rows grad_out;
    const float* logsumexp;  // [B, Hq, M]
    uint16_t* dq;            // [B, Hq, M, HEAD_DIM]
    float *dk, *dv;          // [B * Hq, N, HEAD_DIM]
    float* dweight;          // [B * Hq, weight_pitch]: sums of rows; the first QUERY_TAPS * KEY_TAPS grow here
    int weight_pitch;
    uint16_t *dk_rounded, *dv_rounded;  // null, or where dk and dv of heads with such rows are written, rounded
    void* weight_grad;       // [Hq, QUERY_TAPS, KEY_TAPS] in float32 or ELEMENT, or null: the sums of dweight
    int* heads_done;         // [Hq], 0 at first: blocks of a query head that are done
    int weight_grad_is_float, batch;
};

DEVICE float kept(int array, int i) { return __uint_as_float(load_shared(shared_memory() + 4 * (array + i))); }
DEVICE void keep(int array, int i, float value) { store_shared(shared_memory() + 4 * (array + i), __float_as_uint(value)); }
DEVICE int row_grad(int row, int column) { return ROW_GRADS + row % QUERY_TAPS * HEAD_DIM + column; }

// Called by all threads of a block; all get the result. `array` has THREADS numbers.
template <class Combine> DEVICE float of_all_threads(float value, int array, Combine combine) {
    __syncthreads();
    keep(array, threadIdx.x, value);
    __syncthreads();
    float result = kept(array, threadIdx.x % 32);
    for (int i = threadIdx.x % 32 + 32; i < THREADS; i += 32) result = combine(result, kept(array, i));
    for (int lane = 1; lane < 32; lane *= 2) result = combine(result, __shfl_xor_sync(~0u, result, lane));
    __syncthreads();
    return result;
}

// A head's part of the arguments.
struct Head {
    int batch_head, batch, head, kv_head;
    const float* logsumexp;
    uint16_t* dq;
    float *dk, *dv, *dweight;
    int64_t first_key;

    DEVICE Head(const Arguments& args, int batch_head) : batch_head(batch_head) {
        head = batch_head % args.at.heads, batch = batch_head / args.at.heads, kv_head = head / args.at.group;
        const int64_t first_row = (int64_t)batch_head * args.at.query_rows, first_out_row = out_row(args.at, batch_head, 0);
        first_key = (int64_t)batch_head * args.at.key_rows;
        logsumexp = args.logsumexp + first_out_row, dq = args.dq + first_row * HEAD_DIM;
        dk = args.dk + first_key * HEAD_DIM, dv = args.dv + first_key * HEAD_DIM;
        dweight = args.dweight + (int64_t)batch_head * args.weight_pitch;
    }
};

// c of a row at this thread's column of the chunk that begins at `first`. Leaves the chunk's scores in shared memory.
// It is complete where the row's window is in the chunk. `sees`: as `exact_scores` gives it.
DEVICE float convolved(const Arguments& args, const Head& of, int row, int first, uint32_t& sees) {
    const int thread = threadIdx.x;
    float scores[QUERY_TAPS], c = 0;
    sees = exact_scores(args.inputs, args.at, of.batch, of.head, row, first - EDGE + thread, scores);
    __syncthreads();
#pragma unroll
    for (int tap = 0; tap < QUERY_TAPS; tap++) keep(SCORES, tap * THREADS + thread, scores[tap]);
    __syncthreads();
    if (thread < PAD || thread >= THREADS - (KEY_TAPS - 1 - PAD)) return 0;
#pragma unroll 1
    for (int i = 0; i < QUERY_TAPS * KEY_TAPS; i++)
        c += weight_at(args.inputs.weight, of.head, i / KEY_TAPS, i % KEY_TAPS) *
             kept(SCORES, (QUERY_TAPS - 1 - i / KEY_TAPS) * THREADS + thread - PAD + i % KEY_TAPS);
    return c;
}

// Column `key` of grad_out v^T.
DEVICE float grad_of_p(const Arguments& args, const Head& of, int row, int key) {
    const uint16_t* const grad_row = row_of(args.grad_out, of.batch, of.head, row);
    const uint16_t* const v = row_of(args.inputs.v, of.batch, of.kv_head, key);
    float sum = 0;
#pragma unroll 1
    for (int column = 0; column < HEAD_DIM; column += 8)
        sum += dot_of_eight(*(const uint4*)(grad_row + column), *(const uint4*)(v + column));
    return sum;
}

struct Softmax {
    float reference, sum;  // p = exp(c - reference) / sum
    float delta;           // sum of p * grad_of_p
};

DEVICE Softmax softmax_of(const Arguments& args, const Head& of, int row, int begin, int end) {
    const int thread = threadIdx.x;
    Softmax mine = {MINUS_INFINITY, 0, 0};
    uint32_t sees;
#pragma unroll 1
    for (int first = begin; first < end; first += OWN) {
        const int key = first - EDGE + thread;
        const float c = convolved(args, of, row, first, sees);
        if (thread < EDGE || thread >= THREADS - EDGE || key >= end) continue;
        const float larger = fmaxf(mine.reference, c), p = exp2_fast((c - larger) * LOG2_E);
        const float rescale = exp2_fast((mine.reference - larger) * LOG2_E);
        mine = {larger, mine.sum * rescale + p, mine.delta * rescale + p * grad_of_p(args, of, row, key)};
    }
    auto add = [](float a, float b) { return a + b; };
    const float reference = of_all_threads(mine.reference, P, [](float a, float b) { return fmaxf(a, b); });
    const float rescale = exp2_fast((mine.reference - reference) * LOG2_E), sum = of_all_threads(mine.sum * rescale, P, add);
    return {reference, sum, of_all_threads(mine.delta * rescale, P, add) / sum};
}

// A row of NaN makes the gradients of all keys that it sees NaN. `nan_begin`, `nan_end`: keys that are NaN already.
DEVICE void spread_nan(const Head& of, int row, int begin, int end, int& nan_begin, int& nan_end) {
    const float NOT_A_NUMBER = __uint_as_float(~0u);
    const int from = begin == nan_begin ? nan_end : begin;
    for (int64_t i = (int64_t)from * HEAD_DIM + threadIdx.x; i < (int64_t)end * HEAD_DIM; i += THREADS)
        of.dk[i] = of.dv[i] = NOT_A_NUMBER;
    for (int i = threadIdx.x; i < QUERY_TAPS * HEAD_DIM; i += THREADS)
        if (row >= i / HEAD_DIM) keep(row_grad(row - i / HEAD_DIM, i % HEAD_DIM), 0, NOT_A_NUMBER);
    nan_begin = begin, nan_end = end;
}

// The gradients of a row in a chunk of keys; returns what the row adds to the gradient of this thread's tap.
DEVICE float add_chunk(const Arguments& args, const Head& of, int row, Softmax softmax, int first, int begin, int end) {
    const int thread = threadIdx.x, key = first - EDGE + thread;
    const uint16_t* const grad_row = row_of(args.grad_out, of.batch, of.head, row);
    uint32_t sees;
    const float c = convolved(args, of, row, first, sees);

    float p = 0, dc = 0;
    if (key >= begin && key < end && thread >= PAD && thread < THREADS - (KEY_TAPS - 1 - PAD)) {
        p = exp2_fast((c - softmax.reference) * LOG2_E) / softmax.sum;
        dc = p * (grad_of_p(args, of, row, key) - softmax.delta);
    }
    keep(P, thread, p);
    keep(GRADS, thread, dc);
    __syncthreads();

    const bool is_own = thread >= EDGE && thread < THREADS - EDGE && key < end;
#pragma unroll
    for (int tap = 0; tap < QUERY_TAPS; tap++) {
        float ds = 0;
        if (is_own && sees >> tap & 1)
#pragma unroll 1
            for (int key_tap = 0; key_tap < KEY_TAPS; key_tap++)
                ds += weight_at(args.inputs.weight, of.head, QUERY_TAPS - 1 - tap, key_tap) * kept(GRADS, thread + PAD - key_tap);
        keep(SCORE_GRADS, tap * THREADS + thread, ds);
    }
    __syncthreads();

    const int columns = min(OWN, end - first), taps = min(QUERY_TAPS, row + 1);
#pragma unroll 1
    for (int i = thread; i < columns * HEAD_DIM; i += THREADS) {
        const int x = EDGE + i / HEAD_DIM, column = i % HEAD_DIM;
        float dk = 0;
        for (int tap = 0; tap < taps; tap++)
            dk += kept(SCORE_GRADS, tap * THREADS + x) * unpack<ELEMENT>(row_of(args.inputs.q, of.batch, of.head, row - tap)[column]);
        of.dk[(int64_t)first * HEAD_DIM + i] += dk * args.inputs.scale;
        of.dv[(int64_t)first * HEAD_DIM + i] += kept(P, x) * unpack<ELEMENT>(grad_row[column]);
    }
#pragma unroll 1
    for (int i = thread; i < taps * HEAD_DIM; i += THREADS) {
        const int tap = i / HEAD_DIM, column = i % HEAD_DIM, to = row_grad(row - tap, column);
        float dq = 0;
        for (int x = 0; x < columns; x++)
            dq += kept(SCORE_GRADS, tap * THREADS + EDGE + x) *
                  unpack<ELEMENT>(row_of(args.inputs.k, of.batch, of.kv_head, first + x)[column]);
        keep(to, 0, kept(to, 0) + dq * args.inputs.scale);
    }
    float dweight = 0;
    if (thread < QUERY_TAPS * KEY_TAPS)
        for (int x = EDGE; x < EDGE + columns; x++)
            dweight += kept(GRADS, x) * kept(SCORES, (QUERY_TAPS - 1 - thread / KEY_TAPS) * THREADS + x - PAD + thread % KEY_TAPS);
    return dweight;
}

// Add the kept sums to the rows of dq to which no later row adds.
DEVICE void close_rows(const Head& of, int from, int end) {
    __syncthreads();
    for (int row = from; row < end; row++)
        for (int column = threadIdx.x; column < HEAD_DIM; column += THREADS) {
            uint16_t& dq = of.dq[(int64_t)row * HEAD_DIM + column];
            dq = (uint16_t)pack<ELEMENT>(unpack<ELEMENT>(dq) + kept(row_grad(row, column), 0), 0.f);
            keep(row_grad(row, column), 0, 0);
        }
    __syncthreads();
}

DEVICE void round_sums(const Arguments& args, const Head& of) {
    const int64_t first = of.first_key * HEAD_DIM;
    for (int64_t i = threadIdx.x; i < (int64_t)args.at.key_rows * HEAD_DIM; i += THREADS) {
        args.dk_rounded[first + i] = (uint16_t)pack<ELEMENT>(of.dk[i], 0.f);
        args.dv_rounded[first + i] = (uint16_t)pack<ELEMENT>(of.dv[i], 0.f);
    }
}

DEVICE void add_exact_rows(const Arguments& args, const Head& of) {
    const int thread = threadIdx.x;
    for (int i = thread; i < QUERY_TAPS * HEAD_DIM; i += THREADS) keep(ROW_GRADS, i, 0);
    int first_open = 0, end_open = 0;  // rows of dq
    int nan_begin = -1, nan_end = -1;
    float dweight = 0;  // of the thread's tap
#pragma unroll 1
    for (int row = 0; row < args.at.query_rows; row++) {
        const float logsumexp = of.logsumexp[row];
        if (!is_exact(logsumexp)) continue;
        const int begin = keys_begin(args.at, row), end = keys_end(args.at, row), first_row = max(row - HALO, 0);
        close_rows(of, first_open, min(end_open, first_row));
        first_open = max(first_open, first_row), end_open = row + 1;
        if (!(logsumexp == logsumexp)) {
            spread_nan(of, row, begin, end, nan_begin, nan_end);
            dweight = logsumexp;
            continue;
        }
        const Softmax softmax = softmax_of(args, of, row, begin, end);
#pragma unroll 1
        for (int first = begin; first < end; first += OWN) dweight += add_chunk(args, of, row, softmax, first, begin, end);
    }
    close_rows(of, first_open, end_open);
    if (args.dk_rounded) round_sums(args, of);
    if (thread < QUERY_TAPS * KEY_TAPS) of.dweight[thread] += dweight;
}

// The weight's gradient of a query head, by the last of its blocks: the sum over sequences and blocks of rows, in one order.
DEVICE void sum_of_taps(const Arguments& args, const Head& of) {
    constexpr int TAPS = QUERY_TAPS * KEY_TAPS, GROUPS = THREADS / TAPS;
    const int thread = threadIdx.x;
    __syncthreads();
    if (thread == 0) keep(P, 0, arrive(args.heads_done + of.head));
    __syncthreads();
    if (kept(P, 0) != args.batch - 1) return;
    __syncthreads();
    const int count = args.batch * args.weight_pitch;  // in steps that keep a thread's tap
    float sum = 0;
#pragma unroll 16
    for (int i = thread < GROUPS * TAPS ? thread : count; i < count; i += GROUPS * TAPS)
        sum += args.dweight[((int64_t)(i / args.weight_pitch) * args.at.heads + of.head) * args.weight_pitch + i % args.weight_pitch];
    keep(P, thread, sum);
    __syncthreads();
    if (thread >= TAPS) return;
    for (int group = 1; group < GROUPS; group++) sum += kept(P, group * TAPS + thread);
    if (args.weight_grad_is_float)
        ((float*)args.weight_grad)[of.head * TAPS + thread] = sum;
    else
        ((uint16_t*)args.weight_grad)[of.head * TAPS + thread] = (uint16_t)pack<ELEMENT>(sum, 0.f);
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) backward_exact(const __grid_constant__ Arguments args) {
    const Head of(args, blockIdx.x);
    bool is_any = false;
#pragma unroll 8
    for (int row = threadIdx.x; row < args.at.query_rows; row += THREADS) is_any |= is_exact(of.logsumexp[row]);
    wait_for_launch_before();
    if (of_all_threads(is_any, P, [](float a, float b) { return a + b; }) != 0) add_exact_rows(args, of);
    if (args.weight_grad) sum_of_taps(args, of);
}
