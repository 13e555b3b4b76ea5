// Exponentials of mixed logits, from queries and keys, for heads mixed without convolutions; bfloat16, Hopper.
//
//   logits[h] = sum over g of pre[h, g] scale q[g] k[g]^T,   kept[h] = exp(logits[h] - reference),   scales[h] = 1 / sum
//
// Scores are rounded, in powers of two: the difference of logits and their reference is exact, however large they are.
// bfloat16 has the range of float32, so exponentials over any reference fit. A row's reference is the greatest logit of its
// first 32 keys, and rises only if sums grow beyond 1e18.
//
// A block has a tile of 64 query rows of all heads, with the queries in the registers of two warp groups. It steps over the
// keys 32 at a time. Roles, each at its own pace:
//   a copying thread   queries and keys of a head to the stage of the head
//   two warp groups    scores of their heads, rounded into planes in shared memory: two buffers
//   four warps         16 rows each: mixed, exponentials, straight to memory
// Warp w of each warp group and one mixing warp share rows 16 w to 16 w + 15: only these wait for each other.
//
// A step, 32768 scores, takes of an SM: 3700 cycles of memory (at 4.1 TB/s); 2048 of the units for powers of two; 1024 of
// the tensor cores for scores and about 500 for mixing; of shared memory 512 for keys, 1024 for planes; 1900 instructions
// of each quarter. If the queries do not fit the registers, two blocks share a tile: each multiplies half of the heads
// for all rows, and mixes half of the rows. There L2 bounds the kernel, so a cluster has two tiles whose blocks multicast
// the keys: every key comes from L2 once for 128 rows.
#include <logits_mix.cuh>
#include <logits_scores.cuh>

extern "C" __global__ void IN_CLUSTERS MAXIMUM_THREADS(THREADS)
    mix_logits(const __grid_constant__ TensorMap query_map, const __grid_constant__ TensorMap key_map,
               const __grid_constant__ Arguments args) {
    const int warp = __shfl_sync(~0u, (int)threadIdx.x / 32, 0);  // uniform, so that addresses stay scalar
    const Block block;
    block.prepare();
    if (warp < 4 * SCORE_GROUPS) {
        allocate_registers<SCORE_REGISTERS>();
        make_scores(args, block, warp / 4, threadIdx.x % 128);
    } else if (warp < COPY_WARP) {
        deallocate_registers<MIX_REGISTERS>();
        mix_scores(args, block, warp - 4 * SCORE_GROUPS, threadIdx.x % 32);
    } else {
        deallocate_registers<COPY_REGISTERS>();
        if (threadIdx.x == 32 * COPY_WARP) copy_queries_and_keys(args, block, &query_map, &key_map);
    }
#if CLUSTER > 1
    __syncwarp();
    cluster_barrier();  // a block must not end before others have stored into it
#endif
}

// A thread has a row and head: the scale and the logsumexp over all pieces. Where a piece raised its reference, it
// scales the others to the greatest.
extern "C" __global__ void finish_logits(const __grid_constant__ Arguments args) {
    const int64_t all = (int64_t)args.batch * HEADS * args.rows;
    const int64_t number = (int64_t)blockIdx.x * FINISH_THREADS + threadIdx.x, index = min(number, all - 1);
    const int row = (int)(index % args.rows), tile = row / CLUSTER_ROWS;
    const int sequence = (int)(index / args.rows / HEADS), head = (int)(index / args.rows % HEADS);
    int unit = args.units / args.batch * sequence;
    for (int i = 0; i < tile; i++) unit += blocks_of(args, i);
    const int end = unit + blocks_of(args, tile);
    const int worker = worker_of(args, unit), parts = worker_of(args, end - 1) - worker + 1;
    float greatest = NOTHING, sum = 0;
#pragma unroll 1
    for (int part = 0; part < parts; part++) greatest = fmaxf(greatest, args.parts[part * all + index].x);
#pragma unroll 1
    for (int part = 0; part < args.most_parts; part++) {
        const bool any = part < parts && number < all;
        const float2 one = any ? args.parts[part * all + index] : float2{greatest, 0};
        const float factor = exp2_fast(one.x - greatest);
        sum += one.y * factor;
        if (!__any_sync(~0u, one.x != greatest)) continue;
        const int first = any ? max(first_unit(args, worker + part), unit) - unit : 0;
        const int stop = any ? min(first_unit(args, worker + part + 1), end) - unit : 0;
#pragma unroll 1
        for (int lane = 0; lane < 32; lane++) {  // all lanes help with each lane's row
            if (!__shfl_sync(~0u, (int)(one.x != greatest), lane)) continue;
            const int low = __shfl_sync(~0u, (int)(uint32_t)index, lane), high = __shfl_sync(~0u, (int)(index >> 32), lane);
            const float its = __shfl_sync(~0u, factor, lane);
            uint16_t* at = args.kept + ((int64_t)high << 32 | (uint32_t)low) * args.pitch;
            const int to = __shfl_sync(~0u, stop, lane) * BLOCK_KEYS;
            for (int key = __shfl_sync(~0u, first, lane) * BLOCK_KEYS + (int)threadIdx.x % 32 * 8; key < to; key += 256)
                MixWarp::scale_eight(at + key, its);
        }
    }
    if (number >= all) return;
    args.scales[index] = sum == 0 ? 0 : 1 / sum;
    args.logsumexp[sequence * args.sums_batch + head * args.sums_head + row * args.sums_row] =
        sum == 0 ? MINUS_INFINITY : (greatest + log2f(sum)) * LN_2;
}
