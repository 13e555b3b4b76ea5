// Conv attention forward on Hopper: the convolution as banded products on the tensor cores.
//
//   c = sum over taps t of shift_rows(s, t) @ T[t]      s: scores, T[t]: banded Toeplitz, 16 x 32
//
// 16 columns of scores touch at most 16 + 16 columns of c, so one `m64n32k16` product a tap and 16 columns does it, with
// the same T for every block of columns. c slides: 64 columns of scores finish the 64 columns of c that begin LEFT
// columns earlier, and 16 partial columns are carried on. README.md beside this file derives it, and says what was measured.
//
// A block of threads has a work, rows of a head; where PERSISTENT it stays on its multiprocessor and takes works until
// there are no more. WARPGROUPS consumers have 64 rows each, the first HALO of which only feed the convolution. One warp of
// the producer copies keys and values, the others fetch a work's queries and T.
// Constants come from the compiler's command line (forward.py):
//   ELEMENT  Half or Bfloat16: q, k, v, out        HEAD_DIM   a multiple of 8
//   VALUE_DIM  columns of v a block computes, a multiple of 8 up to 128; VALUE_PARTS blocks make up a row of out
//   QUERY_TAPS 1 to 8, KEY_TAPS 1 to 17, PAD key padding to the left
//   CAUSAL, SPANS, PERSISTENT  0 or 1              WARPGROUPS, STAGES
// By hand, for registers and spills (wgmma.cuh is what source.py's `wgmma_header` returns):
//   nvcc -gencode=arch=compute_90a,code=sm_90a -O3 --std=c++17 -I. -DELEMENT=Bfloat16 -DHEAD_DIM=64 ... -cubin
#include <tiles.cuh>

constexpr int OUT_ROWS = ROWS - HALO, BLOCK_ROWS = OUT_ROWS * WARPGROUPS;
constexpr int VALUE_SLABS = (VALUE_DIM + 63) / 64;
// With two consumers a thread has registers for its part of the queries, so that shared memory is read for the keys alone.
#ifndef QREG_
#define QREG_ (WARPGROUPS == 2 && HEAD_DIM <= 128)
#endif
constexpr bool QUERIES_IN_REGISTERS = QREG_;
// Two take turns at the convolution, so that one is in its softmax meanwhile, and multiply values a tile late, while the next
// scores are stored. Three have no registers for that, and find their own rhythm.
#ifndef TURNS_
#define TURNS_ (WARPGROUPS == 2)
#endif
#ifndef RESIDENT_
#define RESIDENT_ (HEAD_DIM <= 64 && WARPGROUPS == 2 ? PRODUCTS : 4)
#endif
constexpr bool TURNS = TURNS_;
#ifndef LAG_
#define LAG_ TURNS_
#endif
constexpr bool LAG = LAG_;  // values a tile late
#ifndef BURST_
#define BURST_ 0
#endif
#ifndef ORDER_  // 0: as BURST_; 2: conv, PV, QK issued together, no wait; 3: PV among the stores, then conv and QK together
#define ORDER_ 0
#endif
#ifndef LATE_  // transposed after the wait for PV
#define LATE_ 0
#endif
#ifndef DEEP_WAIT_
#define DEEP_WAIT_ 0
#endif
#ifndef VOTE1_
#define VOTE1_ 0
#endif
#ifndef PASS_  // ORDER_ 3: 0 turn passed after QK issued, 1 after conv issued
#define PASS_ 0
#endif
#ifdef STAMPS_
#define STAMP(i) do { uint32_t now_; asm volatile("mov.u32 %0, %%clock;" : "=r"(now_) :: "memory"); if (thread == 0 && blockIdx.x == 0 && count == 0 && tile < 64) ((volatile uint32_t*)args.logsumexp)[(warpgroup * 64 + tile) * 16 + (i)] = now_; } while (0)
constexpr bool STAMPED = true;
#else
#define STAMP(i) do {} while (0)
constexpr bool STAMPED = false;
#endif
constexpr float LARGEST_SUM = 4096;  // of a thread's 8 numbers of a row: see the softmax
// Products of the convolution, one a distance delta between rows of scores and of c, -HALO to 3.
constexpr int PRODUCTS = QUERY_TAPS + 3;
constexpr int RESIDENT = RESIDENT_ < PRODUCTS ? RESIDENT_ : PRODUCTS;  // of them, whose T stay in registers
static_assert(KEY_TAPS <= 16, "a pair of columns 16 apart has one tap of an output");
static_assert(VALUE_DIM % 8 == 0 && VALUE_DIM <= 128, "accumulators must fit the registers");
constexpr int SLOTS = PERSISTENT ? 2 : 1;  // works in a block at a time: the one at hand and the next
constexpr int FETCHERS = 96;               // threads that fetch queries: three warps of the producer
constexpr int TAKE_AHEAD = 4;              // tiles before its end at which a block takes its next work

// Shared memory, in bytes from its start.
// Scores are B: per class of rows (row % 4) four slabs of eight numbers, per slab 64 units of 16 bytes: a block of 16 columns
// and a row of the class each. A slab has four pairs of columns 16 apart.
constexpr int SCORE_SLAB = 64 * 16, SCORE_CLASS = 4 * SCORE_SLAB;
constexpr int BEFORE = 128;  // bytes before the scores, which products read for rows that nobody looks at: finite
constexpr int QUERIES = 0;
constexpr int KEYS_AT = QUERIES + WARPGROUPS * SLABS * SLAB;
constexpr int VALUES = KEYS_AT + STAGES * SLABS * SLAB;
constexpr int SCORES = VALUES + STAGES * VALUE_SLABS * SLAB;
constexpr int SCORE_TILE = BEFORE + 4 * SCORE_CLASS;
constexpr int SCORE_TILES = HEAD_DIM <= 128 ? 2 : 1;  // of a warpgroup: where two, a warp may be a tile ahead of another
constexpr int TAPS = SCORES + SCORE_TILES * WARPGROUPS * SCORE_TILE;
constexpr int BARRIERS = TAPS + SLOTS * QUERY_TAPS * FRAGMENT;
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

// The numbers of T in a row of A, two of four each: which of four, two bits a number. T has one of each pair of columns 16 apart,
// the one on the left or on the right. Of rows lane / 4 and 8 rows on, columns 0 to 15 for even lanes and 16 to 31 for odd
// ones (PTX ISA, metadata of m64n64k32).
DEVICE uint32_t sparsity_pattern(int lane) {
    uint32_t pattern = 0;
#pragma unroll
    for (int i = 0; i < 16; i++)  // row, four, pair
        pattern |= (uint32_t)(i % 2 * 2 + is_right(lane / 4 + i / 8 * 8, column_of_pair(i / 2 % 4, lane % 2, i % 2))) << 2 * i;
    return pattern;
}

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
    for (int i = threadIdx.x; i < SCORE_TILES * WARPGROUPS * (BEFORE / 4); i += blockDim.x)
        store_shared(shared + SCORES + i / (BEFORE / 4) * SCORE_TILE + i % (BEFORE / 4) * 4, 0u);
    fence_async_proxy();
    __syncthreads();

    if (warpgroup == WARPGROUPS) {
        give_registers<WARPGROUPS == 3 ? 32 : 24>();  // what the consumers leave
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
                    barrier_expect(rows_full + 8 * slot, WARPGROUPS * SLABS * SLAB + QUERY_TAPS * FRAGMENT);
                    for (int w = 0; w < WARPGROUPS; w++)
                        for (int slab = 0; slab < SLABS; slab++)
                            for (int rho = 0; rho < 4; rho++)
                                copy_tile(shared + QUERIES + (w * SLABS + slab) * SLAB + rho * (SLAB / 4), &query_map,
                                          rows_full + 8 * slot, slab * 64, work.first_row + w * OUT_ROWS - HALO + rho,
                                          work.head, work.batch);
                    copy_bytes(shared + TAPS + slot * (QUERY_TAPS * FRAGMENT), args.taps + work.head * (QUERY_TAPS * FRAGMENT / 2),
                               QUERY_TAPS * FRAGMENT, rows_full + 8 * slot);
                }
                barrier_wait(rows_full + 8 * slot, use & 1);
                const float factor = rescale_queries<WARPGROUPS * ROWS, FETCHERS>(
                    shared + QUERIES, shared + LARGEST,
                    args.key_norms + (work.batch * (args.at.heads / args.at.group) + work.kv_head) * NORM_PARTS, fetcher);
                if (fetcher == 0) {
                    store_shared(shared + WORKS + slot * 8 + 4, __float_as_uint(args.weight_scale[work.head] * factor));
                    barrier_arrive(ready + 8 * slot);
                }
            }
        }
    } else {
        take_registers<WARPGROUPS == 3 ? 160 : 240>();
        const int lane = thread % 32, warp = thread / 32, column = lane % 4 * 2;
        const uint32_t scores_at = shared + SCORES + SCORE_TILES * warpgroup * SCORE_TILE + BEFORE;
        const uint32_t queries_at = shared + QUERIES + warpgroup * SLABS * SLAB;
        const uint64_t queries = moved(operand(queries_at, 16, 1024, SWIZZLE_128), 0);
        const uint64_t first_keys = moved(operand(shared + KEYS_AT, 16, 1024, SWIZZLE_128), 0);
        const uint64_t first_values = moved(operand(shared + VALUES, SLAB, 1024, SWIZZLE_128), 0);
        const uint64_t score_tiles = moved(operand(scores_at, SCORE_SLAB, 128, NO_SWIZZLE), 0);
        const uint32_t pattern = sparsity_pattern(lane);
        // A row of four 8 x 8 matrices that this lane names: of the queries two of rows by two of columns, of scores one of each
        // slab. Row 16 w + G of queries, scores and accumulator, in fragments of warp w, is local row 4 G + w.
        const int named_row = warp * 16 + lane % 16;
        const uint32_t store_at = scores_at + warp * SCORE_CLASS + lane / 8 * SCORE_SLAB + lane % 8 * 16;

        if (TURNS && warpgroup == 1) pass_turn(0);
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
            const int seen_by_all = keys_begin(args.at, tile_row + ROWS - 1), end_seen_by_all = keys_end(args.at, tile_row);
            const int tiles = min(max((keys_end(args.at, tile_row + ROWS - 1) + LEFT + KEYS - 1) / KEYS, first_tile + 1), end_tile);
            // A thread's numbers of c are those of rows 4 (8 h + column + e) + warp, h and e 0 or 1, and columns lane / 4 + 8 i.
            auto row_of = [&](int h, int e) { return tile_row + 4 * (8 * h + column + e) + warp; };

            uint32_t taps[PRODUCTS][4];
            auto load_taps = [&](int product) {  // of row distance product - HALO
                const int tap = warp - product + HALO;
                const uint4 found = tap >= 0 && tap < QUERY_TAPS
                                        ? load_shared_16(shared + TAPS + (slot * QUERY_TAPS + tap) * FRAGMENT + lane * 16)
                                        : uint4{0, 0, 0, 0};
                taps[product][0] = found.x, taps[product][1] = found.y, taps[product][2] = found.z, taps[product][3] = found.w;
            };
#pragma unroll
            for (int product = 0; product < RESIDENT; product++) load_taps(product);

            float c[32], scores[32], accumulator[VALUE_DIM / 2];
            float reference[2][2] = {{-1e30f, -1e30f}, {-1e30f, -1e30f}}, running_sum[2][2] = {{0, 0}, {0, 0}};
            uint32_t carried[2][2] = {{0, 0}, {0, 0}};  // scores of the 16 columns before a tile
#pragma unroll
            for (int i = 0; i < VALUE_DIM / 2; i++) accumulator[i] = 0;

            uint32_t query[QUERIES_IN_REGISTERS ? DEPTH_STEPS : 1][4];
            if constexpr (QUERIES_IN_REGISTERS) {
#pragma unroll
                for (int step = 0; step < DEPTH_STEPS; step++)
                    load_matrices(query[step], queries_at + step / 4 * SLAB + named_row * 128 +
                                                   ((step % 4 * 2 + lane / 16) ^ named_row % 8) * 16);
                warpgroup_barrier(warpgroup + 1);
                if (thread == 0) barrier_arrive(rows_empty);
            }
            auto multiply_keys = [&](int stage, bool begin = true) {
                const uint64_t keys = first_keys + bytes_on(stage * SLABS * SLAB);
                if (begin) products_begin();
                if constexpr (QUERIES_IN_REGISTERS) {
#pragma unroll
                    for (int step = 0; step < DEPTH_STEPS; step++)
                        Product<32, ELEMENT>::run_fragments(scores, query[step],
                                                            keys + bytes_on(step / 4 * SLAB + step % 4 * 32), step > 0);
                } else {
                    multiply_rows(scores, queries, keys);
                }
                products_commit();
            };
            uint32_t probabilities[16], packed[LATE_ ? 16 : 1];
            auto exponentiate = [&](const float (&c)[32], int h, float (&sums)[2]) {
                float sum[2][2] = {{0, 0}, {0, 0}};
#pragma unroll
                for (int b = 0; b < 4; b++)
#pragma unroll
                    for (int i = 0; i < 2; i++) {
                        const int at = 8 * b + 4 * h + 2 * i;
                        const float first = exp2_fast(fmaf(c[at], unit, -reference[h][0]));
                        const float second = exp2_fast(fmaf(c[at + 1], unit, -reference[h][1]));
                        sum[i][0] += first, sum[i][1] += second;
                        const uint32_t pair = pack<ELEMENT>(first, second);
                        if constexpr (LATE_) packed[4 * b + h + 2 * i] = pair;
                        else probabilities[4 * b + h + 2 * i] = transposed(pair);
                    }
                sums[0] = sum[0][0] + sum[1][0], sums[1] = sum[0][1] + sum[1][1];
            };
            // Of two numbers, those of rows of c that this thread has, that of its row in the accumulator.
            auto of_own_row = [&](const float (&x)[2]) {
                const float even = __shfl_sync(~0u, x[0], lane / 8), odd = __shfl_sync(~0u, x[1], lane / 8);
                return lane / 4 % 2 ? odd : even;
            };

            auto value_step = [&](int turn, int step) {
                Product<VALUE_DIM / 2, ELEMENT>::run_registers(
                    accumulator, probabilities + 4 * step,
                    first_values + bytes_on(turn % STAGES * VALUE_SLABS * SLAB) + bytes_on(step * 16 * 128));
            };
            auto multiply_values = [&](int turn) {
                const int stage = turn % STAGES;
                barrier_wait(values_full + 8 * stage, turn / STAGES & 1);
                products_begin();
#pragma unroll
                for (int step = 0; step < 4; step++)
                    Product<VALUE_DIM / 2, ELEMENT>::run_registers(
                        accumulator, probabilities + 4 * step,
                        first_values + bytes_on(stage * VALUE_SLABS * SLAB) + bytes_on(step * 16 * 128));
                products_commit();
            };
            auto give_values_back = [&](int turn) {
                if (thread == 0) barrier_arrive(values_empty + 8 * (turn % STAGES));
            };
            auto store_scores = [&](int tile, int buffer, auto between) {
                const int first_key = tile * KEYS;
                // Scores of the future are zeros to the convolution.
                if (CAUSAL && first_key + KEYS - 1 > tile_position) {
#pragma unroll
                    for (int i = 0; i < 32; i++) {
                        const int key = first_key + i / 4 * 8 + column + i % 2;
                        if (key > tile_position + 4 * (lane / 4 + i / 2 % 2 * 8) + warp) scores[i] = 0;
                    }
                }
                // B of the convolution, in blocks of 32 columns, of which the next has the last 16 too: pairs 16 columns apart.
                if constexpr (SCORE_TILES == 1) warpgroup_barrier(warpgroup + 1);
                uint32_t pairs[2][2][4];  // of this block of columns and the one before, of two rows, a slab each
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    between(i);
                    const int block = i < 1 ? 1 : i < 2 ? 0 : i;  // the first block after the second, of which it has half
#pragma unroll
                    for (int h = 0; h < 2; h++) {
#pragma unroll
                        for (int slab = 0; slab < 4; slab++) {
                            const int at = 8 * block + slab / 2 * 4 + 2 * h + slab % 2;
                            uint32_t& pair = pairs[i == 1][h][slab];
                            if (block > 0) pair = pack<Half>(scores[at - 8], scores[at]);
                            else pair = slab % 2 ? halves<1, 0>(carried[h][slab / 2], pairs[0][h][slab])
                                                 : halves<0, 0>(carried[h][slab / 2], pairs[0][h][slab]);
                        }
                        store_matrices(store_at + buffer + (block * 16 + h * 8) * 16, pairs[i == 1][h]);
                    }
                }
#pragma unroll
                for (int i = 0; i < 4; i++) carried[i / 2][i % 2] = halves<1, 1>(pairs[0][i / 2][i % 2 * 2], pairs[0][i / 2][i % 2 * 2 + 1]);
            };
            auto convolve = [&](float (&c)[32], int buffer) {
                products_begin();
#pragma unroll
                for (int product = 0; product < PRODUCTS; product++) {
                    const int distance = product - HALO + 8;
                    Product<32, Half>::run_sparse(
                        c, taps[product], pattern,
                        score_tiles + bytes_on(buffer) + bytes_on(distance % 4 * SCORE_CLASS + (distance / 4 - 2) * 16), product > 0);
                }
                if constexpr (ORDER_ != 4) products_commit();
            };
            auto softmax = [&](float (&c)[32], int first_key) {
                if (first_key - LEFT < seen_by_all || first_key + KEYS - LEFT > end_seen_by_all) {
#pragma unroll
                    for (int h = 0; h < 2; h++)
#pragma unroll
                        for (int e = 0; e < 2; e++) {
                            const int begin = keys_begin(args.at, row_of(h, e)), end = keys_end(args.at, row_of(h, e));
#pragma unroll
                            for (int i = 0; i < 8; i++) {
                                const int key = first_key - LEFT + lane / 4 + i * 8;
                                if (key < begin || key >= end) c[i / 2 * 8 + h * 4 + i % 2 * 2 + e] = MINUS_INFINITY;
                            }
                        }
                }

                // Online softmax in units of log 2. Sum and accumulator of a row share a reference, so any will do that keeps
                // them in range: it moves to the maximum only when a thread's numbers add up to more than LARGEST_SUM, which the
                // first tile's do. Most tiles thus need no maximum, the longest chain of a softmax.
                float sums[2][2];
#pragma unroll
                for (int h = 0; h < 2; h++)
                    if (VOTE1_) exponentiate(c, h, sums[h]);
                const bool any = VOTE1_ && __any_sync(~0u, !(fmaxf(fmaxf(sums[0][0], sums[0][1]), fmaxf(sums[1][0], sums[1][1])) <= LARGEST_SUM));
                if (!VOTE1_ || any) {
#pragma unroll
                for (int h = 0; h < 2; h++) {
                    if (!VOTE1_) exponentiate(c, h, sums[h]);
                    if (__any_sync(~0u, !(fmaxf(sums[h][0], sums[h][1]) <= LARGEST_SUM))) {
                        float rescale[2];
#pragma unroll
                        for (int e = 0; e < 2; e++) {
                            int moves = !(sums[h][e] <= LARGEST_SUM);  // of a row alone, so that no row depends on another
                            float largest = MINUS_INFINITY;
#pragma unroll
                            for (int i = 0; i < 8; i++) largest = fmaxf(largest, c[i / 2 * 8 + h * 4 + i % 2 * 2 + e]);
#pragma unroll
                            for (int lanes = 4; lanes < 32; lanes *= 2) {
                                moves |= __shfl_xor_sync(~0u, moves, lanes);
                                largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, lanes));
                            }
                            largest = moves ? fmaxf(largest * unit, -1e20f) : reference[h][e];
                            rescale[e] = exp2_fast(reference[h][e] - largest);
                            reference[h][e] = largest;
                            running_sum[h][e] *= rescale[e];
                        }
                        const float factor = of_own_row(rescale);
                        if constexpr (ORDER_ == 2 && LATE_) products_wait<0>();
#pragma unroll
                        for (int i = 0; i < VALUE_DIM / 2; i++)
                            if (i / 2 % 2 == h) accumulator[i] *= factor;
                        exponentiate(c, h, sums[h]);
                    }
                }
                }
#pragma unroll
                for (int h = 0; h < 2; h++) running_sum[h][0] += sums[h][0], running_sum[h][1] += sums[h][1];
            };
            auto deep_tile = [&](int tile, float (&now)[32], float (&next)[32]) {
                const int turn = first_turn + tile - first_tile;
                STAMP(0);
                products_wait<DEEP_WAIT_>();  // c of this tile, scores of the next
                STAMP(1);
                if (tile + 1 < tiles && thread == 0) barrier_arrive(keys_empty + 8 * ((turn + 1) % STAGES));
                const int buffer = ((turn + 1) & 1) * SCORE_TILE;
                store_scores(tile + 1, buffer, [](int) {});
#pragma unroll
                for (int product = RESIDENT; product < PRODUCTS; product++) load_taps(product);
                STAMP(2);
                fence_async_proxy();
                STAMP(3);
                warpgroup_barrier(warpgroup + 1);
                if (tile + 2 < tiles) barrier_wait(keys_full + 8 * ((turn + 2) % STAGES), (turn + 2) / STAGES & 1);
                STAMP(4);
                convolve(next, buffer);
                STAMP(5);
                multiply_keys((turn + 2) % STAGES, false);
                STAMP(6);
                products_wait<1>();
                if (tile > first_tile && tile < tiles) give_values_back(turn - 1);
                STAMP(7);
                softmax(now, tile * KEYS);
                STAMP(8);
                multiply_values(min(turn, first_turn + tiles - 1 - first_tile));  // of a tile after the last all are zeros
                STAMP(9);
            };
            auto process_tile = [&](int tile, auto is_first) {
                constexpr bool VALUES_WAIT = LAG && !decltype(is_first)::value;  // those of the tile before
                const int turn = first_turn + tile - first_tile, stage = turn % STAGES;
                const int first_key = tile * KEYS;
                const int buffer = SCORE_TILES == 2 ? (turn & 1) * SCORE_TILE : 0;
                if (thread == 0) barrier_arrive(keys_empty + 8 * stage);
                STAMP(0);
                if constexpr (VALUES_WAIT && !BURST_ && ORDER_ == 0) multiply_values(turn - 1);
                if constexpr (VALUES_WAIT && ORDER_ == 3) {
                    barrier_wait(values_full + 8 * ((turn - 1) % STAGES), (turn - 1) / STAGES & 1);
                    products_begin();
                }

                store_scores(tile, buffer, [&](int i) {
                    if constexpr (VALUES_WAIT && ORDER_ == 3) value_step(turn - 1, i);
                });
                if constexpr (VALUES_WAIT && ORDER_ == 3) products_commit();
#pragma unroll
                for (int product = RESIDENT; product < PRODUCTS; product++) load_taps(product);
                STAMP(1);
                fence_async_proxy();
                STAMP(2);
                warpgroup_barrier(warpgroup + 1);
                STAMP(3);
                const int next_turn = turn + 1, next_stage = next_turn % STAGES;
                if constexpr (ORDER_ >= 2)
                    if (tile + 1 < tiles) barrier_wait(keys_full + 8 * next_stage, next_turn / STAGES & 1);
                if constexpr (TURNS) wait_for_turn(warpgroup);
                STAMP(4);
                convolve(c, buffer);
                STAMP(5);
                if constexpr (TURNS && PASS_) pass_turn(1 - warpgroup);
                if constexpr (ORDER_ >= 2) {
                    if constexpr (VALUES_WAIT && ORDER_ == 2) multiply_values(turn - 1);
                    STAMP(6);
                    multiply_keys(next_stage);
                    STAMP(7);
                    if constexpr (TURNS && !PASS_) pass_turn(1 - warpgroup);
                    if constexpr (ORDER_ == 2 && LATE_ && VALUES_WAIT) products_wait<2>();
                    else products_wait<1>();
                    STAMP(8);
                    if constexpr (VALUES_WAIT && !(ORDER_ == 2 && LATE_)) give_values_back(turn - 1);
                } else {
                    if constexpr (VALUES_WAIT && BURST_) {
                        multiply_values(turn - 1);
                        products_wait<1>();
                    } else {
                        products_wait<0>();
                        if constexpr (VALUES_WAIT) give_values_back(turn - 1);
                    }
                    STAMP(6);
                    if (tile + 1 < tiles) barrier_wait(keys_full + 8 * next_stage, next_turn / STAGES & 1);
                    multiply_keys(next_stage);  // the next scores, while this tile's softmax runs; after the last nobody looks
                    STAMP(7);
                    if constexpr (TURNS && !PASS_) pass_turn(1 - warpgroup);
                    if constexpr (VALUES_WAIT && BURST_) {
                        products_wait<1>();
                        give_values_back(turn - 1);
                    }
                    STAMP(8);
                }

                softmax(c, first_key);
                STAMP(9);
                if constexpr (LATE_) {
                    if constexpr (ORDER_ == 2 && VALUES_WAIT) {
                        products_wait<1>();
                        give_values_back(turn - 1);
                    }
#pragma unroll
                    for (int i = 0; i < 16; i++) probabilities[i] = transposed(packed[i]);
                }

                if constexpr (!LAG) multiply_values(turn);
                products_wait<0>();
                STAMP(10);
                if constexpr (!LAG) give_values_back(turn);
            };

            barrier_wait(keys_full + 8 * (first_turn % STAGES), first_turn / STAGES & 1);
            multiply_keys(first_turn % STAGES);
            products_wait<0>();
            if constexpr (ORDER_ == 4) {
                float other[32];
                if (thread == 0) barrier_arrive(keys_empty + 8 * (first_turn % STAGES));
                const int buffer = (first_turn & 1) * SCORE_TILE;
                store_scores(first_tile, buffer, [](int) {});
#pragma unroll
                for (int product = RESIDENT; product < PRODUCTS; product++) load_taps(product);
                fence_async_proxy();
                warpgroup_barrier(warpgroup + 1);
                if (first_tile + 1 < tiles) barrier_wait(keys_full + 8 * ((first_turn + 1) % STAGES), (first_turn + 1) / STAGES & 1);
                convolve(c, buffer);
                multiply_keys((first_turn + 1) % STAGES, false);
                products_wait<0>();
                int tile = first_tile;
#pragma unroll 1
                for (; tile < tiles; tile += 2) deep_tile(tile, c, other), deep_tile(tile + 1, other, c);
                products_wait<0>();
                give_values_back(first_turn + tiles - 1 - first_tile);
            } else if constexpr (LAG) {
                process_tile(first_tile, True{});
                for (int tile = first_tile + 1; tile < tiles; tile++) process_tile(tile, False{});
                const int last = first_turn + tiles - 1 - first_tile;
                multiply_values(last);
                products_wait<0>();
                give_values_back(last);
            } else {
                for (int tile = first_tile; tile < tiles; tile++) process_tile(tile, False{});
            }
            for (int tile = tiles; tile < end_tile; tile++) {  // tiles for the warpgroups after this one
                const int turn = first_turn + tile - first_tile, stage = turn % STAGES, parity = turn / STAGES & 1;
                barrier_wait(keys_full + 8 * stage, parity);
                barrier_wait(values_full + 8 * stage, parity);
                warpgroup_barrier(warpgroup + 1);  // no thread waits any more for what is given back
                if (thread == 0) barrier_arrive(keys_empty + 8 * stage), barrier_arrive(values_empty + 8 * stage);
                if constexpr (TURNS) wait_for_turn(warpgroup), pass_turn(1 - warpgroup);
            }

#pragma unroll
            for (int h = 0; h < 2; h++) {
                float inverse[2];
#pragma unroll
                for (int e = 0; e < 2; e++) {
                    float sum = running_sum[h][e];
                    for (int lanes = 4; lanes < 32; lanes *= 2) sum += __shfl_xor_sync(~0u, sum, lanes);
                    inverse[e] = 1 / sum;
                    const int row = row_of(h, e);
                    if (!STAMPED && work.part == 0 && lane < 4 && row - tile_row >= HALO && row >= 0)
                        args.logsumexp[(int64_t)work.batch_head * args.at.query_rows + row] =
                            (reference[h][e] + log2f(sum)) * LN_2;
                }
                const float factor = of_own_row(inverse);
                const int local_row = 4 * (8 * h + lane / 4) + warp, row = tile_row + local_row;
                if (local_row < HALO || row < 0) continue;
                const int64_t of_row = (int64_t)work.batch_head * args.at.query_rows + row;
                uint32_t* out = (uint32_t*)(args.out + of_row * HEAD_DIM + work.part * VALUE_DIM + column);
#pragma unroll
                for (int b = 0; b < VALUE_DIM / 8; b++)
                    out[4 * b] = pack<ELEMENT>(accumulator[4 * b + 2 * h] * factor, accumulator[4 * b + 2 * h + 1] * factor);
            }
            if constexpr (PERSISTENT) {
                warpgroup_barrier(warpgroup + 1);  // all have read the slot, and no product reads its T
                if (thread == 0) {
                    barrier_arrive(work_empty + 8 * slot);
                    if constexpr (!QUERIES_IN_REGISTERS) barrier_arrive(rows_empty);
                }
                first_turn += end_tile - first_tile;
            }
        }
    }
}
