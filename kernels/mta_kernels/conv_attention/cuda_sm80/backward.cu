// Conv attention backward for every NVIDIA GPU from sm_80 on: row blocks store p and ds in scratch, products give dq, dk and dv.
//
// It streams over keys as the forward does and recomputes scores and probabilities:
//   c = convolution of s, p = exp2(c - logsumexp), dc = p (grad_out v^T - delta),
//   ds = sum over taps t of shift_rows(dc, -t) @ T'[t]        the same banded product, row shifts the other way
//   d weight[cq-1-t, b] = sum of dc[i, j] s[i-t, j-pad+b]
//   dq = scale ds k, dk = scale ds^T q, dv = p^T grad_out
// From dc of TILE_ROWS rows it computes ds of the rows that begin HALO earlier, so that all shifts are to rows above. BLOCK_ROWS
// rows are complete: the first HALO rows of c and the first 2 HALO rows of ds are not. The columns of c end LEFT columns before
// the columns of scores, and the columns of ds LAG before.
//
// A block computes a row block, or a block of products, in the order of backward_scheduler.cuh.
// Constants come from the compiler's command line (backward.py): the ones of forward.cu, and
//   COLUMN_GROUPS, warps that share 32 rows
#include "backward_layout.cuh"
#include "backward_products.cuh"
#include "backward_rows.cuh"

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) cuda_backward(const __grid_constant__ Arguments args) {
    const uint32_t shared = shared_memory();
    if (threadIdx.x == 0) {
        const WorkTile work = take_work(args.chunks, products_of(args));
        if (work.of_rows) wait_for_scratch(args.chunks, work, products_of(args));
        else wait_for_rows(args.chunks, work, products_of(args));
        store_shared(shared + WORK, uint4{(uint32_t)work.stage, (uint32_t)work.chunk, (uint32_t)work.part, work.of_rows});
    }
    __syncthreads();
    const uint4 found = load_shared_16(shared + WORK);
    const WorkTile work = {(int)found.x, (int)found.y, (int)found.z, found.w != 0};
    const ChunkOfHead of(args, work);
    if (work.of_rows) compute_rows(args, of, of.first_row_block + work.part, shared);
    else compute_products(args, work, of, shared);
}
