// Conv attention forward on Hopper for head dims up to 64: forward.cu with two rows of c a product.
//
// Rows 2p and 2p + 1 of c, side by side, are sums over u = -1 .. cq - 1 of row 2p - u of the scores times [T[u] | T[u + 1]],
// 16 x 64, with zeros for T[-1] and T[cq]. So a warpgroup has 64 pairs of rows, A is the even rows or the odd rows of the
// scores, and cq + 1 products of 64 x 64 x 16 do what 2 cq products of 64 x 32 x 16 do in forward.cu; two of them, u = 0 and
// u = -1, have A in registers. The T of all taps lie one after another, so that two side by side are a start address. A tile is
// 128 rows by 32 keys, two to a stage of 64 keys. The rest, and the constants, are as in forward.cu.
#include <tiles.cuh>

constexpr int PAIRS = ROWS, TILE_ROWS = 2 * PAIRS, TILE_KEYS = 32, PARTS = KEYS / TILE_KEYS;
constexpr int OUT_ROWS = TILE_ROWS - HALO, BLOCK_ROWS = OUT_ROWS * WARPGROUPS;
constexpr int VALUE_SLABS = (VALUE_DIM + 63) / 64;
constexpr float LARGEST_SUM = 4096;  // of a thread's 8 numbers of a row: see the softmax
static_assert(WARPGROUPS == 2 && HEAD_DIM <= 64 && VALUE_DIM == HEAD_DIM, "accumulators must fit the registers");
constexpr int SLOTS = PERSISTENT ? 2 : 1;  // works in a block at a time: the one at hand and the next
constexpr int FETCHERS = 96;               // threads that fetch queries: three warps of the producer
constexpr int TAKE_AHEAD = 4;              // tiles before its end at which a block takes its next work

// Shared memory, in bytes from its start.
constexpr int PITCH = (8 + PAIRS) * 16;  // 8 columns of even or of odd rows: 16 bytes a row, under eight rows of zeros
constexpr int QUERIES = 0;
constexpr int KEYS_AT = QUERIES + WARPGROUPS * 2 * SLABS * SLAB;
constexpr int VALUES = KEYS_AT + STAGES * SLABS * SLAB;
constexpr int SCORES = VALUES + STAGES * VALUE_SLABS * SLAB;
constexpr int SCORE_TILE = 2 * TILE_KEYS / 8 * PITCH;
constexpr int TAPS = SCORES + 2 * WARPGROUPS * SCORE_TILE;
constexpr int HALF_TAP = TAP / 2;                      // eight of the 16 rows of T, 32 columns
constexpr int HALF_TAPS = (QUERY_TAPS + 2) * HALF_TAP;  // those of all taps, between zeros
constexpr int BARRIERS = TAPS + SLOTS * 2 * HALF_TAPS;
constexpr int WORKS = BARRIERS + (4 * STAGES + 10) * 8;  // two slots: a work's number, and what c is times
constexpr int LARGEST = WORKS + 2 * 8;                   // a float a fetching warp
static_assert(LARGEST + FETCHERS / 32 * 4 <= 227 * 1024, "shared memory of a block");

struct True {
    static constexpr bool value = true;
};
struct False {
    static constexpr bool value = false;
};

struct Arguments {
    Positions at;
    const uint16_t* taps;       // [Hq, QUERY_TAPS, 512] fp16: T of each tap, laid out for wgmma; weights over a power of two
    const float* weight_scale;  // [Hq]: scale * log2(e) * that power
    const float* key_norms;     // [B * Hkv, NORM_PARTS]: maxima of squared norms of keys
    uint16_t* out;              // [B, Hq, M, HEAD_DIM]
    float* logsumexp;           // [B, Hq, M], natural units
    int* taken;                 // works that blocks took after their first
    int row_blocks, works, blocks;
    int heads_in_turn;  // whose works go out together, the longest first
};

// A block's rows of a head, and the tiles of keys that they see. The last block ends with the last row, so that what is left
// over is in the first, which sees the fewest keys: its rows may begin before row 0.
struct Work {
    int part, batch_head, head, batch, kv_head;
    int first_row, end_row, first_tile, end_tile;

    DEVICE Work(const Arguments& args, int number) {
        const int first_head = number / (args.row_blocks * args.heads_in_turn) * args.heads_in_turn;
        const int heads_now = min(args.heads_in_turn, args.works / args.row_blocks - first_head);
        number -= first_head * args.row_blocks;
        const int of_head = first_head + number % heads_now;
        part = of_head % VALUE_PARTS, batch_head = of_head / VALUE_PARTS;
        head = batch_head % args.at.heads, batch = batch_head / args.at.heads, kv_head = head / args.at.group;
        end_row = args.at.query_rows - number / heads_now * BLOCK_ROWS;
        first_row = end_row - BLOCK_ROWS;
        first_tile = keys_begin(args.at, first_row) / KEYS;
        end_tile = max((keys_end(args.at, end_row - 1) + LEFT + KEYS - 1) / KEYS, first_tile + 1);
    }
};

extern "C" __global__ void MAXIMUM_THREADS(128 * (WARPGROUPS + 1)) hopper_forward(
    const __grid_constant__ TensorMap query_map, const __grid_constant__ TensorMap key_map,
    const __grid_constant__ TensorMap value_map, const __grid_constant__ Arguments args) {
    const int warpgroup = __shfl_sync(~0u, (int)threadIdx.x / 128, 0);  // uniform, so that addresses stay scalar
    const int thread = threadIdx.x % 128;
    const uint32_t shared = shared_memory();
    const uint32_t keys_full = shared + BARRIERS, values_full = keys_full + 8 * STAGES;
    const uint32_t keys_empty = values_full + 8 * STAGES, values_empty = keys_empty + 8 * STAGES;
    const uint32_t near_end = values_empty + 8 * STAGES;  // of a work: time to take the next
    const uint32_t announced = near_end + 8, rows_full = announced + 16, ready = rows_full + 16;  // a slot each
    const uint32_t work_empty = ready + 16, rows_empty = work_empty + 16;

    if (threadIdx.x == 0) {
        for (int stage = 0; stage < STAGES; stage++) {
            barrier_init(keys_full + 8 * stage, 1);
            barrier_init(values_full + 8 * stage, 1);
            barrier_init(keys_empty + 8 * stage, WARPGROUPS);
            barrier_init(values_empty + 8 * stage, WARPGROUPS);
        }
        barrier_init(near_end, 1);
        for (int slot = 0; slot < 2; slot++) {
            barrier_init(announced + 8 * slot, 1);
            barrier_init(rows_full + 8 * slot, 1);
            barrier_init(ready + 8 * slot, 1);
            barrier_init(work_empty + 8 * slot, WARPGROUPS);
        }
        barrier_init(rows_empty, WARPGROUPS);
        barrier_init_done();
    }
    for (int i = threadIdx.x; i < 2 * WARPGROUPS * 8 * 32; i += blockDim.x)  // the rows above
        store_shared(shared + SCORES + i / 32 * PITCH + i % 32 * 4, 0u);
    for (int i = threadIdx.x; i < SLOTS * 4 * HALF_TAP / 4; i += blockDim.x) {  // T[-1] and T[cq]
        const int which = i / (HALF_TAP / 4);
        store_shared(shared + TAPS + which / 2 * HALF_TAPS + which % 2 * (QUERY_TAPS + 1) * HALF_TAP + i % (HALF_TAP / 4) * 4, 0u);
    }
    fence_async_proxy();
    __syncthreads();

    if (warpgroup == WARPGROUPS) {
        give_registers<24>();  // what the consumers leave
        if (thread == 0) {
            int turn = 0;  // counts tiles, of all works
#pragma unroll 1
            for (int count = 0; PERSISTENT || count < 1; count++) {
                int number = blockIdx.x;
                if constexpr (PERSISTENT) {
                    barrier_wait(announced + count % 2 * 8, count / 2 & 1);
                    number = (int)load_shared(shared + WORKS + count % 2 * 8);
                    if (number < 0) break;
                }
                const Work work(args, number);
#pragma unroll 1
                for (int tile = work.first_tile; tile < work.end_tile; tile++, turn++) {
                    if (PERSISTENT && tile == max(work.end_tile - TAKE_AHEAD, work.first_tile)) barrier_arrive(near_end);
                    const int stage = turn % STAGES, parity = turn / STAGES & 1;
                    barrier_wait(keys_empty + 8 * stage, parity ^ 1);
                    barrier_expect(keys_full + 8 * stage, SLABS * SLAB);
                    for (int slab = 0; slab < SLABS; slab++)
                        copy_tile(shared + KEYS_AT + (stage * SLABS + slab) * SLAB, &key_map, keys_full + 8 * stage,
                                  slab * 64, tile * KEYS, work.kv_head, work.batch);
                    barrier_wait(values_empty + 8 * stage, parity ^ 1);
                    barrier_expect(values_full + 8 * stage, VALUE_SLABS * SLAB);
                    for (int slab = 0; slab < VALUE_SLABS; slab++)
                        copy_tile(shared + VALUES + (stage * VALUE_SLABS + slab) * SLAB, &value_map,
                                  values_full + 8 * stage, work.part * VALUE_DIM + slab * 64, tile * KEYS - LEFT,
                                  work.kv_head, work.batch);
                }
            }
        } else if (thread >= 32) {
            const int fetcher = thread - 32;
#pragma unroll 1
            for (int count = 0; PERSISTENT || count < 1; count++) {
                const int slot = count % SLOTS, use = count / SLOTS;
                int number = blockIdx.x;
                if constexpr (PERSISTENT) {
                    if (fetcher == 0) {
                        if (count > 0) {
                            barrier_wait_asleep(near_end, (count - 1) & 1);
                            number = args.blocks + take_next(args.taken);
                        }
                        barrier_wait(work_empty + 8 * slot, (use & 1) ^ 1);
                        store_shared(shared + WORKS + slot * 8, number < args.works ? (uint32_t)number : ~0u);
                        barrier_arrive(announced + 8 * slot);
                    }
                    part_barrier<FETCHERS>();  // where they sleep; in an mbarrier's wait they would take issue slots
                    number = (int)load_shared(shared + WORKS + slot * 8);
                    if (number < 0) {
                        if (fetcher == 0) barrier_arrive(ready + 8 * slot);
                        break;
                    }
                }
                const Work work(args, number);
                if (fetcher == 0) {
                    barrier_wait(rows_empty, (count & 1) ^ 1);
                    barrier_expect(rows_full + 8 * slot, WARPGROUPS * 2 * SLAB + QUERY_TAPS * TAP);
                    for (int w = 0; w < 2 * WARPGROUPS; w++)
                        copy_tile(shared + QUERIES + w * SLAB, &query_map, rows_full + 8 * slot, 0,
                                  work.first_row + w / 2 * OUT_ROWS - HALO + w % 2 * ROWS, work.head, work.batch);
                    for (int half = 0; half < 2 * QUERY_TAPS; half++)
                        copy_bytes(shared + TAPS + (2 * slot + half % 2) * HALF_TAPS + (half / 2 + 1) * HALF_TAP,
                                   args.taps + (work.head * 2 * QUERY_TAPS + half) * (HALF_TAP / 2), HALF_TAP,
                                   rows_full + 8 * slot);
                }
                barrier_wait(rows_full + 8 * slot, use & 1);
                const float factor = rescale_queries<WARPGROUPS * TILE_ROWS, FETCHERS>(
                    shared + QUERIES, shared + LARGEST,
                    args.key_norms + (work.batch * (args.at.heads / args.at.group) + work.kv_head) * NORM_PARTS, fetcher);
                if (fetcher == 0) {
                    store_shared(shared + WORKS + slot * 8 + 4, __float_as_uint(args.weight_scale[work.head] * factor));
                    barrier_arrive(ready + 8 * slot);
                }
            }
        }
    } else {
        take_registers<240>();
        const int lane = thread % 32, local_pair = thread / 32 * 16 + lane / 4, column = lane % 4 * 2;
        const uint32_t scores_at = shared + SCORES + 2 * warpgroup * SCORE_TILE;
        const uint32_t queries_at = shared + QUERIES + warpgroup * 2 * SLAB;
        const uint64_t first_keys = moved(operand(shared + KEYS_AT, 16, 1024, SWIZZLE_128), 0);
        const uint64_t first_values = moved(operand(shared + VALUES, SLAB, 1024, SWIZZLE_128), 0);
        const uint64_t score_tiles = moved(operand(scores_at, PITCH, 128, NO_SWIZZLE), 0);
        const uint64_t first_taps = operand(shared + TAPS, HALF_TAPS, 128, NO_SWIZZLE);
        // The pair whose row of an 8 x 8 matrix that this lane names when its warp stores or loads four: two of rows by two of columns.
        const int named_pair = thread / 32 * 16 + lane % 16;
        const uint64_t first_query = queries_at + named_pair * 256 + (lane / 16 ^ 2 * named_pair % 8) * 16;
        const uint32_t store_at = scores_at + (8 + named_pair) * 16 + lane / 16 * PITCH;

        if (warpgroup == 1) pass_turn(0);
        int first_turn = 0;  // tiles of the works before
#pragma unroll 1
        for (int count = 0; PERSISTENT || count < 1; count++) {
            const int slot = count % SLOTS;
            barrier_wait(ready + 8 * slot, count / SLOTS & 1);
            int number = blockIdx.x;
            if constexpr (PERSISTENT) {
                number = (int)load_shared(shared + WORKS + slot * 8);
                if (number < 0) break;
            }
            barrier_wait(rows_full + 8 * slot, count / SLOTS & 1);
            const float unit = __uint_as_float(load_shared(shared + WORKS + slot * 8 + 4));
            const Work work(args, number);
            const int first_tile = work.first_tile, end_tile = work.end_tile;
            const int tile_row = work.first_row + warpgroup * OUT_ROWS - HALO;  // the query of local row 0
            const int tile_position = tile_row + (args.at.key_rows - args.at.query_rows);
            // Keys between which no row of the warpgroup has anything masked, and the tiles with a key that one sees.
            const int seen_by_all = keys_begin(args.at, tile_row + TILE_ROWS - 1), end_seen_by_all = keys_end(args.at, tile_row);
            const int tiles = min(max((keys_end(args.at, tile_row + TILE_ROWS - 1) + LEFT + KEYS - 1) / KEYS, first_tile + 1), end_tile);
            const auto row_of = [&](int x, int h) { return 2 * (local_pair + 8 * h) + x; };  // of four that a thread has
            const uint64_t toeplitz = moved(first_taps, slot * 2 * HALF_TAPS);

            // c's columns of this tile: those of even and of odd blocks of 16 scores apart, since windows that overlap in
            // one array would make the compiler run one product at a time.
            float even[32], odd[32], scores[2][16], accumulator[2][VALUE_DIM / 2];
            float reference[4] = {-1e30f, -1e30f, -1e30f, -1e30f}, running_sum[4] = {0, 0, 0, 0};  // row 2 x + h
#pragma unroll
            for (int i = 0; i < 32; i++) even[i] = odd[i] = 0;
#pragma unroll
            for (int i = 0; i < VALUE_DIM / 2; i++) accumulator[0][i] = accumulator[1][i] = 0;

            uint32_t query[2][DEPTH_STEPS][4];
            const uint32_t query_at = (uint32_t)moved(first_query, 0);  // found anew, or eight addresses would stay in registers
#pragma unroll
            for (int x = 0; x < 2; x++)
#pragma unroll
                for (int step = 0; step < DEPTH_STEPS; step++)  // a row's number modulo 8 is in both parts, by the swizzle
                    load_matrices(query[x][step], query_at ^ (x * (128 + 16) | step * 32));
            warpgroup_barrier(warpgroup + 1);
            if (thread == 0) barrier_arrive(rows_empty);
            auto multiply_keys = [&](int stage, int part) {
                const uint64_t keys = first_keys + bytes_on(stage * SLAB + part * TILE_KEYS * 128);
                products_begin();
#pragma unroll
                for (int x = 0; x < 2; x++)
#pragma unroll
                    for (int step = 0; step < DEPTH_STEPS; step++)
                        Product<16, ELEMENT>::run_fragments(scores[x], query[x][step], keys + bytes_on(step * 32), step > 0);
                products_commit();
            };
            uint32_t probabilities[2][8];
            float sums[4];
            auto exponentiate = [&] {
#pragma unroll
                for (int x = 0; x < 2; x++)
#pragma unroll
                    for (int h = 0; h < 2; h++) {
                        float sum[2] = {0, 0};
#pragma unroll
                        for (int b = 0; b < 4; b++) {
                            const int i = 16 * x + 4 * b + 2 * h;
                            const float first = exp2_fast(fmaf(even[i], unit, -reference[2 * x + h]));
                            const float second = exp2_fast(fmaf(even[i + 1], unit, -reference[2 * x + h]));
                            sum[b % 2] += first + second;
                            probabilities[x][2 * b + h] = pack<ELEMENT>(first, second);
                        }
                        sums[2 * x + h] = sum[0] + sum[1];
                    }
            };

            auto multiply_values = [&](int turn, int part) {
                const int stage = turn % STAGES;
                barrier_wait(values_full + 8 * stage, turn / STAGES & 1);
                products_begin();
#pragma unroll
                for (int x = 0; x < 2; x++)
#pragma unroll
                    for (int step = 0; step < TILE_KEYS / 16; step++)
                        Product<VALUE_DIM / 2, ELEMENT>::run_registers(
                            accumulator[x], probabilities[x] + 4 * step,
                            first_values + bytes_on(stage * SLAB + part * TILE_KEYS * 128) + bytes_on(step * 16 * 128));
                products_commit();
            };
            auto give_values_back = [&](int turn) {
                if (thread == 0) barrier_arrive(values_empty + 8 * (turn % STAGES));
            };
            const int numbers = (tiles - first_tile) * PARTS;
            // Tile `number` of the work, of 32 keys, is part `number % 2` of what a stage holds.
            auto process_tile = [&](int number, auto is_first) {
                constexpr bool VALUES_WAIT = !decltype(is_first)::value;  // those of the tile before
                const int turn = first_turn + number / PARTS, part = number % PARTS;
                const int last_turn = first_turn + (number - 1) / PARTS;
                const int first_key = first_tile * KEYS + number * TILE_KEYS;
                const int buffer = part * SCORE_TILE;  // two in turn: a warp may be a tile ahead of another
                if (part == PARTS - 1 && thread == 0) barrier_arrive(keys_empty + 8 * (turn % STAGES));
                if constexpr (VALUES_WAIT) multiply_values(last_turn, 1 - part);

                // Scores of the future are zeros to the convolution.
                if (CAUSAL && first_key + TILE_KEYS - 1 > tile_position) {
#pragma unroll
                    for (int i = 0; i < 32; i++) {
                        const int key = first_key + i % 16 / 4 * 8 + column + i % 2;
                        if (key > tile_position + row_of(i / 16, i / 2 % 2)) scores[i / 16][i % 16] = 0;
                    }
                }
                // They are A of the convolution: from registers for the rows as they are, and through shared memory for shifted
                // ones, where a shift is a start address 16 bytes lower a pair of rows.
                uint32_t own[2][2][4];
#pragma unroll
                for (int i = 0; i < 32; i += 2)
                    own[i / 16][i / 8 % 2][i / 2 % 4] = pack<Half>(scores[i / 16][i % 16], scores[i / 16][i % 16 + 1]);
                products_begin();
#pragma unroll
                for (int x = 0; x < 2; x++) {
                    Product<32, Half>::run_fragments(even, own[x][0], toeplitz + bytes_on((1 - x) * HALF_TAP), true);
                    Product<32, Half>::run_fragments(odd, own[x][1], toeplitz + bytes_on((1 - x) * HALF_TAP), x > 0);
                }
                products_commit();
                if constexpr (QUERY_TAPS > 1) {
#pragma unroll
                    for (int x = 0; x < 2; x++)
#pragma unroll
                        for (int block = 0; block < 2; block++)
                            store_matrices(store_at + buffer + (x * 4 + block * 2) * PITCH, own[x][block]);
                    fence_async_proxy();
                    warpgroup_barrier(warpgroup + 1);
                }
                wait_for_turn(warpgroup);
                if constexpr (QUERY_TAPS > 1) {
                    products_begin();
#pragma unroll
                    for (int back = 1; back < QUERY_TAPS; back++)
#pragma unroll
                        for (int block = 0; block < 2; block++)
                            Product<32, Half>::run(block ? odd : even,
                                                   score_tiles + bytes_on(buffer) +
                                                       bytes_on((back % 2 * 4 + block * 2) * PITCH + (8 - (back + 1) / 2) * 16),
                                                   toeplitz + bytes_on((back + 1) * HALF_TAP), true);
                    products_commit();
                }
                products_wait<0>();
                if (VALUES_WAIT && part == 0) give_values_back(last_turn);
                const int next_turn = first_turn + (number + 1) / PARTS, next_stage = next_turn % STAGES;
                if (part == PARTS - 1 && number + 1 < numbers) barrier_wait(keys_full + 8 * next_stage, next_turn / STAGES & 1);
                multiply_keys(next_stage, 1 - part);  // the next scores, while this tile's softmax runs; after the last nobody looks
                pass_turn(1 - warpgroup);

#pragma unroll
                for (int i = 0; i < 8; i++) even[8 + i] += odd[i], even[24 + i] += odd[16 + i];
                if (first_key - LEFT < seen_by_all || first_key + TILE_KEYS - LEFT > end_seen_by_all) {
#pragma unroll
                    for (int x = 0; x < 2; x++)
#pragma unroll
                        for (int h = 0; h < 2; h++) {
                            const int begin = keys_begin(args.at, tile_row + row_of(x, h));
                            const int end = keys_end(args.at, tile_row + row_of(x, h));
#pragma unroll
                            for (int i = 0; i < 8; i++) {
                                const int key = first_key - LEFT + i / 2 * 8 + column + i % 2;
                                if (key < begin || key >= end) even[16 * x + i / 2 * 4 + 2 * h + i % 2] = MINUS_INFINITY;
                            }
                        }
                }

                // Online softmax in units of log 2, with a reference that moves when a thread's numbers of a row add up to more than
                // LARGEST_SUM, as in forward.cu.
                exponentiate();
                if (__any_sync(~0u, !(fmaxf(fmaxf(sums[0], sums[1]), fmaxf(sums[2], sums[3])) <= LARGEST_SUM))) {
                    float rescale[4];
#pragma unroll
                    for (int r = 0; r < 4; r++) {
                        int moves = !(sums[r] <= LARGEST_SUM);  // of a row alone, so that no row depends on another
                        float largest = MINUS_INFINITY;
#pragma unroll
                        for (int b = 0; b < 4; b++) {
                            const int i = r / 2 * 16 + 4 * b + r % 2 * 2;
                            largest = fmaxf(largest, fmaxf(even[i], even[i + 1]));
                        }
#pragma unroll
                        for (int lane = 1; lane < 4; lane *= 2) {
                            moves |= __shfl_xor_sync(~0u, moves, lane);
                            largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, lane));
                        }
                        largest = moves ? fmaxf(largest * unit, -1e20f) : reference[r];
                        rescale[r] = exp2_fast(reference[r] - largest);
                        reference[r] = largest;
                        running_sum[r] *= rescale[r];
                    }
#pragma unroll
                    for (int i = 0; i < VALUE_DIM; i++)
                        accumulator[i / (VALUE_DIM / 2)][i % (VALUE_DIM / 2)] *= rescale[i / (VALUE_DIM / 2) * 2 + i / 2 % 2];
                    exponentiate();
                }
#pragma unroll
                for (int r = 0; r < 4; r++) running_sum[r] += sums[r];
#pragma unroll
                for (int i = 0; i < 32; i++) even[i] = i / 8 % 2 ? 0 : odd[i + 8];  // carried on
                products_wait<0>();
            };

            barrier_wait(keys_full + 8 * (first_turn % STAGES), first_turn / STAGES & 1);
            multiply_keys(first_turn % STAGES, 0);
            products_wait<0>();
            process_tile(0, True{});
            for (int number = 1; number < numbers; number++) process_tile(number, False{});
            const int last = first_turn + tiles - 1 - first_tile;
            multiply_values(last, PARTS - 1);
            products_wait<0>();
            give_values_back(last);
            for (int tile = tiles; tile < end_tile; tile++) {  // tiles for the warpgroups after this one
                const int turn = first_turn + tile - first_tile, stage = turn % STAGES, parity = turn / STAGES & 1;
                barrier_wait(keys_full + 8 * stage, parity);
                barrier_wait(values_full + 8 * stage, parity);
                warpgroup_barrier(warpgroup + 1);  // no thread waits any more for what is given back
                if (thread == 0) barrier_arrive(keys_empty + 8 * stage), barrier_arrive(values_empty + 8 * stage);
                for (int part = 0; part < PARTS; part++) wait_for_turn(warpgroup), pass_turn(1 - warpgroup);
            }

#pragma unroll
            for (int r = 0; r < 4; r++) {
                const int x = r / 2, h = r % 2, row = tile_row + row_of(x, h);
                float sum = running_sum[r];
                sum += __shfl_xor_sync(~0u, sum, 1);
                sum += __shfl_xor_sync(~0u, sum, 2);
                if (row_of(x, h) < HALO || row < 0) continue;
                const int64_t of_row = (int64_t)work.batch_head * args.at.query_rows + row;
                const float inverse = 1 / sum;
                uint32_t* out = (uint32_t*)(args.out + of_row * HEAD_DIM + column);
#pragma unroll
                for (int b = 0; b < VALUE_DIM / 8; b++)
                    out[4 * b] =
                        pack<ELEMENT>(accumulator[x][4 * b + 2 * h] * inverse, accumulator[x][4 * b + 2 * h + 1] * inverse);
                if (column == 0) args.logsumexp[of_row] = (reference[r] + log2f(sum)) * LN_2;
            }
            if constexpr (PERSISTENT) {
                warpgroup_barrier(warpgroup + 1);  // all have read the slot, and no product reads its T
                if (thread == 0) barrier_arrive(work_empty + 8 * slot);
                first_turn += end_tile - first_tile;
            }
        }
    }
}
