// Conv attention backward on Hopper: row blocks give dq, the weight's gradient, p and ds; products give dk and dv.
//
// It streams over keys as the forward does and recomputes scores and probabilities:
//   c = convolution of s, p = exp2(c - logsumexp), dc = p (grad_out v^T - delta),
//   ds = sum over taps t of shift_rows(dc, -t) @ T'[t]        the same banded product, row shifts the other way
//   dq = scale ds k, and by sums over rows: d weight[cq-1-t, b] = sum of dc[i, j] s[i-t, j-pad+b]
// c's columns end LEFT columns before the scores' and ds's LAG before: the last 16 columns of s and dc stay for the next
// tile. docs/design/hopper-backward.md derives it.
//
// The kernel is persistent, one block an SM. A block computes row blocks, and blocks of products for dk or dv
// (backward_products.cuh), one after the other. A producer thread takes the next one and starts its copies while the last one
// ends. The two consumer warp groups compute c and dc of 128 consecutive rows, and ds of the 128 rows that begin HALO earlier.
// The second gets its halo rows from the first. The first HALO rows of c, and 2 HALO of ds, are incomplete: BLOCK_ROWS are left.
// Constants as in forward.cu; HEAD_DIM up to 128.
#include <backward_consumer.cuh>
#include <backward_producer.cuh>

extern "C" __global__ void MAXIMUM_THREADS(128 * (WARPGROUPS + 1)) hopper_backward(
    const __grid_constant__ TensorMap query_map, const __grid_constant__ TensorMap key_map,
    const __grid_constant__ TensorMap value_map, const __grid_constant__ TensorMap grad_map,
    const __grid_constant__ TensorMap scratch_map,
    const __grid_constant__ Arguments args) {
    const int warpgroup = __shfl_sync(~0u, (int)threadIdx.x / 128, 0);  // uniform, so that addresses stay scalar
    const int thread = threadIdx.x % 128;
    const Block block(shared_memory());
    if (threadIdx.x == 0) {
        block.init_barriers();
        barrier_init_done();
    }
    wait_for_launch_before();
    let_next_start();
    __syncthreads();

    if (warpgroup == WARPGROUPS) {
        deallocate_registers<40>();
        if (thread == 0) copy_work(args, block, {&query_map, &key_map, &value_map, &grad_map, &scratch_map});
        if (thread == 32) report_work(args, block);
        if (thread / 32 >= 2) clear_work(args, block, thread - 64);
    } else {
        allocate_registers<232>();
#pragma unroll 1
        for (PipelineState state; true; state.number++) {
            barrier_wait(state.full(block), state.phase());
            const auto uniform = [](int value) { return __shfl_sync(~0u, value, 0); };
            const BlockWork read = state.read(block, args.chunks);
            const WorkTile tile = {uniform(read.stage), uniform(read.chunk), uniform(read.part), uniform(read.of_rows) != 0};
            const BlockWork work(tile, uniform(read.iteration), read.odd_rows);
            if (!work.exists()) break;
            if (work.of_rows) consume(args, block, work, warpgroup, thread);
            else add_products(args, block, work, warpgroup, thread);
            fence_async_proxy_everywhere();  // the copy engine will read what is stored
            barrier_arrive(state.stored(block));
        }
    }
}
