// Conv attention forward on Hopper: the convolution as banded products on the tensor cores.
//
//   c = sum over taps t of shift_rows(s, t) @ T[t]      s: scores, T[t]: banded Toeplitz, 16 x 32
//
// 16 columns of scores touch at most 16 + 16 columns of c, so one `m64n32k16` product a tap and 16 columns does it, with
// the same T for every block of columns. c slides: 64 columns of scores finish the 64 columns of c that begin LEFT
// columns earlier, and 16 partial columns are carried on. README.md beside this file derives it, and says what was measured.
//
// A block of threads has a work, rows of a head; where PERSISTENT it stays on its multiprocessor and takes works until
// there are no more. WARPGROUPS consumers have 64 rows each. The first HALO of these only feed the convolution, unless the
// consumer before lends the scores of its last rows (LENDS). One warp of the producer copies keys and values, another
// fetches a work's queries and T. A stage of copies is a turn's: a tile of keys, and the values of the tile before, which are
// multiplied in one turn, so that a tile waits for one barrier.
// Constants come from the compiler's command line (forward.py):
//   ELEMENT  Half or Bfloat16: q, k, v, out        HEAD_DIM   a multiple of 8
//   VALUE_DIM  columns of v a block computes, a multiple of 8 up to 128; VALUE_PARTS blocks make up a row of out
//   QUERY_TAPS 1 to 8, KEY_TAPS 1 to 17, PAD key padding to the left
//   CAUSAL, SPANS, MARGINS, PERSISTENT  0 or 1     WARPGROUPS, STAGES
// Scores go through fp16. A row that sees one beyond 65504 comes out NaN and is computed again, in float32 (exact_row).
// By hand, for registers and spills (wgmma.cuh is what source.py's `wgmma_header` returns):
//   nvcc -gencode=arch=compute_90a,code=sm_90a -O3 --std=c++17 -I. -DELEMENT=Bfloat16 -DHEAD_DIM=64 ... -cubin
#include <convolution.cuh>
#include <exact.cuh>

constexpr int VALUE_SLABS = (VALUE_DIM + 63) / 64;
// Of the queries' columns, the first 16 times so many are in a thread's registers, and shared memory is not read for them:
// all of them with two consumers, and what there is room for with three.
constexpr int STEPS_IN_REGISTERS = WARPGROUPS == 3 ? 1 : HEAD_DIM <= 128 ? DEPTH_STEPS : 0;
constexpr bool QUERIES_IN_REGISTERS = STEPS_IN_REGISTERS == DEPTH_STEPS;
// Two take turns at the convolution, so that one is in its softmax meanwhile, and store the next tile's scores while this
// one's values are multiplied. Three find their own rhythm, and lose if they do so.
constexpr bool TURNS = WARPGROUPS == 2;
// With turns, the first leaves the scores of its last rows above the second's, which then computes no halo: it stores them
// after its own turn, and that began when the second was done with what lay there.
constexpr bool LENDS = TURNS && HALO > 0;
constexpr int ROWS_BETWEEN = LENDS ? ROWS : ROWS - HALO;  // from a warpgroup's first row to the next one's
constexpr int BLOCK_ROWS = (WARPGROUPS - 1) * ROWS_BETWEEN + ROWS - HALO;
constexpr float LARGEST_SUM = 4096;  // of a thread's 16 numbers of a row: see the softmax
// An infinite score makes infinity of the columns of c that it touches, and NaN, by zeros of T, of the others in its window. A row
// for which these are masked finds the infinity where the mask begins: in the same tile, or in the one before if a block of 16
// columns has no zeros of T.
constexpr int FULL_WINDOW = KEY_TAPS >= 16;
static_assert(VALUE_DIM % 8 == 0 && VALUE_DIM <= 128, "accumulators must fit the registers");
constexpr int SLOTS = PERSISTENT ? 2 : 1;  // works in a block at a time: the one at hand and the next
constexpr int FETCHER = 32;                // the producer's thread that fetches queries
constexpr int TAKE_AHEAD = 6;              // tiles before its end at which a block takes its next work

// Shared memory, in bytes from its start.
constexpr int PITCH = (8 + ROWS) * 16;  // 8 columns of scores: 16 bytes a row, under eight rows of zeros
constexpr int QUERIES = 0;
constexpr int KEYS_AT = QUERIES + WARPGROUPS * SLABS * SLAB;
constexpr int VALUES = KEYS_AT + STAGES * SLABS * SLAB;
constexpr int SCORES = VALUES + STAGES * VALUE_SLABS * SLAB;
constexpr int SCORE_TILE = 8 * PITCH;
constexpr int TAPS = SCORES + 2 * WARPGROUPS * SCORE_TILE;
constexpr int BARRIERS = TAPS + SLOTS * QUERY_TAPS * TAP;
constexpr int WORKS = BARRIERS + (2 * STAGES + 8) * 8;  // two slots: a work's number, and what c is times
static_assert(WORKS + 2 * 8 <= 227 * 1024, "shared memory of a block");

struct Arguments {
    Positions at;
    const uint16_t* taps;       // [Hq, QUERY_TAPS, 512] fp16: T of each tap, laid out for wgmma; weights over a power of two
    const float* weight_scale;  // [Hq]: |scale| * log2(e) * that power; T has the sign
    uint16_t* out;              // [B, Hq, M, HEAD_DIM]
    float* logsumexp;           // [B, Hq, M], natural units
    int* taken;                 // works that blocks took after their first
    int row_blocks, works, blocks;
    int heads_in_turn;  // whose works go out together, the longest first
    Inputs inputs;      // for rows that are computed again
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

// Row `row` by a warp, in float32: 32 columns of scores a step, a lane each, of which the last KEY_TAPS - 1 columns of c lack
// scores to the right and are of the next step.
DEVICE void exact_row(const Arguments& args, const Work& work, int row, int lane) {
    constexpr int STEP = 32 - (KEY_TAPS - 1), COLUMNS = (VALUE_DIM + 31) / 32;
    const int end = keys_end(args.at, row);
    float reference = MINUS_INFINITY, sum = 0, sums[COLUMNS] = {};
#pragma unroll 1
    for (int first = keys_begin(args.at, row); first < end && sum == sum; first += STEP) {
        float scores[QUERY_TAPS], c = 0;
        exact_scores(args.inputs, args.at, work.batch, work.head, row, first - PAD + lane, scores);
#pragma unroll
        for (int tap = 0; tap < QUERY_TAPS; tap++)
#pragma unroll 1
            for (int key_tap = 0; key_tap < KEY_TAPS; key_tap++)
                c += weight_at(args.inputs.weight, work.head, QUERY_TAPS - 1 - tap, key_tap) *
                     __shfl_sync(~0u, scores[tap], (lane + key_tap) % 32);
        if (lane >= STEP || first + lane >= end) c = MINUS_INFINITY;
        const float largest = fmaxf(reference, warp_max(c)), rescale = exp2_fast((reference - largest) * LOG2_E);
        const float p = exp2_fast((c - largest) * LOG2_E);  // not c * LOG2_E, of which a rounding may be 64
        reference = largest;
        sum = sum * rescale + warp_sum(p);
#pragma unroll
        for (int i = 0; i < COLUMNS; i++) sums[i] *= rescale;
#pragma unroll 1
        for (int key = first; key < min(first + STEP, end); key++) {
            const float of_key = __shfl_sync(~0u, p, key - first);
            const uint16_t* const v = row_of(args.inputs.v, work.batch, work.kv_head, key - KEYS_BEFORE) + work.part * VALUE_DIM;
#pragma unroll
            for (int i = 0; i < COLUMNS; i++)
                if (lane + 32 * i < VALUE_DIM) sums[i] += of_key * unpack<ELEMENT>(v[lane + 32 * i]);
        }
    }
    const int64_t of_row = out_row(args.at, work.batch_head, row);
    uint16_t* const out = args.out + of_row * HEAD_DIM + work.part * VALUE_DIM;
#pragma unroll
    for (int i = 0; i < COLUMNS; i++)
        if (lane + 32 * i < VALUE_DIM) out[lane + 32 * i] = (uint16_t)pack<ELEMENT>(sums[i] / sum, 0.f);
    if (work.part == 0 && lane == 0) args.logsumexp[of_row] = marked(reference + log2f(sum) * LN_2, true);
}

// Number j of the i-th of four lanes is then what number i of the j-th was.
DEVICE void transpose_of_four_lanes(uint32_t (&words)[4], int lane) {
#pragma unroll
    for (int distance = 1; distance < 4; distance *= 2) {
        const bool upper = lane & distance;
#pragma unroll
        for (int i = 0; i < 4; i++) {
            if (i & distance) continue;
            const uint32_t received = __shfl_xor_sync(~0u, upper ? words[i] : words[i + distance], distance);
            (upper ? words[i] : words[i + distance]) = received;
        }
    }
}

extern "C" __global__ void MAXIMUM_THREADS(128 * (WARPGROUPS + 1)) hopper_forward(
    const __grid_constant__ TensorMap query_map, const __grid_constant__ TensorMap key_map,
    const __grid_constant__ TensorMap value_map, const __grid_constant__ Arguments args) {
    const int warpgroup = __shfl_sync(~0u, (int)threadIdx.x / 128, 0);  // uniform, so that addresses stay scalar
    const int thread = threadIdx.x % 128;
    const uint32_t shared = shared_memory();
    const uint32_t full = shared + BARRIERS, empty = full + 8 * STAGES;  // a stage each
    const uint32_t near_end = empty + 8 * STAGES;  // of a work: time to take the next
    const uint32_t announced = near_end + 8, rows_full = announced + 16, work_empty = rows_full + 16;  // a slot each
    const uint32_t rows_empty = work_empty + 16;

    if (threadIdx.x == 0) {
        for (int stage = 0; stage < STAGES; stage++) {
            barrier_init(full + 8 * stage, 1);
            barrier_init(empty + 8 * stage, WARPGROUPS);
        }
        barrier_init(near_end, 1);
        for (int slot = 0; slot < 2; slot++) {
            barrier_init(announced + 8 * slot, 1);
            barrier_init(rows_full + 8 * slot, 1);
            barrier_init(work_empty + 8 * slot, WARPGROUPS);
        }
        barrier_init(rows_empty, WARPGROUPS);
        barrier_init_done();
    }
    for (int i = threadIdx.x; i < 2 * WARPGROUPS * 8 * 32; i += blockDim.x)  // the rows above
        store_shared(shared + SCORES + i / 32 * PITCH + i % 32 * 4, 0u);
    fence_async_proxy();
    __syncthreads();

    if (warpgroup == WARPGROUPS) {
        give_registers<WARPGROUPS == 3 ? 32 : 24>();  // what the consumers leave
        if (thread == 0) {
            int turn = 0;  // counts tiles, of all works
            int part_before = 0, tile_before = 0, kv_head_before = 0, batch_before = 0;
            auto copy_values_before = [&](int stage) {
                for (int slab = 0; slab < VALUE_SLABS; slab++)
                    copy_tile(shared + VALUES + (stage * VALUE_SLABS + slab) * SLAB, &value_map, full + 8 * stage,
                              part_before * VALUE_DIM + slab * 64, tile_before * KEYS - LEFT - KEYS_BEFORE, kv_head_before,
                              batch_before);
            };
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
                    barrier_wait(empty + 8 * stage, parity ^ 1);
                    barrier_expect(full + 8 * stage, (SLABS + (turn > 0 ? VALUE_SLABS : 0)) * SLAB);
                    for (int slab = 0; slab < SLABS; slab++)
                        copy_tile(shared + KEYS_AT + (stage * SLABS + slab) * SLAB, &key_map, full + 8 * stage, slab * 64,
                                  tile * KEYS, work.kv_head, work.batch);
                    if (turn > 0) copy_values_before(stage);
                    part_before = work.part, tile_before = tile, kv_head_before = work.kv_head, batch_before = work.batch;
                }
            }
            const int stage = turn % STAGES;  // the last values have a turn without keys
            barrier_wait(empty + 8 * stage, turn / STAGES & 1 ^ 1);
            barrier_expect(full + 8 * stage, VALUE_SLABS * SLAB);
            copy_values_before(stage);
        } else if (thread == FETCHER) {
#pragma unroll 1
            for (int count = 0; PERSISTENT || count < 1; count++) {
                const int slot = count % SLOTS, use = count / SLOTS;
                int number = blockIdx.x;
                if constexpr (PERSISTENT) {
                    if (count > 0) {
                        barrier_wait_asleep(near_end, (count - 1) & 1);
                        number = args.blocks + take_next(args.taken);
                    }
                    barrier_wait(work_empty + 8 * slot, (use & 1) ^ 1);
                    if (number >= args.works) {
                        store_shared(shared + WORKS + slot * 8, ~0u);
                        barrier_arrive(announced + 8 * slot);
                        break;
                    }
                }
                const Work work(args, number);
                store_shared(shared + WORKS + slot * 8, (uint32_t)number);
                store_shared(shared + WORKS + slot * 8 + 4, __float_as_uint(args.weight_scale[work.head]));
                barrier_arrive(announced + 8 * slot);
                barrier_wait(rows_empty, (count & 1) ^ 1);
                barrier_expect(rows_full + 8 * slot, WARPGROUPS * SLABS * SLAB + QUERY_TAPS * TAP);
                for (int w = 0; w < WARPGROUPS; w++)
                    for (int slab = 0; slab < SLABS; slab++)
                        copy_tile(shared + QUERIES + (w * SLABS + slab) * SLAB, &query_map, rows_full + 8 * slot,
                                  slab * 64, work.first_row + w * ROWS_BETWEEN - HALO, work.head, work.batch);
                copy_bytes(shared + TAPS + slot * (QUERY_TAPS * TAP), args.taps + work.head * (QUERY_TAPS * TAP / 2),
                           QUERY_TAPS * TAP, rows_full + 8 * slot);
            }
        }
    } else {
        take_registers<WARPGROUPS == 3 ? 160 : 240>();
        const int lane = thread % 32, local_row = thread / 32 * 16 + lane / 4, column = lane % 4 * 2;
        const uint32_t scores_at = shared + SCORES + 2 * warpgroup * SCORE_TILE;
        const uint32_t queries_at = shared + QUERIES + warpgroup * SLABS * SLAB;
        const uint64_t queries = moved(operand(queries_at, 16, 1024, SWIZZLE_128), 0);
        const uint64_t first_keys = moved(operand(shared + KEYS_AT, 16, 1024, SWIZZLE_128), 0);
        const uint64_t first_values = moved(operand(shared + VALUES, SLAB, 1024, SWIZZLE_128), 0);
        const uint64_t score_tiles = moved(operand(scores_at, PITCH, 128, NO_SWIZZLE), 0);
        const uint64_t first_taps = operand(shared + TAPS, 512, 128, NO_SWIZZLE);
        // The row of an 8 x 8 matrix that this lane names when its warp stores or loads four: two of rows by two of columns.
        const int named_row = thread / 32 * 16 + lane % 16;
        const uint32_t store_at = scores_at + (8 + named_row) * 16 + lane / 16 * PITCH;
        // The last eight rows of the last warp are those above the next warpgroup's.
        const bool lends = LENDS && warpgroup == 0 && __shfl_sync(~0u, thread / 32, 0) == 3;
        const uint32_t lend_at = scores_at + 2 * SCORE_TILE + lane / 8 * PITCH + lane % 8 * 16;

        if (TURNS && QUERY_TAPS > 1 && warpgroup == 1) pass_turn(0);
        int first_turn = 0;  // tiles of the works before
#pragma unroll 1
        for (int count = 0; PERSISTENT || count < 1; count++) {
            const int slot = count % SLOTS;
            barrier_wait(announced + 8 * slot, count / SLOTS & 1);
            int number = blockIdx.x;
            if constexpr (PERSISTENT) {
                number = (int)load_shared(shared + WORKS + slot * 8);
                if (number < 0) break;
            }
            barrier_wait(rows_full + 8 * slot, count / SLOTS & 1);
            const float unit = __uint_as_float(load_shared(shared + WORKS + slot * 8 + 4));
            const Work work(args, number);
            const int first_tile = work.first_tile, end_tile = work.end_tile;
            const int tile_row = work.first_row + warpgroup * ROWS_BETWEEN - HALO;  // the query of local row 0
            const int halo = LENDS && warpgroup > 0 ? 0 : HALO;
            // Position from which a row's scores are masked. With MARGINS a tile that is not causal has a mask as well, beyond its
            // last key: without one ptxas finds no registers for three consumers, and runs one product at a time.
            const int tile_position = tile_row + (args.at.key_rows - (CAUSAL ? args.at.query_rows : 0));
            // Keys between which no row of the warpgroup has anything masked, and the tiles with a key that one sees.
            const int seen_by_all = keys_begin(args.at, tile_row + ROWS - 1), end_seen_by_all = keys_end(args.at, tile_row);
            const int tiles = min(max((keys_end(args.at, tile_row + ROWS - 1) + LEFT + KEYS - 1) / KEYS, first_tile + 1), end_tile);
            int begin[2], end[2];
#pragma unroll
            for (int h = 0; h < 2; h++) {
                begin[h] = keys_begin(args.at, tile_row + local_row + 8 * h);
                end[h] = keys_end(args.at, tile_row + local_row + 8 * h);
            }
            const uint64_t toeplitz = moved(first_taps, slot * QUERY_TAPS * TAP);

            // c's columns of this tile: those of even and of odd blocks of 16 scores apart, since windows that overlap in
            // one array would make the compiler run one product at a time.
            float even[32], odd[32], scores[32], accumulator[VALUE_DIM / 2];
            float reference[2] = {-1e30f, -1e30f}, running_sum[2] = {0, 0};
#pragma unroll
            for (int i = 0; i < 32; i++) even[i] = odd[i] = 0;
#pragma unroll
            for (int i = 0; i < VALUE_DIM / 2; i++) accumulator[i] = 0;

            uint32_t query[STEPS_IN_REGISTERS ? STEPS_IN_REGISTERS : 1][4];
#pragma unroll
            for (int step = 0; step < STEPS_IN_REGISTERS; step++)
                load_matrices(query[step], queries_at + step / 4 * SLAB + named_row * 128 +
                                               ((step % 4 * 2 + lane / 16) ^ named_row % 8) * 16);
            if constexpr (PERSISTENT && QUERIES_IN_REGISTERS) {
                warpgroup_barrier(warpgroup + 1);
                if (thread == 0) barrier_arrive(rows_empty);
            }
            auto multiply_keys = [&](int stage) {
                const uint64_t keys = first_keys + bytes_on(stage * SLABS * SLAB);
                products_begin();
#pragma unroll
                for (int step = 0; step < DEPTH_STEPS; step++) {
                    const uint64_t on = bytes_on(step / 4 * SLAB + step % 4 * 32);
                    if (step < STEPS_IN_REGISTERS)
                        Product<32, ELEMENT>::run_fragments(scores, query[step], keys + on, step > 0);
                    else
                        Product<32, ELEMENT>::run(scores, queries + on, keys + on, step > 0);
                }
                products_commit();
            };
            uint32_t probabilities[16];
            float sums[2];
            auto exponentiate = [&] {
#pragma unroll
                for (int h = 0; h < 2; h++) {
                    float sum[2] = {0, 0};
#pragma unroll
                    for (int b = 0; b < 8; b++) {
                        const float first = exp2_fast(fmaf(even[4 * b + 2 * h], unit, -reference[h]));
                        const float second = exp2_fast(fmaf(even[4 * b + 2 * h + 1], unit, -reference[h]));
                        sum[b % 2] += first + second;
                        probabilities[2 * b + h] = pack<ELEMENT>(first, second);
                    }
                    sums[h] = sum[0] + sum[1];
                }
            };

            auto multiply_values = [&](int stage) {
                products_begin();
#pragma unroll
                for (int step = 0; step < 4; step++)
                    Product<VALUE_DIM / 2, ELEMENT>::run_registers(
                        accumulator, probabilities + 4 * step,
                        first_values + bytes_on(stage * VALUE_SLABS * SLAB) + bytes_on(step * 16 * 128));
                products_commit();
            };
            uint32_t own[4][4];  // a tile's scores, for the rows as they are
            // Whether the next turn's copies are there. Known before it matters: who asks waits for the answer.
            bool next_is_there = false;
            auto take_scores = [&](int tile) {
                const int turn = first_turn + tile - first_tile, first_key = tile * KEYS;
                const int buffer = (turn & 1) * SCORE_TILE;  // two in turn: a warp may be a tile ahead of another
                // Scores that a row does not see are zeros to the convolution.
                if (SPANS ? first_key < seen_by_all || first_key + KEYS > end_seen_by_all
                          : (CAUSAL || MARGINS) && first_key + KEYS - 1 > tile_position) {
#pragma unroll
                    for (int i = 0; i < 32; i++) {
                        const int key = first_key + i / 4 * 8 + column + i % 2, h = i / 2 % 2;
                        if (SPANS ? key < begin[h] || key >= end[h] : key > tile_position + local_row + h * 8) scores[i] = 0;
                    }
                }
#pragma unroll
                for (int i = 0; i < 32; i += 2) own[i / 8][i / 2 % 4] = pack<Half>(scores[i], scores[i + 1]);
                if constexpr (!TURNS) convolve_own(even, odd, own, toeplitz);
                if constexpr (QUERY_TAPS > 1) {
#pragma unroll
                    for (int block = 0; block < 4; block++)
                        store_matrices(store_at + buffer + block * 2 * PITCH, own[block]);
                    if (lends) {
                        store_matrices(lend_at + buffer, {own[0][1], own[0][3], own[1][1], own[1][3]});
                        store_matrices(lend_at + buffer + 4 * PITCH, {own[2][1], own[2][3], own[3][1], own[3][3]});
                    }
                    fence_async_proxy();
                }
                next_is_there = barrier_done(full + 8 * ((turn + 1) % STAGES), (turn + 1) / STAGES & 1);
            };
            auto process_tile = [&](int tile) {
                const int turn = first_turn + tile - first_tile, first_key = tile * KEYS;
                const int buffer = (turn & 1) * SCORE_TILE;
                if constexpr (!TURNS) take_scores(tile);
                if constexpr (QUERY_TAPS > 1) {
                    warpgroup_barrier(warpgroup + 1);
                    if constexpr (TURNS) wait_for_turn(warpgroup);
                }
                if constexpr (TURNS) convolve_own(even, odd, own, toeplitz);
                if constexpr (QUERY_TAPS > 1) {
                    products_begin();
                    convolve_shifted<1, 8>(even, odd, score_tiles + bytes_on(buffer), PITCH, toeplitz);
                    products_commit();
                }
                products_wait<0>();
                const int next_turn = turn + 1, next_stage = next_turn % STAGES;
                if (!next_is_there) barrier_wait(full + 8 * next_stage, next_turn / STAGES & 1);
                multiply_keys(next_stage);  // the next scores, while this tile's softmax runs; after the last nobody looks
                if constexpr (TURNS && QUERY_TAPS > 1) pass_turn(1 - warpgroup);

#pragma unroll
                for (int i = 8; i < 32; i++) even[i] += odd[i - 8];
                if (first_key - LEFT < seen_by_all || first_key + KEYS - LEFT + FULL_WINDOW > end_seen_by_all) {
#pragma unroll
                    for (int i = 0; i < 32; i++) {
                        const int key = first_key - LEFT + i / 4 * 8 + column + i % 2, h = i / 2 % 2;
                        even[i] = fmaf(even[i], 0, even[i]);  // infinity becomes NaN, see FULL_WINDOW
                        if (key < begin[h] || key >= end[h]) even[i] = MINUS_INFINITY;
                    }
                }

                // Online softmax in units of log 2. Sum and accumulator of a row share a reference, so any will do that keeps
                // them in range: it moves to the maximum only when a thread's numbers add up to more than LARGEST_SUM, which the
                // first tile's do. Most tiles thus need no maximum, the longest chain of a softmax.
                exponentiate();
                if (__any_sync(~0u, !(fmaxf(sums[0], sums[1]) <= LARGEST_SUM))) {
                    float rescale[2];
#pragma unroll
                    for (int h = 0; h < 2; h++) {
                        int moves = !(sums[h] <= LARGEST_SUM);  // of a row alone, so that no row depends on another
                        float largest = MINUS_INFINITY;
#pragma unroll
                        for (int b = 0; b < 8; b++) largest = fmaxf(largest, fmaxf(even[4 * b + 2 * h], even[4 * b + 2 * h + 1]));
#pragma unroll
                        for (int lane = 1; lane < 4; lane *= 2) {
                            moves |= __shfl_xor_sync(~0u, moves, lane);
                            largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, lane));
                        }
                        largest = moves ? fmaxf(largest * unit, -1e20f) : reference[h];
                        rescale[h] = exp2_fast(reference[h] - largest);
                        reference[h] = largest;
                        running_sum[h] *= rescale[h];
                    }
#pragma unroll
                    for (int i = 0; i < VALUE_DIM / 2; i++) accumulator[i] *= rescale[i / 2 % 2];
                    exponentiate();
                }
                running_sum[0] += sums[0], running_sum[1] += sums[1];
#pragma unroll
                for (int i = 0; i < 8; i++) even[i] = odd[24 + i], even[8 + i] = 0;  // carried on

                multiply_values(next_stage);
                if constexpr (TURNS) {
                    products_wait<1>();
                    take_scores(tile + 1);  // after the last only those it lends to look
                }
                products_wait<0>();
                if (thread == 0 && tile + 1 < end_tile) barrier_arrive(empty + 8 * next_stage);  // not the next work's keys
            };

            const int first_stage = first_turn % STAGES;
            barrier_wait(full + 8 * first_stage, first_turn / STAGES & 1);
            multiply_keys(first_stage);
            products_wait<0>();
            if (thread == 0) barrier_arrive(empty + 8 * first_stage);
            if constexpr (TURNS) take_scores(first_tile);
            for (int tile = first_tile; tile < tiles; tile++) process_tile(tile);
            // Tiles for the warpgroups after this one, to which it has lent its scores of the first. In more of them only
            // rows of later documents see a key, and what lies above those are the zeros between documents.
            for (int tile = tiles; tile < end_tile; tile++) {
                const int turn = first_turn + tile - first_tile, next_turn = turn + 1, next_stage = next_turn % STAGES;
                barrier_wait(full + 8 * next_stage, next_turn / STAGES & 1);
                warpgroup_barrier(warpgroup + 1);  // no thread waits any more for what is given back
                if (thread == 0 && tile + 1 < end_tile) barrier_arrive(empty + 8 * next_stage);
                if constexpr (TURNS && QUERY_TAPS > 1) wait_for_turn(warpgroup), pass_turn(1 - warpgroup);
            }

            bool is_again[2];  // rows to compute again
#pragma unroll
            for (int h = 0; h < 2; h++) {
                float sum = running_sum[h];
                sum += __shfl_xor_sync(~0u, sum, 1);
                sum += __shfl_xor_sync(~0u, sum, 2);
                const int row = tile_row + local_row + 8 * h;
                const bool is_row = row >= max(tile_row + halo, ROWS_BEFORE), is_out = is_row && sum > 0;
                is_again[h] = is_row && !is_out;
                const int64_t of_row = out_row(args.at, work.batch_head, row);
                const float inverse = 1 / sum;
                // A thread has two numbers of every eight columns; four threads exchange theirs, so that each writes eight.
                uint4* out = (uint4*)(args.out + of_row * HEAD_DIM + work.part * VALUE_DIM) + lane % 4;
#pragma unroll
                for (int b = 0; b < VALUE_DIM / 8; b += 4) {
                    uint32_t words[4];
#pragma unroll
                    for (int i = 0; i < 4; i++) {
                        const int at = 4 * min(b + i, VALUE_DIM / 8 - 1) + 2 * h;
                        words[i] = pack<ELEMENT>(accumulator[at] * inverse, accumulator[at + 1] * inverse);
                    }
                    transpose_of_four_lanes(words, lane);
                    if (is_out && b + lane % 4 < VALUE_DIM / 8) out[b] = uint4{words[0], words[1], words[2], words[3]};
                }
                if (is_out && work.part == 0 && column == 0) 
                    args.logsumexp[of_row] = marked((reference[h] + log2f(sum)) * LN_2, false);
            }
            if (__any_sync(~0u, is_again[0] || is_again[1]))
#pragma unroll 1
                for (int i = 0; i < 16; i++)
                    if (__any_sync(~0u, lane / 4 == i % 8 && (i < 8 ? is_again[0] : is_again[1])))
                        exact_row(args, work, tile_row + thread / 32 * 16 + i, lane);
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
