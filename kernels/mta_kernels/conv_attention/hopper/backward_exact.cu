// What rows that the forward computed in float32 add to the gradients, which backward.cu leaves out: a block a head, one row
// after another. Nearly always there are none, and a block only reads the marks.
//
// Constants as in forward.cu; HEAD_DIM up to 128.
#include <exact.cuh>

// A chunk is a column of scores a thread. The outer ones, which c and ds reach across, are of the chunks beside it.
constexpr int THREADS = 256, EDGE = KEY_TAPS - 1, OWN = THREADS - 2 * EDGE;
static_assert(QUERY_TAPS * KEY_TAPS <= THREADS, "a thread has a tap's gradient");

// Shared memory: floats of each thread.
constexpr int SCORES = 0;                                    // [QUERY_TAPS, THREADS]
constexpr int GRADS = SCORES + QUERY_TAPS * THREADS * 4;       // dc [THREADS]
constexpr int SCORE_GRADS = GRADS + THREADS * 4;               // ds [QUERY_TAPS, THREADS]
constexpr int ROW_GRADS = SCORE_GRADS + QUERY_TAPS * THREADS * 4;  // dq of rows that are not complete, row % QUERY_TAPS

struct Arguments {
    Positions at;
    Inputs inputs;
    Rows grad_out;
    const float *logsumexp, *delta;  // [B, Hq, M]
    uint16_t* dq;                    // [B, Hq, M, HEAD_DIM]
    float *dk, *dv;                  // [B * Hq, N, HEAD_DIM]
    float* dweight;                  // [B * Hq, weight_pitch]: the first QUERY_TAPS * KEY_TAPS are added to
    int weight_pitch;
};

extern "C" __global__ void MAXIMUM_THREADS(THREADS) hopper_backward_exact(const __grid_constant__ Arguments args) {
    const int batch_head = blockIdx.x, thread = threadIdx.x;
    const int head = batch_head % args.at.heads, batch = batch_head / args.at.heads, kv_head = head / args.at.group;
    const float *const logsumexps = args.logsumexp + (int64_t)batch_head * args.at.query_rows, NAN_SUM = __uint_as_float(~0u);
    const uint32_t shared = shared_memory();
    auto at_shared = [&](int array, int i) { return __uint_as_float(load_shared(shared + array + 4 * i)); };
    auto to_shared = [&](int array, int i, float value) { store_shared(shared + array + 4 * i, __float_as_uint(value)); };

    bool any = false;
#pragma unroll 8
    for (int row = thread; row < args.at.query_rows; row += THREADS) any |= is_exact(logsumexps[row]);
    to_shared(GRADS, thread, any);
    __syncthreads();
    any = false;
    for (int i = thread % 32; i < THREADS; i += 32) any |= at_shared(GRADS, i) > 0;
    if (!__any_sync(~0u, any)) return;
    __syncthreads();

    for (int i = thread; i < QUERY_TAPS * HEAD_DIM; i += THREADS) to_shared(ROW_GRADS, i, 0);
    // Rows of dq that no later row adds to.
    auto complete = [&](int from, int end) {
        __syncthreads();
        for (int row = from; row < end; row++)
            for (int column = thread; column < HEAD_DIM; column += THREADS) {
                uint16_t* const to = args.dq + ((int64_t)batch_head * args.at.query_rows + row) * HEAD_DIM + column;
                const int i = row % QUERY_TAPS * HEAD_DIM + column;
                *to = (uint16_t)pack<ELEMENT>(unpack<ELEMENT>(*to) + at_shared(ROW_GRADS, i), 0.f);
                to_shared(ROW_GRADS, i, 0);
            }
        __syncthreads();
    };
    int first_open = 0, end_open = 0;  // rows of dq that are not complete
    int nan_begin = -1, nan_end = -1;  // keys whose gradients are NaN already
    float dweight = 0;                 // of the thread's tap
#pragma unroll 1
    for (int row = 0; row < args.at.query_rows; row++) {
        const float logsumexp = logsumexps[row];
        if (!is_exact(logsumexp)) continue;
        const int first_row = max(row - HALO, 0);
        complete(first_open, min(end_open, first_row));
        first_open = max(first_open, first_row), end_open = row + 1;
        const int begin = keys_begin(args.at, row), end = keys_end(args.at, row);
        const uint16_t* const grad_row = row_of(args.grad_out, batch, head, row);
        float *const dk = args.dk + (int64_t)batch_head * args.at.key_rows * HEAD_DIM;
        float *const dv = args.dv + (int64_t)batch_head * args.at.key_rows * HEAD_DIM;
        if (!(logsumexp == logsumexp)) {  // so are the gradients of all that it sees
            const int from = begin == nan_begin ? nan_end : begin;
            for (int64_t i = (int64_t)from * HEAD_DIM + thread; i < (int64_t)end * HEAD_DIM; i += THREADS)
                dk[i] = dv[i] = NAN_SUM;
            for (int i = thread; i < QUERY_TAPS * HEAD_DIM; i += THREADS)
                if (row >= i / HEAD_DIM) to_shared(ROW_GRADS, (row - i / HEAD_DIM) % QUERY_TAPS * HEAD_DIM + i % HEAD_DIM, NAN_SUM);
            dweight = NAN_SUM, nan_begin = begin, nan_end = end;
            continue;
        }
        const float delta = args.delta[(int64_t)batch_head * args.at.query_rows + row];
#pragma unroll 1
        for (int first = begin; first < end; first += OWN) {
            const int key = first - EDGE + thread;
            float scores[QUERY_TAPS];
            const uint32_t sees = exact_scores(args.inputs, args.at, batch, head, row, key, scores);
#pragma unroll
            for (int tap = 0; tap < QUERY_TAPS; tap++) to_shared(SCORES, tap * THREADS + thread, scores[tap]);
            __syncthreads();

            float p = 0, dc = 0;
            if (key >= begin && key < end && thread >= PAD && thread < THREADS - (KEY_TAPS - 1 - PAD)) {
                float c = 0, dp = 0;
#pragma unroll 1
                for (int i = 0; i < QUERY_TAPS * KEY_TAPS; i++)
                    c += weight_at(args.inputs.weight, head, i / KEY_TAPS, i % KEY_TAPS) *
                         at_shared(SCORES, (QUERY_TAPS - 1 - i / KEY_TAPS) * THREADS + thread - PAD + i % KEY_TAPS);
                const uint16_t* const v = row_of(args.inputs.v, batch, kv_head, key);
#pragma unroll 1
                for (int column = 0; column < HEAD_DIM; column += 8)
                    dp += dot_of_eight(*(const uint4*)(grad_row + column), *(const uint4*)(v + column));
                p = exp2_fast((c - logsumexp) * LOG2_E), dc = p * (dp - delta);
            }
            to_shared(GRADS, thread, dc);
            __syncthreads();

            const bool is_own = thread >= EDGE && thread < THREADS - EDGE && key < end;
            float ds[QUERY_TAPS];
#pragma unroll
            for (int tap = 0; tap < QUERY_TAPS; tap++) {
                ds[tap] = 0;
                if (is_own && sees >> tap & 1)
#pragma unroll 1
                    for (int key_tap = 0; key_tap < KEY_TAPS; key_tap++)
                        ds[tap] += weight_at(args.inputs.weight, head, QUERY_TAPS - 1 - tap, key_tap) *
                                   at_shared(GRADS, thread + PAD - key_tap);
                to_shared(SCORE_GRADS, tap * THREADS + thread, ds[tap]);
            }
            if (is_own)
#pragma unroll 1
                for (int column = 0; column < HEAD_DIM; column++) {
                    float sum = 0;
#pragma unroll
                    for (int tap = 0; tap < QUERY_TAPS; tap++)
                        if (sees >> tap & 1) sum += ds[tap] * unpack<ELEMENT>(row_of(args.inputs.q, batch, head, row - tap)[column]);
                    dk[(int64_t)key * HEAD_DIM + column] += sum * args.inputs.scale;
                    dv[(int64_t)key * HEAD_DIM + column] += p * unpack<ELEMENT>(grad_row[column]);
                }
            __syncthreads();

            const int columns = min(OWN, end - first);
#pragma unroll 1
            for (int i = thread; i < QUERY_TAPS * HEAD_DIM; i += THREADS) {
                const int tap = i / HEAD_DIM, to = (row - tap) % QUERY_TAPS * HEAD_DIM + i % HEAD_DIM;
                if (row < tap) break;
                float sum = 0;
                for (int x = 0; x < columns; x++)
                    sum += at_shared(SCORE_GRADS, tap * THREADS + EDGE + x) *
                           unpack<ELEMENT>(row_of(args.inputs.k, batch, kv_head, first + x)[i % HEAD_DIM]);
                to_shared(ROW_GRADS, to, at_shared(ROW_GRADS, to) + sum * args.inputs.scale);
            }
            if (thread < QUERY_TAPS * KEY_TAPS)
                for (int x = EDGE; x < EDGE + columns; x++)
                    dweight += at_shared(GRADS, x) * at_shared(SCORES, (QUERY_TAPS - 1 - thread / KEY_TAPS) * THREADS + x - PAD + thread % KEY_TAPS);
            __syncthreads();
        }
    }
    complete(first_open, end_open);
    if (thread < QUERY_TAPS * KEY_TAPS) args.dweight[(int64_t)batch_head * args.weight_pitch + thread] += dweight;
}
