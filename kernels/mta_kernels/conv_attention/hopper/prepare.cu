// What forward and backward need besides their inputs: T, and for the backward delta and bounds on gradients.
//
// Blocks of 256 threads; along x query heads or KV heads, of all batches or not (y ends at 65535); along y, by what they
// compute:
//   0         T (and for the backward T') and weight_scale of a query head; counters
//   1 .. 32   backward: largest squared norm of a part of the values
//   33 .. 64  backward: delta of a part of the rows, and the largest squared norm of their output gradients
#include <exact.cuh>
#include <tiles.cuh>

struct Preparation {
    Rows v, out, grad_out;  // for the backward
    Weight weight;
    uint16_t *taps, *taps_back;
    float* weight_scale;                          // [Hq]: |scale| * log2(e) * the power of two that T is divided by
    float *value_norms, *grad_norms;              // [B * heads, NORM_PARTS]; with MARGINS norms of out follow grad_norms
    float* delta;                                 // [B, Hq, M]: sums of out * grad_out
    int* counters;                                // of the tile schedulers of the next kernels: set to 0
    float scale_log2;                             // scale * log2(e)
    int heads, kv_heads, batch, query_rows, key_rows, counter_count;  // rows of out and of v
};

constexpr float SMALLEST_SCALE = 1e-37f;  // of a scale of 0, whose scores are so small that the softmax is even

DEVICE float block_max(float value, int thread) {
    value = warp_max(value);
    if (thread % 32 == 0) store_shared(shared_memory() + thread / 32 * 4, __float_as_uint(value));
    __syncthreads();
    for (int warp = 0; warp < 8; warp++) value = fmaxf(value, __uint_as_float(load_shared(shared_memory() + warp * 4)));
    return value;
}

// The sum of products of two rows' numbers, by 8 threads together.
DEVICE float dot_rows(const uint16_t* a, const uint16_t* b, int thread) {
    float sum = 0;
    for (int at = thread % 8 * 8; at < HEAD_DIM; at += 64) sum += dot_of_eight(*(const uint4*)(a + at), *(const uint4*)(b + at));
    for (int lane = 1; lane < 8; lane *= 2) sum += __shfl_xor_sync(0xFFu << thread % 32 / 8 * 8, sum, lane);
    return sum;
}

DEVICE void largest_norm(const Rows& x, int heads, int batch_head, int rows, int part, float* norms) {
    const int thread = threadIdx.x, each = (rows + NORM_PARTS - 1) / NORM_PARTS;
    float largest = 0;
    for (int row = part * each + thread / 8; row < min((part + 1) * each, rows); row += 32) {
        const uint16_t* numbers = row_of(x, batch_head / heads, batch_head % heads, row);
        largest = fmaxf(largest, dot_rows(numbers, numbers, thread));
    }
    largest = block_max(largest, thread);
    if (thread == 0) norms[batch_head * NORM_PARTS + part] = largest;
}

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

extern "C" __global__ void MAXIMUM_THREADS(256) hopper_prepare(const __grid_constant__ Preparation args) {
    const int head = blockIdx.x, job = blockIdx.y, thread = threadIdx.x;
    if (job == 0) {
        if (head == 0)
            for (int i = thread; i < args.counter_count; i += 256) args.counters[i] = 0;
        if (head < args.heads) write_taps(args, head);
    } else if (job <= NORM_PARTS) {
        if (head < args.batch * args.kv_heads)
            largest_norm(args.v, args.kv_heads, head, args.key_rows, job - 1, args.value_norms);
    } else if (head < args.batch * args.heads) {
        const int part = job - NORM_PARTS - 1, each = (args.query_rows + NORM_PARTS - 1) / NORM_PARTS;
        const int batch = head / args.heads;
        for (int row = part * each + thread / 8; row < min((part + 1) * each, args.query_rows); row += 32) {
            const float sum = dot_rows(row_of(args.out, batch, head % args.heads, row),
                                       row_of(args.grad_out, batch, head % args.heads, row), thread);
            if (thread % 8 == 0) args.delta[(int64_t)head * args.query_rows + row] = sum;
        }
        largest_norm(args.grad_out, args.heads, head, args.query_rows, part, args.grad_norms);
        if constexpr (MARGINS) {  // out has values of other tiles, so those of this one do not bound delta
            __syncthreads();
            float* const out_norms = args.grad_norms + args.batch * args.heads * NORM_PARTS;
            largest_norm(args.out, args.heads, head, args.query_rows, part, out_norms);
        }
    }
}
