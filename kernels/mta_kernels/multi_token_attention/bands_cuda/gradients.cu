// Both gradients of a convolution, in one pass over its input x and the gradient `grad` of its output:
//
//   out = the transposed convolution of grad,   dtaps[a, b] = sum over i, j of grad[i, j] x[i - HALO + a, j - PAD + b],
//   and with DELTA   delta[i] = sum over j of x[i, j] out[i, j], of each warp's keys.
//
// A row of x is multiplied by the QUERY_TAPS rows of grad that saw it when the last of them is read. Its row of out is
// complete then, too. For dtaps a product's depth is 16 chunks. It sums products of 8 keys of two rows of grad by 8 of
// x, and a task ends with the sums over diagonals. Rows of grad that the chunk does not own add nothing to dtaps.
//
// A score is 4 bytes read, times 1 + HALO / run, and 2 written. At 4.1 TB/s an SM of 132 has 43 cycles for 128 keys of
// a row. At 6 x 11 taps these take 15 products 16 deep and 6 products 8 deep, 30 cycles.
#include "products.cuh"

constexpr int BACK_PAD = KEY_TAPS - 1 - PAD;
constexpr int OWN_X = Reach<PAD>::LEFT, OWN_GRAD = Reach<BACK_PAD>::LEFT;  // shifts of a warp's own keys
constexpr int PAIRS = (QUERY_TAPS + 1) / 2;  // of rows of grad
constexpr int MATRICES = 2 * EIGHTS + 2, LOADS = (MATRICES + 3) / 4;
constexpr bool SCALED_BY_DOCUMENT = DOCUMENTS && SCALED<ELEMENT>;  // else one scale a task
constexpr int SUMS = QUERY_TAPS * EIGHTS * 8 * 8 * 4;  // bytes
static_assert((2 * RING > SUMS ? 2 * RING : SUMS) == SHARED_BYTES, "as in bands.py");

// The rows of grad that saw a row of x, by age from the oldest: ages p and p + PAIRS are the A of a product. An even number
// of rows: where QUERY_TAPS is odd, the row before, too. In step i the pair with the newest is number i % PAIRS.
struct Window {
    uint32_t pairs[PAIRS][4] = {};

    DEVICE void add(int step, uint32_t low, uint32_t high) {  // replaces the oldest
        uint32_t(&pair)[4] = pairs[step % PAIRS];
        pair[0] = pair[1], pair[1] = low, pair[2] = pair[3], pair[3] = high;
    }
    DEVICE const uint32_t (&of_age(int step, int age) const)[4] { return pairs[(step + 1 + age) % PAIRS]; }
    DEVICE void end_turn() {  // indices start at 0 again
        if (QUERY_TAPS % PAIRS == 0) return;
        const Window old = *this;
#pragma unroll
        for (int p = 0; p < PAIRS; p++)
#pragma unroll
            for (int i = 0; i < 4; i++) pairs[p][i] = old.pairs[(p + QUERY_TAPS) % PAIRS][i];
    }
};

// Sums of grad times x: ages p (0, 1) and p + PAIRS (2, 3), key lane / 4 of grad's eight by keys from 2 (lane % 4) on of
// x's eights.
struct TapSums {
    float sums[PAIRS][EIGHTS][4] = {};

    // `rows` are the matrices of x, two for each shift.
    DEVICE void add(int step, const Window& window, const uint32_t (&rows)[LOADS][4]) {
#pragma unroll
        for (int p = 0; p < PAIRS; p++)
#pragma unroll
            for (int i = 0; i < EIGHTS; i++)
                multiply<ELEMENT>(sums[p][i], window.of_age(step, p), matrix(rows, 2 * i), matrix(rows, 2 * i + 1));
    }

    // Adds up diagonals, in `shared`, and stores them times `unit` to `partial [QUERY_TAPS, KEY_TAPS]`.
    DEVICE void store(uint32_t shared, float* partial, float unit) const {
        const int lane = thread_index();
        const auto place = [&](int row, int x_key, int grad_key) {
            return shared + ((row * EIGHTS * 8 + x_key) * 8 + grad_key) * 4;
        };
        __syncwarp();
#pragma unroll
        for (int row = 0; row < QUERY_TAPS; row++) {
            const int age = row + QUERY_TAPS % 2;
#pragma unroll
            for (int i = 0; i < EIGHTS * 2; i++)
                store_shared(place(row, i / 2 * 8 + lane % 4 * 2 + i % 2, lane / 4),
                             __float_as_uint(sums[age % PAIRS][i / 2][age / PAIRS * 2 + i % 2]));
        }
        __syncwarp();
#pragma unroll 1
        for (int tap = lane; tap < QUERY_TAPS * KEY_TAPS; tap += 32) {
            const int row = QUERY_TAPS - 1 - tap / KEY_TAPS, shift = 8 * OWN_X - PAD + tap % KEY_TAPS;
            float sum = 0;
#pragma unroll
            for (int key = 0; key < 8; key++) sum += __uint_as_float(load_shared(place(row, shift + key, key)));
            partial[tap] += sum * unit;
        }
    }
};

// Sums over the warp of one number a step: lanes halve the steps among themselves, which saves shuffles later.
struct StepSums {
    float one, two, four, all;

    DEVICE static float halve(float a, float b, int bit) {  // lanes with the bit get the sum of b, others of a
        const bool upper = thread_index() & bit;
        return (upper ? b : a) + __shfl_xor_sync(~0u, upper ? a : b, bit);
    }
    DEVICE void add(int step, float x) {
        if (step % 2 == 0) return void(one = x);
        x = halve(one, x, 16);
        if (step % 4 == 1) return void(two = x);
        x = halve(two, x, 8);
        if (step == 3) return void(four = x);
        all = halve(four, x, 4);
    }
    DEVICE static int step_of_lane() {
        return thread_index() / 16 + thread_index() / 8 % 2 * 2 + thread_index() / 4 % 2 * 4;
    }
    DEVICE float of_lane() {
#pragma unroll
        for (int step = QUERY_TAPS; step < 8; step++) add(step, 0);
#pragma unroll
        for (int other = 2; other > 0; other /= 2) all += __shfl_xor_sync(~0u, all, other);
        return all;
    }
};

extern "C" __global__ void __launch_bounds__(32, BLOCKS_AN_SM)
    convolution_gradients(const __grid_constant__ Arguments args) {
    const Task task(args);
    const int lane = thread_index();
    const auto delta = [&](int row) {
        return args.delta + (((int64_t)task.batch_head * args.rows + row) * args.key_tiles + task.key_tile);
    };
    if (!task.visible(args, HALO)) {
        for (int row = task.first + lane; DELTA && row < task.after; row += 32) *delta(row) = 0;
        return store_zeros(args, task, args.out);
    }
    const uint32_t ring = shared_memory();  // of grad, then of x
    const Bands<BACK_PAD, true> bands(args.taps + task.batch_head % args.heads * QUERY_TAPS * KEY_TAPS);
    // As rows: grad, and x's own keys. As columns: x, and grad's own keys.
    uint32_t by_rows[LOADS], by_columns[LOADS];
#pragma unroll
    for (int i = 0; i < LOADS; i++) {
        const bool own = 4 * i + lane / 8 >= 2 * EIGHTS;
        const uint32_t chunk = ring + matrix_chunk(own ? 4 * i - 2 * EIGHTS : 4 * i, own ? 2 : MATRICES);
        by_rows[i] = chunk + (own ? RING + OWN_X * 16 : 0);
        by_columns[i] = chunk + (own ? OWN_GRAD * 16 : RING);
    }
    const Copies copies(args);
    float* const partial = args.partial + ((int64_t)task.batch_head * args.tasks + task.index) * (QUERY_TAPS * KEY_TAPS);
    TapSums tap_sums;
#pragma unroll 1
    for (int begin = task.first; begin < task.after;) {
        const Segment segment(args, begin, task.after);
        const int turns = (segment.stop - begin + HALO + QUERY_TAPS - 1) / QUERY_TAPS;
        const Segment of_x = segment.own_rows();
        const auto load = [&](int turn) {
            const uint32_t stage = ring + turn % STAGES * STAGE;
            const int row = begin + turn * QUERY_TAPS;
            if (turn < turns) {
                copies.load<OWN_GRAD>(args, task, segment, args.grad, stage, row);
                copies.load<OWN_X>(args, task, of_x, args.x, stage + RING, row - HALO);
            }
            copies_commit();
        };
        RowSums sums;
        Window window;
        __syncwarp();  // all lanes have read the segment before
#pragma unroll 1
        for (int turn = 0; turn < STAGES - 1; turn++) load(turn);
#pragma unroll 1
        for (int turn = 0; turn < turns; turn++) {
            copies_wait<STAGES - 2>();
            __syncwarp();
            load(turn + STAGES - 1);
            const int stage = turn % STAGES * STAGE, first = begin + turn * QUERY_TAPS - HALO;
            const auto compute = [&](auto whole) {
                const int key = task.first_key + lane * 2;
                ELEMENT* out = args.out + (task.place + (int64_t)first * args.pitch + key);
                uint32_t rows[2][LOADS][4], columns[2][LOADS][4];  // of a step and the next
                const auto load_step = [&](int step) {
#pragma unroll
                    for (int i = 0; i < LOADS; i++) {
                        load_matrices(rows[step % 2][i], by_rows[i] + stage + step * ROW);
                        load_matrices_transposed(columns[step % 2][i], by_columns[i] + stage + step * ROW);
                    }
                };
                StepSums of_rows;
                load_step(0);
#pragma unroll
                for (int step = 0; step < QUERY_TAPS; step++, out += args.pitch) {
                    if (step + 1 < QUERY_TAPS) load_step(step + 1);
                    const uint32_t(&of_grad)[LOADS][4] = rows[step % 2], (&of_x)[LOADS][4] = columns[step % 2];
                    const int row = first + step, read = row + HALO;  // of x and out; of grad
                    const bool owned = read >= args.above && read < args.above + args.owned;
                    sums.add(step, of_grad, bands);
                    window.add(step, owned ? matrix(of_x, 2 * EIGHTS) : 0, owned ? matrix(of_x, 2 * EIGHTS + 1) : 0);
                    tap_sums.add(step, window, of_x);
                    const float(&sum)[4] = sums.sums[step];
                    if (whole.value || (row >= begin && row < segment.stop))
                        store_keys<whole.value>(args, out, row, key, sum);
                    float product = 0;  // of x and out as stored: a row's logit gradients must add up to zero
#pragma unroll
                    for (int i = 0; i < 4; i++)
                        product += number_of(pack<ELEMENT>(sum[i / 2 * 2], sum[i / 2 * 2 + 1]), i % 2) *
                                   number_of(matrix(of_grad, 2 * EIGHTS + i / 2), i % 2);
                    if (DELTA) of_rows.add(step, product);
                    sums.clear(step);
                }
                window.end_turn();
                if (!DELTA) return;
                const int step = StepSums::step_of_lane(), row = first + step;
                const float sum = of_rows.of_lane();
                if (lane % 4 == 0 && step < QUERY_TAPS && row >= begin && row < segment.stop)
                    *delta(row) = sum;
            };
            if (turn_is_whole(args, task, segment, first)) compute(Constant<true>());
            else compute(Constant<false>());
        }
        copies_wait<0>();
        if (SCALED_BY_DOCUMENT) {
            tap_sums.store(ring, partial, gradient_unit(args, 0, begin));
            tap_sums = TapSums();
        }
        begin = segment.stop;
    }
    if (!SCALED_BY_DOCUMENT) tap_sums.store(ring, partial, gradient_unit(args, task.batch_head / args.heads, 0));
}
