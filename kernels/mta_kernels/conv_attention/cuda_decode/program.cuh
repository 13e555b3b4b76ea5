// The kernel of few_heads.cu and many_heads.cu, which define `attend` and `finish`.
#pragma once
#include "stream.cuh"

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    cuda_decode(const __grid_constant__ Arguments args) {
    if (!FEW_HEADS) let_next_start();
    const uint32_t shared = shared_memory();
    const int first_head = blockIdx.x % HEAD_BLOCKS * ALL_HEADS;
    Work work;
    if (!work.begin(args.lengths, blockIdx.x / HEAD_BLOCKS, args.programs, args.splits)) return;
    Segment done;
    Sums sums;
    Stream stream;
    for (bool first = true, more = true;; first = false) {
        // A head's first keys are in flight while the head before it is finished.
        Segment segment = work.segment;
        Window window;
        if (more) {
            Cache cache;
            cache.open(args, segment);
            window.load(args, segment, cache, first_head);
            stream.begin(args, segment, cache);
#pragma unroll 1
            for (int tile = 0; tile < STAGES; tile++) {
                stream.load_keys(args, shared, tile);
                stream.load_values(args, shared, tile);
            }
        }
        if (!first) finish(args, done, shared, sums);
        if (!more) return;
        window.store(args, segment, stream.cache, first_head, shared);
        __syncthreads();
        attend(args, segment, stream, shared, sums);
        work.count_sharers(segment);
        done = segment;
        more = work.advance();
    }
}
