// Conv attention forward on Hopper: the convolution as banded products on the tensor cores.
//
//   c = sum over taps t of shift_rows(s, t) @ T[t]      s: scores, T[t]: banded Toeplitz, 16 x 32
//
// One m64n32k16 wgmma a tap and 16 columns of scores. 64 columns of scores finish the 64 columns of c that begin LEFT columns
// earlier; 16 partial columns are carried to the next tile. See docs/design/hopper-forward.md.
//
// A block is WARPGROUPS consumer warp groups of 64 rows each and a producer warp group. The first HALO rows of a consumer only
// feed the convolution, unless SHARED_HALO. Blocks are persistent.
// Constants come from the compiler's command line (forward.py):
//   ELEMENT  Half or Bfloat16: q, k, v, out        HEAD_DIM   a multiple of 8
//   VALUE_DIM  columns of v a block computes, a multiple of 8 up to 128; VALUE_PARTS blocks make up a row of out
//   QUERY_TAPS 1 to 8, KEY_TAPS 1 to 17, PAD key padding to the left
//   CAUSAL, SPANS  0 or 1                          WARPGROUPS, STAGES
// Scores are rounded to fp16. A row that sees one beyond 65504 becomes NaN and is recomputed in float32 (exact_row).
// By hand, for registers and spills (wgmma.cuh is what source.py's `wgmma_header` returns):
//   nvcc -gencode=arch=compute_90a,code=sm_90a -O3 --std=c++17 -I. -I../../nvrtc -DELEMENT=Bfloat16 ... -cubin
#include <forward_consumer.cuh>
#include <forward_producer.cuh>

constexpr int QUERY_LOADER = 32;  // the thread of the producer warp group that copies queries

extern "C" __global__ void MAXIMUM_THREADS(128 * (WARPGROUPS + 1)) hopper_forward(
    const __grid_constant__ TensorMap query_map, const __grid_constant__ TensorMap key_map,
    const __grid_constant__ TensorMap value_map, const __grid_constant__ Arguments args) {
    const int warpgroup = __shfl_sync(~0u, (int)threadIdx.x / 128, 0);  // uniform, so that addresses stay scalar
    const int thread = threadIdx.x % 128;
    const Block block(shared_memory());

    if (threadIdx.x == 0) block.init_barriers();
    block.clear_rows_above();
    __syncthreads();

    if (warpgroup == WARPGROUPS) {
        deallocate_registers<PRODUCER_REGISTERS>();
        if (thread == 0)
            copy_keys_and_values(args, block, &key_map, &value_map);
        else if (thread == QUERY_LOADER)
            schedule_and_copy_queries(args, block, &query_map);
    } else {
        allocate_registers<CONSUMER_REGISTERS>();
        consume(args, block, warpgroup, thread);
    }
}
