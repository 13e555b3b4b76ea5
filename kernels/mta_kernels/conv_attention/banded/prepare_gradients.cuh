// What a backward needs besides its inputs: delta, and bounds on gradients. By blocks of 256 threads, in 2 NORM_PARTS jobs:
//   0  .. 31  largest squared norm of a part of the values of a KV head
//   32 .. 63  delta of a part of the rows of a query head, and the largest squared norm of their output gradients
#pragma once
#include <backward_scale.cuh>
#include <exact.cuh>

struct GradientPreparation {
    Rows v, out, grad_out;
    float *value_norms, *grad_norms;  // [B * heads, NORM_PARTS]
    float* delta;                     // [B, Hq, M]: sums of out * grad_out
    int* counters;                    // of the tile schedulers of the next kernels: set to 0
    int heads, kv_heads, batch, query_rows, key_rows, counter_count;  // rows of out and of v
};

DEVICE void clear_counters(const GradientPreparation& args) {
    for (int i = threadIdx.x; i < args.counter_count; i += 256) args.counters[i] = 0;
}

DEVICE float block_max(float value, int thread) {
    value = warp_max(value);
    if (thread % 32 == 0) store_shared(shared_memory() + thread / 32 * 4, __float_as_uint(value));
    __syncthreads();
    for (int warp = 0; warp < 8; warp++) value = fmaxf(value, __uint_as_float(load_shared(shared_memory() + warp * 4)));
    return value;
}

// The sum over 8 threads.
DEVICE float sum_of_eight(float sum, int thread) {
    for (int lane = 1; lane < 8; lane *= 2) sum += __shfl_xor_sync(0xFFu << thread % 32 / 8 * 8, sum, lane);
    return sum;
}

// Sums over two rows of numbers, of which 8 threads have a part each.
struct RowSums {
    float products = 0, squares_of_b = 0;

    DEVICE RowSums(const uint16_t* a, const uint16_t* b, int thread) {
        for (int at = thread % 8 * 8; at < HEAD_DIM; at += 64) {
            const uint4 of_a = *(const uint4*)(a + at), of_b = *(const uint4*)(b + at);
            products += dot_of_eight(of_a, of_b);
            squares_of_b += dot_of_eight(of_b, of_b);
        }
    }
};

DEVICE void store_largest(float largest, float* to) {
    largest = block_max(largest, threadIdx.x);
    if (threadIdx.x == 0) *to = largest;
}

// `head` counts the heads of all batches; the grid may have more.
DEVICE void prepare_gradients(const GradientPreparation& args, int head, int job) {
    const int thread = threadIdx.x, part = job % NORM_PARTS, at = head * NORM_PARTS + part;
    const int rows = job < NORM_PARTS ? args.key_rows : args.query_rows, each = (rows + NORM_PARTS - 1) / NORM_PARTS;
    const int first = part * each + thread / 8, end = min((part + 1) * each, rows);
    if (job < NORM_PARTS) {
        if (head >= args.batch * args.kv_heads) return;
        float largest = 0;
#pragma unroll 2
        for (int row = first; row < end; row += 32) {
            const uint16_t* const value = row_of(args.v, head / args.kv_heads, head % args.kv_heads, row);
            largest = fmaxf(largest, sum_of_eight(RowSums(value, value, thread).products, thread));
        }
        store_largest(largest, args.value_norms + at);
    } else if (head < args.batch * args.heads) {
        const int batch = head / args.heads;
        float largest_grad = 0;
#pragma unroll 2
        for (int row = first; row < end; row += 32) {
            const RowSums sums(row_of(args.out, batch, head % args.heads, row),
                               row_of(args.grad_out, batch, head % args.heads, row), thread);
            const float delta = sum_of_eight(sums.products, thread);
            if (thread % 8 == 0) args.delta[(int64_t)head * args.query_rows + row] = delta;
            largest_grad = fmaxf(largest_grad, sum_of_eight(sums.squares_of_b, thread));
        }
        store_largest(largest_grad, args.grad_norms + at);
    }
}
