// What forward and backward need besides their inputs: T, and for the backward delta and bounds on gradients.
//
// Blocks of 256 threads. Along x: query heads or KV heads, of all batches or not (y ends at 65535). Along y, by what
// they compute:
//   0         T (and for the backward T' and exact_rows) and weight_scale of a query head; counters
//   1 .. 32   backward: largest squared norm of a part of the values
//   33 .. 64  backward: delta of a part of the rows, and the largest squared norm of their output gradients
#include <prepare_gradients.cuh>
#include <tiles.cuh>

struct Preparation : GradientPreparation {  // the forward sets counts and counters of the latter
    Weight weight;
    uint16_t *taps, *taps_back;
    float* weight_scale;     // [Hq]: |scale| * log2(e) * the power of two that T is divided by
    const float* logsumexp;  // [B, Hq, M], or null
    int* exact_rows;         // [B * Hq], with a logsumexp: whether a head has rows with `is_exact`
    float scale_log2;        // scale * log2(e)
};

constexpr float SMALLEST_SCALE = 1e-37f;  // for a scale of 0: scores so small that the softmax is uniform

DEVICE void write_taps(const Preparation& args, int head) {
    const int thread = threadIdx.x;
    float largest = 0;
    for (int i = thread; i < QUERY_TAPS * KEY_TAPS; i += 256)
        largest = fmaxf(largest, fabsf(weight_at(args.weight, head, i / KEY_TAPS, i % KEY_TAPS)));
    largest = block_max(largest, thread);
    const int exponent = largest > 0 ? ilogbf(largest) + 1 : 0;
    // Masked places are minus infinity times weight_scale: it is positive, T has the sign. NaN stays NaN.
    const float scale = ldexpf(fabsf(args.scale_log2), exponent), sign = args.scale_log2 < 0 ? -1 : 1;
    if (thread == 0) args.weight_scale[head] = scale < SMALLEST_SCALE ? SMALLEST_SCALE : scale;
    for (int i = thread; i < QUERY_TAPS * 256; i += 256) {
        // Two numbers of T, or of T' from the last tap to the first: row k, k + 1 of 16, column n of 32, in 8 x 8 tiles.
        const int tap = i / 256, k = i % 256 / 128 * 8 + i % 4 * 2, n = i % 128 / 4;
        float value[2], back[2];
        for (int e = 0; e < 2; e++) {
            const int key_tap = k + e - n + LEFT + PAD, back_tap = n - LEFT_BACK - k - e + PAD;
            const bool inside = key_tap >= 0 && key_tap < KEY_TAPS, back_inside = back_tap >= 0 && back_tap < KEY_TAPS;
            value[e] = inside ? sign * ldexpf(weight_at(args.weight, head, QUERY_TAPS - 1 - tap, key_tap), -exponent) : 0.f;
            back[e] = back_inside ? sign * ldexpf(weight_at(args.weight, head, tap, back_tap), -exponent) : 0.f;
        }
        ((uint32_t*)args.taps)[head * QUERY_TAPS * 256 + i] = pack<Half>(value[0], value[1]);
        if (args.taps_back) ((uint32_t*)args.taps_back)[head * QUERY_TAPS * 256 + i] = pack<Half>(back[0], back[1]);
    }
}

DEVICE void look_for_exact_rows(const Preparation& args, int batch_head) {
    const int thread = threadIdx.x;
    const float* const logsumexp = args.logsumexp + (int64_t)batch_head * args.query_rows;
    bool is_any = false;
#pragma unroll 8
    for (int row = thread; row < args.query_rows; row += 256) is_any |= is_exact(logsumexp[row]);
    __syncthreads();  // all threads have read what was shared before
    is_any = block_max(is_any, thread) > 0;
    if (thread == 0) args.exact_rows[batch_head] = is_any;
}

extern "C" __global__ void MAXIMUM_THREADS(256) hopper_prepare(const __grid_constant__ Preparation args) {
    const int head = blockIdx.x, job = blockIdx.y;
    let_next_start();
    if (job == 0) {
        if (head == 0) clear_counters(args);
        if (head < args.heads) write_taps(args, head);
        if (args.logsumexp && head < args.batch * args.heads) look_for_exact_rows(args, head);
    } else {
        prepare_gradients(args, head, job - 1);
    }
}
