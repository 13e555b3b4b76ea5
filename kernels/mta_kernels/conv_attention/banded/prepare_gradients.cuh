// What a backward needs besides its inputs: delta, and bounds on gradients. By blocks of 256 threads, in 2 NORM_PARTS jobs:
//   0  .. 31  largest squared norm of a part of the values of a KV head
//   32 .. 63  delta of a part of the rows of a query head, and the largest squared norm of their output gradients
#pragma once
#include <backward_scale.cuh>
#include <exact.cuh>

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

// `head` is one of all batches; there may be more than these.
template <class Preparation> DEVICE void prepare_gradients(const Preparation& args, int head, int job) {
    const int thread = threadIdx.x;
    if (job < NORM_PARTS) {
        if (head < args.batch * args.kv_heads) largest_norm(args.v, args.kv_heads, head, args.key_rows, job, args.value_norms);
    } else if (head < args.batch * args.heads) {
        const int part = job - NORM_PARTS, each = (args.query_rows + NORM_PARTS - 1) / NORM_PARTS;
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
