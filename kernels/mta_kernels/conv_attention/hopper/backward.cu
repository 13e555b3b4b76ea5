// Conv attention backward on Hopper: over rows dq, the weight's gradient, and p and ds; of those, dk and dv.
//
// It streams over keys as the forward does and recomputes scores and probabilities:
//   c = convolution of s, p = exp2(c - logsumexp), dc = p (grad_out v^T - delta),
//   ds = sum over taps t of shift_rows(dc, -t) @ T'[t]        the same banded product, row shifts the other way
//   dq = scale ds k, and by sums over rows: d weight[cq-1-t, b] = sum of dc[i, j] s[i-t, j-pad+b]
// c's columns end LEFT columns before the scores' and ds's LAG before: the last 16 columns of s and dc stay for the next
// tile. README.md derives it.
//
// A block computes a row block, or a block of products for dk or dv (backward_products.cuh). Its two consumer warp groups
// compute c and dc of 128 consecutive rows, and ds of the 128 rows that begin HALO earlier. The second takes its halo rows from
// the first. BLOCK_ROWS rows are complete: the first HALO rows of c are not, nor twice as many of ds.
// Constants as in forward.cu; HEAD_DIM up to 128.
#include <backward_consumer.cuh>
#include <backward_dependencies.cuh>
#include <backward_producer.cuh>

// T and T' of a head to shared memory, and zeros where scores and dc will be.
DEVICE void fill_shared(const Arguments& args, uint32_t shared, int head) {
    const int tap_words = QUERY_TAPS * TAP / 4;
    for (int i = threadIdx.x; i < tap_words; i += blockDim.x) {
        store_shared(shared + TAPS + 4 * i, ((const uint32_t*)args.taps)[head * tap_words + i]);
        store_shared(shared + TAPS_BACK + 4 * i, ((const uint32_t*)args.taps_back)[head * tap_words + i]);
    }
    for (int i = threadIdx.x; i < (SCORES_DOWN - SCORES) / 4; i += blockDim.x) store_shared(shared + SCORES + 4 * i, 0u);
    fence_async_proxy();
}

extern "C" __global__ void MAXIMUM_THREADS(128 * (WARPGROUPS + 1)) hopper_backward(
    const __grid_constant__ TensorMap query_map, const __grid_constant__ TensorMap key_map,
    const __grid_constant__ TensorMap value_map, const __grid_constant__ TensorMap grad_map,
    const __grid_constant__ TensorMap scratch_map,
    const __grid_constant__ Arguments args) {
    const int warpgroup = __shfl_sync(~0u, (int)threadIdx.x / 128, 0);  // uniform, so that addresses stay scalar
    const int thread = threadIdx.x % 128;
    const uint32_t shared = shared_memory();
    const Block block(shared);

    wait_for_launch_before();
    let_next_start();
    if (threadIdx.x == 0) store_shared(shared + WORK, (uint32_t)fetch_next(args.chunks.tile_counter));
    __syncthreads();
    const auto products = [&](int chunk) { return products_of(args, chunk); };
    const WorkTile work = work_at(args.chunks, __shfl_sync(~0u, (int)load_shared(shared + WORK), 0), products);
    RowBlock rows;
    rows.batch_head = work.stage % args.chunks.batch_heads, rows.slot = work.stage % args.chunks.slots;
    rows.head = rows.batch_head % args.at.heads, rows.batch = rows.batch_head / args.at.heads;
    rows.kv_head = rows.head / args.at.group;
    rows.first_row_block = work.chunk * args.chunks.row_blocks;
    if (threadIdx.x == 0) {
        store_shared(shared + WORK + 4, (uint32_t)work.stage);
        store_shared(shared + WORK + 8, (uint32_t)(rows.first_row_block + work.part));
        if (work.of_rows) {
            wait_for_scratch(args.chunks, work, products);
            block.init_barriers();
        } else {
            wait_for_rows(args.chunks, work, products);
            Pipeline<PRODUCT_STAGES>(shared + BARRIERS).init(WARPGROUPS);
        }
        barrier_init_done();
    }
    if (!work.of_rows) {
        __syncthreads();
        compute_products(args, work, rows, shared, &scratch_map, &query_map, &grad_map, warpgroup, thread);
        return;
    }
    const int row_block = rows.first_row_block + work.part;
    rows.first_row = row_block * BLOCK_ROWS;
    rows.end_row = min(rows.first_row + BLOCK_ROWS, args.at.query_rows);
    rows.first_tile = keys_begin(args.at, rows.first_row) / KEYS;
    rows.end_tile = max((keys_end(args.at, rows.end_row - 1) + KEYS_AFTER + CARRIED + KEYS - 1) / KEYS, rows.first_tile + 1);
    fill_shared(args, shared, rows.head);
    __syncthreads();

    if (warpgroup == WARPGROUPS) {
        deallocate_registers<24>();
        if (thread == 0) copy_rows_and_keys(block, rows, {&query_map, &key_map, &value_map, &grad_map});
    } else {
        allocate_registers<240>();
        consume(args, block, rows, warpgroup, thread);
    }
}
