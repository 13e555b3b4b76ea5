// Adds up, to `out`, the parts of programs of many_heads.cu or hopper_heads.cu that share a KV head; a block a query head.
#include "parts.cuh"

constexpr int VECTORS = DEPTH / 4, GROUPS = MERGE_THREADS / VECTORS;
constexpr int AT_ONCE = 5;  // programs of a thread in flight
static_assert(MERGE_THREADS * 24 == SHARED_BYTES, "as in plan.py");

extern "C" __global__ void __launch_bounds__(MERGE_THREADS, 1) cuda_decode_merge(const __grid_constant__ Arguments args) {
    const uint32_t shared = shared_memory();
    const int thread = thread_index(), vector = thread % VECTORS, group = thread / VECTORS;
    const int kv_head = blockIdx.x / args.group, head = blockIdx.x % args.group;
    Work work;
    int first_program, programs;
    work.find_sharers(args.lengths, args.programs, args.splits, kv_head / args.lengths.kv_heads,
                      kv_head % args.lengths.kv_heads, first_program, programs);
    // Blocks with nothing to add exit. One waits: what follows in the stream waits for this launch alone.
    if (programs == 1 && blockIdx.x > 0) return;
    wait_for_launch_before();
    if (programs == 1) return;
    Part part;
    if (group < GROUPS)
        part.add_programs<AT_ONCE, GROUPS>(args, first_program, programs, head / ALL_HEADS, head % ALL_HEADS, vector, group);
    store_floats(shared + thread * 16, part.values);
    store_shared(shared + MERGE_THREADS * 16 + thread * 8, __float_as_uint(part.maximum), __float_as_uint(part.sum));
    __syncthreads();
    if (group > 0) return;
#pragma unroll 4
    for (int other = 1; other < GROUPS; other++) {
        const int from = other * VECTORS + vector;
        float values[4], both[2];
        load_floats(values, shared + from * 16);
        load_floats(both, shared + MERGE_THREADS * 16 + from * 8);
        part.add({both[0], both[1]}, {values[0], values[1], values[2], values[3]});
    }
    write_out(args.out + (int64_t)blockIdx.x * HEAD_DIM, vector * 4, part.sum, part.values);
}
