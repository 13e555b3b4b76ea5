// Conv attention backward on Hopper: over rows dq, the weight's gradient, and p and ds; of those, dk and dv by products.cuh.
//
// It streams over keys as the forward does and recomputes scores and probabilities:
//   c = convolution of s, p = exp2(c - logsumexp), dc = p (grad_out v^T - delta),
//   ds = sum over taps t of shift_rows(dc, -t) @ T'[t]        the same banded product, row shifts the other way
//   dq = scale ds k, and by sums over rows: d weight[cq-1-t, b] = sum of dc[i, j] s[i-t, j-pad+b]
// c's columns end LEFT columns before the scores' and ds's LAG before: the last 16 columns of s and dc stay for the next
// tile. README.md derives it.
//
// A block's two consumer warpgroups compute c and dc of 128 consecutive rows, and ds of the 128 rows that begin HALO
// earlier: so both convolutions and the weight's gradient need rows above alone. The second warpgroup takes them from the
// first, which may run ahead. BLOCK_ROWS rows are complete: the first HALO rows of c are not, nor twice as many of ds.
// Constants as in forward.cu; HEAD_DIM up to 128.
#include <convolution.cuh>
#include <products.cuh>

constexpr int BLOCK_ROWS = 2 * ROWS - 2 * HALO;
constexpr int LAG = LEFT + LEFT_BACK;
static_assert(WARPGROUPS == 2, "the second has its rows above from the first");
static_assert(HEAD_DIM % 8 == 0 && HEAD_DIM <= 128, "accumulators must fit the registers");

// Shared memory, in bytes from its start.
//
// Scores and dc: 8 columns a slab, 16 bytes a row; the last 16 columns of the tile before, and 64. Above the second
// warpgroup's rows lie the first's last ones, above the first's zeros. The weight's gradient begins HALO rows above, and
// reads scores from seven rows higher.
constexpr int SCORES_ABOVE = 16, GRADS_ABOVE = 8;
static_assert(HALO + 7 <= SCORES_ABOVE && HALO <= GRADS_ABOVE, "rows above");
constexpr int PITCH = (SCORES_ABOVE + ROWS) * 16, GRAD_PITCH = (GRADS_ABOVE + ROWS) * 16;
constexpr int BUFFER = (2 + 8) * PITCH, GRAD_BUFFER = (2 + 8) * GRAD_PITCH;
constexpr int QUERIES = 0;
constexpr int GRADS = QUERIES + WARPGROUPS * SLABS * SLAB;
constexpr int KEYS_AT = GRADS + WARPGROUPS * SLABS * SLAB;
constexpr int VALUES = KEYS_AT + STAGES * SLABS * SLAB;
constexpr int LATE_KEYS = VALUES + STAGES * SLABS * SLAB;  // those of ds's columns
constexpr int SCORES = LATE_KEYS + STAGES * SLABS * SLAB;
constexpr int SCORE_GRADS = SCORES + WARPGROUPS * BUFFER;
constexpr int SCORES_DOWN = SCORE_GRADS + WARPGROUPS * GRAD_BUFFER;  // the first warpgroup's last rows of a tile
constexpr int GRADS_DOWN = SCORES_DOWN + 8 * SCORES_ABOVE * 16;
constexpr int TAPS = GRADS_DOWN + 8 * GRADS_ABOVE * 16;
constexpr int TAPS_BACK = TAPS + QUERY_TAPS * TAP;
constexpr int BARRIERS = TAPS_BACK + QUERY_TAPS * TAP;
constexpr int WORK = BARRIERS + (2 * STAGES + 5) * 8;  // its number; then stage and row block, for which registers are short
constexpr int PRODUCT_STAGES = BARRIERS / PRODUCT_STAGE < 4 ? BARRIERS / PRODUCT_STAGE : 4;
static_assert(PRODUCT_STAGES >= 2, "products are copied ahead");
static_assert(2 * PRODUCT_STAGES <= 2 * STAGES + 5, "their barriers take the place of the rows'");
static_assert(WORK + 16 <= 227 * 1024, "shared memory of a block");

// dc goes through fp16, and ds, up to 136 of them times weights below 1, to scratch in ELEMENT.
template <class Element> struct GradLimit;
template <> struct GradLimit<Half> { static constexpr float log2 = 8; };
template <> struct GradLimit<Bfloat16> { static constexpr float log2 = 14; };

// The next tile's scores are computed during this one's softmax where registers hold them beside dq.
constexpr bool SCORES_EARLY = HEAD_DIM <= 64;
// Rows as they are come from registers, but where those that hold a row's span leave none.
constexpr int FIRST_SHIFT = SPANS && HEAD_DIM > 64 ? 0 : 1;
constexpr int ALIGNED = 128;  // rows, and keys, of the blocks that `seen_by` counts

struct Arguments {
    Positions at;
    const uint16_t *taps, *taps_back;  // [Hq, QUERY_TAPS, 512] fp16: T, and T' backwards, weights over a power of two
    const float* weight_scale;         // [Hq]: |scale| * log2(e) * that power; T has the sign
    const float *value_norms, *grad_norms;  // [B * heads, NORM_PARTS]: maxima of squared norms
    const float *logsumexp, *delta;    // [B, Hq, M]
    uint16_t *p, *ds;                  // [slots, chunk_rows, pitch]: tiles of 64 keys, in the order in which threads hold them
    float* ds_unit;                    // [B * Hq]: what ds is to be multiplied by
    float *dk, *dv;                    // [B * Hq, N, HEAD_DIM]
    const int* seen_by;                // [2, blocks of ALIGNED keys] or null: rows, multiples of ALIGNED, from and to before which
                                       // a block is seen
    uint16_t* dq;                      // [B, Hq, M, HEAD_DIM]
    float* dweight;                    // [B * Hq, all row blocks, WARPGROUPS, QUERY_TAPS * KEY_TAPS], sums of rows
    float scale;
    int chunk_rows, pitch;
    Chunks chunks;
};

// Products of 64 rows with 64 rows, HEAD_DIM deep: `queries` and `keys` are operands of swizzled tiles.
DEVICE void multiply_rows(float (&scores)[32], uint64_t queries, uint64_t keys) {
#pragma unroll
    for (int step = 0; step < DEPTH_STEPS; step++) {
        const uint64_t on = bytes_on(step / 4 * SLAB + step % 4 * 32);
        Product<32, ELEMENT>::run(scores, queries + on, keys + on, step > 0);
    }
}

extern "C" __global__ void MAXIMUM_THREADS(128 * (WARPGROUPS + 1)) hopper_backward(
    const __grid_constant__ TensorMap query_map, const __grid_constant__ TensorMap key_map,
    const __grid_constant__ TensorMap value_map, const __grid_constant__ TensorMap grad_map,
    const __grid_constant__ TensorMap scratch_map,
    const __grid_constant__ Arguments args) {
    const int warpgroup = __shfl_sync(~0u, (int)threadIdx.x / 128, 0);  // uniform, so that addresses stay scalar
    const int thread = threadIdx.x % 128;
    const uint32_t shared = shared_memory();
    // A stage: a tile of keys, and values and late keys of the tile before.
    const uint32_t full = shared + BARRIERS, empty = full + 8 * STAGES;
    const uint32_t rows_full = empty + 8 * STAGES;
    const uint32_t scores_down = rows_full + 8, scores_taken = scores_down + 8;
    const uint32_t grads_down = scores_taken + 8, grads_taken = grads_down + 8;
    const uint32_t products_full = full, products_empty = products_full + 8 * PRODUCT_STAGES;

    // The work, taken by one thread, which waits for those that must be done before.
    auto products_of = [&](int chunk) {
        const int keys = chunk_keys<BLOCK_ROWS>(args.chunks, args.at, chunk);
        return place_blocks(keys, LEFT) + place_blocks(keys, LAG);
    };
    if (threadIdx.x == 0) store_shared(shared + WORK, (uint32_t)fetch_next(args.chunks.taken));
    __syncthreads();
    const Work work = work_at(args.chunks, __shfl_sync(~0u, (int)load_shared(shared + WORK), 0), products_of);
    const int batch_head = work.stage % args.chunks.batch_heads, slot = work.stage % args.chunks.slots;
    const int head = batch_head % args.at.heads, batch = batch_head / args.at.heads, kv_head = head / args.at.group;
    const int first_row_block = work.chunk * args.chunks.row_blocks;  // of the chunk
    if (threadIdx.x == 0) {
        store_shared(shared + WORK + 4, (uint32_t)work.stage);
        store_shared(shared + WORK + 8, (uint32_t)(first_row_block + work.part));
        auto all_products = [&](int stage) {
            wait_for_count(args.chunks.products_done + stage, products_of(args.chunks.chunks - 1 - stage / args.chunks.batch_heads));
        };
        if (work.of_rows) {
            if (work.stage >= args.chunks.slots) all_products(work.stage - args.chunks.slots);
            for (int stage = 0; stage < STAGES; stage++) {
                barrier_init(full + 8 * stage, 1);
                barrier_init(empty + 8 * stage, WARPGROUPS);
            }
            barrier_init(rows_full, 1);
            barrier_init(scores_down, 32), barrier_init(grads_down, 32);  // by each thread of a warp, for what it wrote
            barrier_init(scores_taken, 1), barrier_init(grads_taken, 8 * GRADS_ABOVE);  // by each thread that read
        } else {
            wait_for_count(args.chunks.rows_done + work.stage, chunk_blocks(args.chunks, work.chunk));
            if (work.stage >= args.chunks.batch_heads) all_products(work.stage - args.chunks.batch_heads);  // the same sums
            for (int stage = 0; stage < PRODUCT_STAGES; stage++) {
                barrier_init(products_full + 8 * stage, 1);
                barrier_init(products_empty + 8 * stage, WARPGROUPS);
            }
        }
        barrier_init_done();
    }
    if (!work.of_rows) {
        __syncthreads();
        const int keys = chunk_keys<BLOCK_ROWS>(args.chunks, args.at, work.chunk), of_p = place_blocks(keys, LEFT);
        const bool of_ds = work.part >= of_p;
        const int block = of_ds ? work.part - of_p : work.part, shift = of_ds ? LAG : LEFT;
        const int first_row = first_row_block * BLOCK_ROWS, first_place = block * PLACES;
        int begin = 0, end = min(args.chunk_rows, args.at.query_rows - first_row);
        if (CAUSAL)
            begin = max(first_place - shift - (args.at.key_rows - args.at.query_rows) - first_row, 0) / ROW_STEP * ROW_STEP;
        if (SPANS) {  // its keys are of three blocks
            const int last = (args.at.key_rows - 1) / ALIGNED;
            begin = max(begin, args.seen_by[min(max(2 * block - 1, 0), last)] - first_row);
            end = min(end, args.seen_by[last + 1 + min(2 * block + 1, last)] - first_row);
        }
        const ProductWork product = {batch_head, first_row, first_place, shift, slot, of_ds, begin, end};
        if (warpgroup == WARPGROUPS) {
            deallocate_registers<24>();
            if (thread == 0) {
                fence_async_proxy_everywhere();
                load_products<PRODUCT_STAGES>(product, shared, products_full, products_empty, &scratch_map,
                                              of_ds ? &query_map : &grad_map, head, batch);
            }
        } else {
            allocate_registers<240>();
            float* const out = (of_ds ? args.dk : args.dv) + (int64_t)batch_head * args.at.key_rows * HEAD_DIM;
            add_products<PRODUCT_STAGES>(product, shared, products_full, products_empty, out, keys,
                                         of_ds ? args.ds_unit[batch_head] : 1.f, work.chunk == args.chunks.chunks - 1,
                                         warpgroup, thread);
            part_barrier<WARPGROUPS * 128>();
            if (threadIdx.x == 0) count_up(args.chunks.products_done + work.stage);
        }
        return;
    }
    const int row_block = first_row_block + work.part;
    const int first_row = row_block * BLOCK_ROWS;
    const int end_row = min(first_row + BLOCK_ROWS, args.at.query_rows);
    const int first_tile = keys_begin(args.at, first_row) / KEYS;
    const int end_tile = max((keys_end(args.at, end_row - 1) + CARRIED + KEYS - 1) / KEYS, first_tile + 1);

    const int tap_words = QUERY_TAPS * TAP / 4;
    for (int i = threadIdx.x; i < tap_words; i += blockDim.x) {
        store_shared(shared + TAPS + 4 * i, ((const uint32_t*)args.taps)[head * tap_words + i]);
        store_shared(shared + TAPS_BACK + 4 * i, ((const uint32_t*)args.taps_back)[head * tap_words + i]);
    }
    for (int i = threadIdx.x; i < (SCORES_DOWN - SCORES) / 4; i += blockDim.x) store_shared(shared + SCORES + 4 * i, 0u);
    fence_async_proxy();
    __syncthreads();

    if (warpgroup == WARPGROUPS) {
        deallocate_registers<24>();
        if (thread == 0) {
            barrier_expect(rows_full, 2 * WARPGROUPS * SLABS * SLAB);
            for (int w = 0; w < WARPGROUPS; w++)
                for (int slab = 0; slab < SLABS; slab++) {
                    const int at = (w * SLABS + slab) * SLAB, row = first_row + w * ROWS - HALO;
                    copy_tile(shared + QUERIES + at, &query_map, rows_full, slab * 64, row, head, batch);
                    copy_tile(shared + GRADS + at, &grad_map, rows_full, slab * 64, row, head, batch);
                }
            for (int tile = first_tile; tile <= end_tile; tile++) {
                const int turn = tile - first_tile, stage = turn % STAGES, at = stage * SLABS * SLAB;
                const bool has_keys = tile < end_tile, has_tile_before = turn > 0;
                barrier_wait(empty + 8 * stage, turn / STAGES & 1 ^ 1);
                barrier_expect(full + 8 * stage, (has_keys + 2 * has_tile_before) * SLABS * SLAB);
                for (int slab = 0; slab < SLABS; slab++) {
                    if (has_keys)
                        copy_tile(shared + KEYS_AT + at + slab * SLAB, &key_map, full + 8 * stage, slab * 64, tile * KEYS,
                                  kv_head, batch);
                    if (!has_tile_before) continue;
                    copy_tile(shared + VALUES + at + slab * SLAB, &value_map, full + 8 * stage, slab * 64,
                              (tile - 1) * KEYS - LEFT, kv_head, batch);
                    copy_tile(shared + LATE_KEYS + at + slab * SLAB, &key_map, full + 8 * stage, slab * 64,
                              (tile - 1) * KEYS - LAG, kv_head, batch);
                }
            }
        }
    } else {
        allocate_registers<WARPGROUPS == 3 ? 160 : 240>();
        const int lane = thread % 32, local_row = thread / 32 * 16 + lane / 4, column = lane % 4 * 2;
        const int tile_row = first_row + warpgroup * ROWS - HALO;  // the query of local row 0 of scores, c and dc
        const int ds_row = tile_row - HALO;                        // that of ds and dq
        const int tile_position = tile_row + (args.at.key_rows - args.at.query_rows);
        const int ds_position = tile_position - HALO;
        const int seen_by_all = keys_begin(args.at, tile_row + ROWS - 1), end_seen_by_all = keys_end(args.at, tile_row);
        float reference[2], delta[2];
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const int row = tile_row + local_row + 8 * h;
            // Where there is no row, its c is not complete, or backward_exact.cu has it, p and dc are zero.
            const int64_t of_row = (int64_t)batch_head * args.at.query_rows + row;
            const bool inside = row >= first_row && row < args.at.query_rows && !is_exact(args.logsumexp[of_row]);
            reference[h] = inside ? args.logsumexp[of_row] * LOG2_E : 1e30f;
            delta[h] = inside ? args.delta[of_row] : 0.f;
        }
        auto is_own = [&](int row) { return row >= first_row && row < end_row; };
        auto in_scratch = [&](int row) {  // where it begins
            return ((int64_t)slot * args.chunk_rows + row - first_row_block * BLOCK_ROWS) * args.pitch;
        };
        // What the products read of a row beside its tiles, and of rows after the last.
        auto clear_row = [&](int row) {
            auto clear = [&](uint16_t* scratch, int shift) {
                int from = 0, to = 0;
                if (row >= args.at.query_rows) {
                    to = args.pitch;
                } else if (SPANS) {  // rows are read to fewer than ROW_STEP beyond the last block that sees a key
                    const int block = row / ALIGNED * ALIGNED, block_before = max(row - ROW_STEP + 1, 0) / ALIGNED * ALIGNED;
                    from = keys_begin(args.at, block_before) / PLACES * PLACES;
                    to = ((keys_end(args.at, block + ALIGNED - 1) + ALIGNED - 1) / ALIGNED / 2 + 1) * PLACES;
                } else if (CAUSAL) {
                    to = ((keys_end(args.at, row) - 1 + shift + ROW_STEP - 1) / PLACES + 1) * PLACES;
                }
                to = min(to, args.pitch);
                const bool written = row < args.at.query_rows;
                uint16_t* const places = scratch + in_scratch(row);
                for (int at = from + lane * 8; at < (written ? first_tile * KEYS : to); at += 32 * 8)
                    *(uint4*)(places + at) = uint4{0, 0, 0, 0};
                for (int at = end_tile * KEYS + lane * 8; written && at < to; at += 32 * 8)
                    *(uint4*)(places + at) = uint4{0, 0, 0, 0};
            };
            clear(args.p, LEFT);
            clear(args.ds, LAG);
        };
        const int chunk_row = first_row_block * BLOCK_ROWS, stored_rows = end_row < args.at.query_rows ? end_row - chunk_row :
            min(end_row - chunk_row + ROW_STEP - 1, args.chunk_rows);
        for (int row = first_row + threadIdx.x / 32; row < chunk_row + stored_rows; row += 4 * WARPGROUPS) clear_row(row);

        const uint32_t queries_at = shared + QUERIES + warpgroup * SLABS * SLAB;
        const uint32_t scores_at = shared + SCORES + warpgroup * BUFFER;
        const uint32_t score_grads_at = shared + SCORE_GRADS + warpgroup * GRAD_BUFFER;
        const uint64_t queries = operand(queries_at, 16, 1024, SWIZZLE_128);
        const uint64_t grads = operand(shared + GRADS + warpgroup * SLABS * SLAB, 16, 1024, SWIZZLE_128);
        const uint64_t first_keys = operand(shared + KEYS_AT, 16, 1024, SWIZZLE_128);
        const uint64_t first_values = operand(shared + VALUES, 16, 1024, SWIZZLE_128);
        const uint64_t first_late_keys = operand(shared + LATE_KEYS, SLAB, 1024, SWIZZLE_128);
        const uint64_t scores_by_rows = operand(scores_at + 2 * PITCH + SCORES_ABOVE * 16, PITCH, 128, NO_SWIZZLE);
        const uint64_t score_grads_by_rows =
            operand(score_grads_at + 2 * GRAD_PITCH + GRADS_ABOVE * 16, GRAD_PITCH, 128, NO_SWIZZLE);
        // Of ds's rows: eight row shifts of eight columns of scores, and dc.
        const uint64_t scores_by_columns = operand(scores_at + (SCORES_ABOVE - HALO - 7) * 16, 128, 16, NO_SWIZZLE);
        const uint64_t score_grads_by_columns = operand(score_grads_at + (GRADS_ABOVE - HALO) * 16, 128, GRAD_PITCH, NO_SWIZZLE);
        const uint64_t toeplitz = operand(shared + TAPS, 512, 128, NO_SWIZZLE);
        const uint64_t toeplitz_back = operand(shared + TAPS_BACK, 512, 128, NO_SWIZZLE);
        // Behind the 16 columns at the front of a buffer: what this lane names when its warp stores four 8 x 8 matrices, two of
        // rows by two of columns.
        const int named_row = thread / 32 * 16 + lane % 16;
        const uint32_t store_scores_at = scores_at + (2 + lane / 16) * PITCH + (SCORES_ABOVE + named_row) * 16;
        const uint32_t store_grads_at = score_grads_at + (2 + lane / 16) * GRAD_PITCH + (GRADS_ABOVE + named_row) * 16;
        const int64_t kept_at = in_scratch(tile_row + local_row) + lane % 4 * 8;

        float dq[HEAD_DIM / 2], dweight[12], carried[8], carried_back[8], scores[32];
#pragma unroll
        for (int i = 0; i < HEAD_DIM / 2; i++) dq[i] = 0;
#pragma unroll
        for (int i = 0; i < 12; i++) dweight[i] = 0;
#pragma unroll
        for (int i = 0; i < 8; i++) carried[i] = carried_back[i] = 0;

        barrier_wait(rows_full, 0);
        const float unit = args.weight_scale[head];
        // |grad_out v^T - delta| <= 2 |grad_out| |v|: a power of two brings it to the limit. For dc, in fp16, from what the
        // block's rows see, so that a huge token costs others little; for ds, which blocks add up, from all of the head.
        auto grad_factor_of = [&](int row, int end_row, int key, int end_key) {
            auto largest = [&](const float* norms, int rows, int first, int end) {
                const int each = (rows + NORM_PARTS - 1) / NORM_PARTS;  // of a part, as in prepare.cu
                return warp_max(lane >= first / each && lane <= (end - 1) / each ? norms[lane] : 0.f);
            };
            const int kv_batch_head = batch * (args.at.heads / args.at.group) + kv_head;
            const float grad_norm = largest(args.grad_norms + batch_head * NORM_PARTS, args.at.query_rows, row, end_row);
            const float value_norm = largest(args.value_norms + kv_batch_head * NORM_PARTS, args.at.key_rows, key, end_key);
            const float bound = 0.5f * (log2f(grad_norm) + log2f(value_norm)) + 1;
            return exp2f(fminf(fmaxf(floorf(GradLimit<ELEMENT>::log2 - bound), -100.f), 100.f));
        };
        const int end_of_c = min(first_row + WARPGROUPS * ROWS - HALO, args.at.query_rows);
        const float grad_factor =
            grad_factor_of(first_row, end_of_c, keys_begin(args.at, first_row), keys_end(args.at, end_of_c - 1));
        const float head_factor = grad_factor_of(0, args.at.query_rows, 0, args.at.key_rows);
        const float to_ds = head_factor / grad_factor;
        const float ds_unit = args.scale == 0 ? 0.f : args.weight_scale[head] * LN_2 / head_factor;
        if (threadIdx.x == 0) args.ds_unit[batch_head] = ds_unit;  // as every block of the head

        auto multiply_keys = [&](int stage) {
            products_begin();
            multiply_rows(scores, queries, first_keys + bytes_on(stage * SLABS * SLAB));
            products_commit();
        };
        // A tile of p or, HALO rows up, of ds to scratch as it lies in registers: four lanes write 64 bytes of a row at once.
        auto keep = [&](uint16_t* scratch, const uint32_t (&tile)[4][4], int rows_up, int first_key) {
            uint16_t* const places = scratch + kept_at - rows_up * args.pitch + first_key;
#pragma unroll
            for (int part = 0; part < 4; part++) {
                const int h = part / 2, block = part % 2 * 2;
                const uint4 numbers = {tile[block][h], tile[block][2 + h], tile[block + 1][h], tile[block + 1][2 + h]};
                if (is_own(tile_row - rows_up + local_row + 8 * h)) *(uint4*)(places + h * 8 * args.pitch + block * 16) = numbers;
            }
        };
        // The second warpgroup's rows above, which the first has left for it; their last 16 columns before move to the front.
        auto take = [&](uint32_t from, uint32_t buffer, int rows_above, int pitch) {
            if (thread >= 8 * rows_above) return;
            const int slab = thread / rows_above;
            const uint32_t to = buffer + (2 + slab) * pitch + thread % rows_above * 16;
            const uint4 numbers = load_shared_16(from + thread * 16);
            if (slab >= 6) store_shared(to - 8 * pitch, load_shared_16(to));
            store_shared(to, numbers);
        };
        barrier_wait(full, 0);
        multiply_keys(0);
        products_wait<0>();
        if (thread == 0) barrier_arrive(empty);
        for (int tile = first_tile; tile < end_tile; tile++) {
            const int turn = tile - first_tile, passed = turn & 1, next_turn = turn + 1, next_stage = next_turn % STAGES;
            const int first_key = tile * KEYS;
            const uint64_t of_stage = bytes_on(next_stage * SLABS * SLAB);

            // c and grad_out v^T of the same 64 columns.
            float even[32], odd[32], dp[32];
#pragma unroll
            for (int i = 0; i < 8; i++) even[i] = carried[i], even[8 + i] = 0;
            if (CAUSAL && first_key + KEYS - 1 > tile_position) {
#pragma unroll
                for (int i = 0; i < 32; i++) {
                    const int key = first_key + i / 4 * 8 + column + i % 2;
                    if (key > tile_position + local_row + i / 2 % 2 * 8) scores[i] = 0;
                }
            }
            uint32_t halves[4][4];
#pragma unroll
            for (int i = 0; i < 32; i += 2) halves[i / 8][i / 2 % 4] = finite(pack<Half>(scores[i], scores[i + 1]));
            if constexpr (FIRST_SHIFT == 1) convolve_own(even, odd, halves, toeplitz);
#pragma unroll
            for (int block = 0; block < 4; block++) store_matrices(store_scores_at + block * 2 * PITCH, halves[block]);
            if (warpgroup == 0 && thread / 32 == 3) {
                barrier_wait(scores_taken, passed ^ 1);
#pragma unroll
                for (int block = 0; block < 4; block++)
                    store_matrices(shared + SCORES_DOWN + ((block * 2 + lane / 16) * SCORES_ABOVE + lane % 16) * 16, halves[block]);
                barrier_arrive(scores_down);
            } else if (warpgroup == 1) {
                barrier_wait(scores_down, passed);
                take(shared + SCORES_DOWN, scores_at, SCORES_ABOVE, PITCH);
            }
            fence_async_proxy();
            const bool next_is_there = barrier_done(full + 8 * next_stage, next_turn / STAGES & 1);
            warpgroup_barrier(warpgroup + 1);
            if (warpgroup == 1 && thread == 0) barrier_arrive(scores_taken);
            if (!next_is_there) barrier_wait(full + 8 * next_stage, next_turn / STAGES & 1);
            products_begin();
            convolve_shifted<FIRST_SHIFT>(even, odd, scores_by_rows, PITCH, toeplitz);
            multiply_rows(dp, grads, first_values + of_stage);
            products_commit();
            products_wait<0>();

            if constexpr (SCORES_EARLY) multiply_keys(next_stage);  // meanwhile; after the last tile nobody looks
#pragma unroll
            for (int i = 8; i < 32; i++) even[i] += odd[i - 8];
#pragma unroll
            for (int i = 0; i < 8; i++) carried[i] = odd[24 + i];
            if (first_key - LEFT < seen_by_all || first_key + KEYS - LEFT > end_seen_by_all) {
#pragma unroll
                for (int h = 0; h < 2; h++) {
                    const int row = tile_row + local_row + 8 * h;
                    const int begin = keys_begin(args.at, row), end = keys_end(args.at, row);
#pragma unroll
                    for (int b = 0; b < 16; b++) {
                        const int key = first_key - LEFT + b / 2 * 8 + column + b % 2;
                        if (key < begin || key >= end) even[b / 2 * 4 + 2 * h + b % 2] = MINUS_INFINITY;
                    }
                }
            }
            uint32_t p[4][4];
#pragma unroll
            for (int i = 0; i < 32; i += 2) {
                const int h = i / 2 % 2;
                const float first = exp2_fast(fmaf(even[i], unit, -reference[h]));
                const float second = exp2_fast(fmaf(even[i + 1], unit, -reference[h]));
                p[i / 8][i / 2 % 4] = pack<ELEMENT>(first, second);
                halves[i / 8][i / 2 % 4] = pack<Half>(first * ((dp[i] - delta[h]) * grad_factor),
                                                      second * ((dp[i + 1] - delta[h]) * grad_factor));
            }
            keep(args.p, p, 0, first_key);

            // ds, and the weight's gradient from the scores' 64 columns before the last 16.
            float even_back[32], odd_back[32];
#pragma unroll
            for (int i = 0; i < 8; i++) even_back[i] = carried_back[i], even_back[8 + i] = 0;
            if constexpr (FIRST_SHIFT == 1) convolve_own(even_back, odd_back, halves, toeplitz_back);
#pragma unroll
            for (int block = 0; block < 4; block++)
                store_matrices(store_grads_at + block * 2 * GRAD_PITCH, halves[block]);
            if (warpgroup == 0 && thread / 32 == 3) {
                barrier_wait(grads_taken, passed ^ 1);
#pragma unroll
                for (int slab = 0; slab < 8; slab++)  // the last eight rows
                    store_shared(shared + GRADS_DOWN + slab * GRADS_ABOVE * 16 + lane * 4, halves[slab / 2][slab % 2 * 2 + 1]);
                barrier_arrive(grads_down);
            } else if (warpgroup == 1 && thread < 8 * GRADS_ABOVE) {  // who only waited could miss the phase
                barrier_wait(grads_down, passed);
                take(shared + GRADS_DOWN, score_grads_at, GRADS_ABOVE, GRAD_PITCH);
                barrier_arrive(grads_taken);
            }
            fence_async_proxy();
            warpgroup_barrier(warpgroup + 1);
            products_begin();
            convolve_shifted<FIRST_SHIFT>(even_back, odd_back, score_grads_by_rows, GRAD_PITCH, toeplitz_back);
            products_commit();
            products_begin();
#pragma unroll
            for (int slab = 0; slab < 8; slab++)
#pragma unroll
                for (int step = 0; step < ROWS / 16; step++)
                    Product<12, Half>::run_transposed(dweight, scores_by_columns + bytes_on(slab * PITCH + step * 256),
                                                      score_grads_by_columns + bytes_on(slab * GRAD_PITCH + step * 256));
            products_commit();
            products_wait<1>();
#pragma unroll
            for (int i = 8; i < 32; i++) even_back[i] += odd_back[i - 8];
#pragma unroll
            for (int i = 0; i < 8; i++) carried_back[i] = odd_back[24 + i];
            if (CAUSAL && first_key - LAG + KEYS - 1 > ds_position) {
#pragma unroll
                for (int i = 0; i < 32; i++) {
                    const int key = first_key - LAG + i / 4 * 8 + column + i % 2;
                    if (key > ds_position + local_row + i / 2 % 2 * 8) even_back[i] = 0;
                }
            }
            uint32_t ds[4][4];
#pragma unroll
            for (int i = 0; i < 32; i += 2)
                ds[i / 8][i / 2 % 4] = pack<ELEMENT>(even_back[i] * to_ds, even_back[i + 1] * to_ds);
            if constexpr (!SCORES_EARLY) multiply_keys(next_stage);
            products_wait<SCORES_EARLY ? 0 : 1>();

            // The last 16 columns move to the front.
            const uint32_t score_to = scores_at + thread / 64 * PITCH + (SCORES_ABOVE + thread % 64) * 16;
            const uint32_t grad_to = score_grads_at + thread / 64 * GRAD_PITCH + (GRADS_ABOVE + thread % 64) * 16;
            const uint4 score = load_shared_16(score_to + 8 * PITCH), grad = load_shared_16(grad_to + 8 * GRAD_PITCH);
            warpgroup_barrier(warpgroup + 1);
            store_shared(score_to, score);
            store_shared(grad_to, grad);
            products_begin();
#pragma unroll
            for (int step = 0; step < 4; step++)
                Product<HEAD_DIM / 2, ELEMENT>::run_registers(dq, ds[step], first_late_keys + of_stage + bytes_on(step * 16 * 128));
            products_commit();
            keep(args.ds, ds, HALO, first_key);
            products_wait<0>();
            if (thread == 0) barrier_arrive(empty + 8 * next_stage);
        }

#pragma unroll
        for (int h = 0; h < 2; h++) {
            const int row = ds_row + local_row + 8 * h;
            if (!is_own(row)) continue;
            const int64_t of_row = (int64_t)batch_head * args.at.query_rows + row;
            uint32_t* out = (uint32_t*)(args.dq + of_row * HEAD_DIM + column);
#pragma unroll
            for (int b = 0; b < HEAD_DIM / 8; b++)
                out[4 * b] = pack<ELEMENT>(dq[4 * b + 2 * h] * ds_unit, dq[4 * b + 2 * h + 1] * ds_unit);
        }

        fence_async_proxy_everywhere();  // what is stored will be copied
        part_barrier<WARPGROUPS * 128>();
        if (threadIdx.x == 0) count_up(args.chunks.rows_done + (int)load_shared(shared + WORK + 4));

        // dweight[8 i + y, n]: tap 7 - i, score column y and column n - LEFT of c, both counted from the same 8 columns.
        // One tap of the weight is a diagonal of 8 of them.
        warpgroup_barrier(warpgroup + 1);
#pragma unroll
        for (int i = 0; i < 12; i++)
            store_shared(scores_at + ((local_row + i / 2 % 2 * 8) * 24 + i / 4 * 8 + column + i % 2) * 4,
                         __float_as_uint(dweight[i]));
        warpgroup_barrier(warpgroup + 1);
        const float dweight_unit = args.scale / grad_factor;
        const int64_t of_block = (int64_t)batch_head * args.chunks.all_row_blocks + (int)load_shared(shared + WORK + 8);
        float* sums = args.dweight + (of_block * WARPGROUPS + warpgroup) * (QUERY_TAPS * KEY_TAPS);
        for (int i = thread; i < QUERY_TAPS * KEY_TAPS; i += 128) {
            const int tap = QUERY_TAPS - 1 - i / KEY_TAPS, key_tap = i % KEY_TAPS;
            float sum = 0;
            for (int y = 0; y < 8; y++)
                sum += __uint_as_float(load_shared(scores_at + (((7 - tap) * 8 + y) * 24 + y + LEFT + PAD - key_tap) * 4));
            sums[i] = sum * dweight_unit;
        }
    }
}
