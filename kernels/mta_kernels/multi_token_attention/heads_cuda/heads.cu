// Probabilities x convolved, R, with their heads mixed by post, to `out`, and the gradient of that in place of `grad`:
//
//   grad[g] := sum over h of post[g, h] grad[h],   out[h] := sum over g of R[g] post[g, h],
//   dpost[g, h] += sum over keys and owned rows of R[g] grad[h]
//
// A warp of a block has a head, and walks down 128 keys of it as in bands_cuda/convolve.cu. R of a turn's rows of all heads
// lies in shared memory, twice: while some warps mix one turn, others convolve the next.
//
// Constants: those of bands_cuda/layout.cuh; HEADS, 1 to 16. A score takes 4 bytes read, 2 of them times 1 + HALO / run,
// and 4 written: on an H200 an SM has a turn's 98 KB in 5500 cycles. Its warps could issue four times what they do then.
#include <products.cuh>

constexpr int PITCH = KEYS * 2 + 16;  // of a row of a head
#include "mixing.cuh"

constexpr int THREADS = 32 * HEADS;
constexpr int TILE_ROW = HEADS * PITCH, TILE = QUERY_TAPS * TILE_ROW;
// Tiles of the gradient, one more than stages: a turn is loaded while others may still mix the turn before the last.
constexpr int SLOTS = STAGES + 1;
constexpr int TILES_AT = HEADS * RING, GRAD_AT = TILES_AT + 2 * TILE;
static_assert(GRAD_AT + SLOTS * TILE == SHARED_BYTES, "as in plan.py");
static_assert(HEADS * HEADS * HEADS * 4 <= SHARED_BYTES, "room for sums of all warps");
constexpr int LOADS = (2 * EIGHTS + 3) / 4;                // of four matrices
constexpr int HALF = 64, HALVES = QUERY_TAPS * KEYS / HALF;  // keys that a warp mixes at a time, and how many times a turn

// x of Keys keys to x mixed by post, and the gradient of that to that of x.
template <int Keys>
DEVICE void mix_both(uint32_t x, uint32_t grad, uint32_t rows, const Weights& post, const Weights& back, bool owned,
                     Products& dpost) {
#pragma unroll
    for (int first = 0; first < Keys; first += 16, x += 32, grad += 32) {
        uint32_t by_keys[2][4], by_heads[2][4], rounded[4];
        load_matrices_transposed(by_keys[0], x + rows);
        load_matrices_transposed(by_keys[1], grad + rows);
        if (owned) {
            load_matrices(by_heads[0], x + rows);
            load_matrices(by_heads[1], grad + rows);
            dpost.add(by_heads[0], by_heads[1]);
        }
        Numbers numbers;
        mix(numbers, post, by_keys[0]);
        round_pairs(rounded, numbers);
        store_pairs(x, rounded);
        mix(numbers, back, by_keys[1]);
        round_pairs(rounded, numbers);
        store_pairs(grad, rounded);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) convolve_heads(const __grid_constant__ Arguments args) {
    const int warp = thread_index() / 32, lane = lane_index();
    const int tasks = Task::of_a_head(args), batch = block_index() / tasks;
    const Task task(args, batch * HEADS + warp, block_index() % tasks);
    if (!task.visible(args, 0)) {
        store_zeros(args, task, args.out);
        return store_zeros(args, task, args.grad);
    }
    const uint32_t shared = shared_memory(), ring = shared + warp * RING;
    const Bands<PAD, false> bands(args.taps + warp * QUERY_TAPS * KEY_TAPS);
    const Copies copies(args);
    uint32_t chunks[LOADS];
#pragma unroll
    for (int i = 0; i < LOADS; i++) chunks[i] = ring + matrix_chunk(4 * i, 2 * EIGHTS);
    const Weights post(args.mix, 1, HEADS), back(args.mix, HEADS, 1);
    const uint32_t rows = matrix_row();
    const int64_t head_stride = (int64_t)args.rows * args.pitch, first_head = batch * HEADS * head_stride;
    Products dpost;
    int before = 0;  // turns of the segments before
#pragma unroll 1
    for (int begin = task.first; begin < task.after;) {
        const Segment segment(args, begin, task.after);
        const int turns = (segment.stop - begin + HALO + QUERY_TAPS - 1) / QUERY_TAPS;
        const auto stored = [&](int row, int key) {  // by this segment
            return row >= begin && row < segment.stop && key < stored_end(args, row);
        };
        const auto slot = [&](int turn) { return shared + GRAD_AT + (before + turn) % SLOTS * TILE; };
        const auto load = [&](int turn) {
            const int first = begin - HALO + turn * QUERY_TAPS;
            if (turn < turns) {
                copies.load<Reach<PAD>::LEFT>(args, task, segment, args.x, ring + turn % STAGES * STAGE, first);
#pragma unroll
                for (int i = lane; i < QUERY_TAPS * KEYS / 8; i += 32) {
                    const int step = i / (KEYS / 8), row = first + step, key = task.first_key + i % (KEYS / 8) * 8;
                    if (!stored(row, key)) continue;
                    copy_async(slot(turn) + step * TILE_ROW + warp * PITCH + i % (KEYS / 8) * 16,
                               args.grad + task.place + (int64_t)row * args.pitch + key, true);
                }
            }
            copies_commit();
        };
        RowSums sums;
        __syncwarp();  // the segment before has been read
#pragma unroll 1
        for (int turn = 0; turn < STAGES - 1; turn++) load(turn);
#pragma unroll 1
        for (int turn = 0; turn < turns; turn++) {
            copies_wait<STAGES - 2>();
            __syncwarp();
            load(turn + STAGES - 1);
            const int stage = turn % STAGES * STAGE, first = begin + turn * QUERY_TAPS - HALO;
            const uint32_t tile = shared + TILES_AT + (before + turn) % 2 * TILE;
            const auto compute = [&](auto whole) {
                const int key = task.first_key + lane * 2;
                uint32_t numbers[2][LOADS][4];  // of a step and the next
                const auto load_step = [&](int step) {
#pragma unroll
                    for (int i = 0; i < LOADS; i++) load_matrices(numbers[step % 2][i], chunks[i] + stage + step * ROW);
                };
                load_step(0);
#pragma unroll
                for (int step = 0; step < QUERY_TAPS; step++) {
                    if (step + 1 < QUERY_TAPS) load_step(step + 1);
                    sums.add(step, numbers[step % 2], bands);
                    if (whole.value || stored(first + step, key)) {  // complete with what is read
                        uint32_t pairs[2];
                        visible_pairs<whole.value>(pairs, args, first + step, key, sums.sums[step]);
                        const uint32_t place = tile + step * TILE_ROW + warp * PITCH + lane * 4;
                        store_shared(place, pairs[0]), store_shared(place + 128, pairs[1]);
                    }
                    sums.clear(step);
                }
            };
            if (turn_is_whole(args, task, segment, first)) compute(Constant<true>());
            else compute(Constant<false>());
            __syncthreads();  // all heads are there, and nobody reads what lies where the next turn goes
#pragma unroll 1
            for (int half = (warp + 4 * turn) % HEADS; half < HALVES; half += HEADS) {
                const int row = first + half / 2, key = task.first_key + half % 2 * HALF;
                if (!stored(row, key)) continue;
                const uint32_t at = half / 2 * TILE_ROW + half % 2 * HALF * 2;
                const bool owned = row >= args.above && row < args.above + args.owned;
                mix_both<HALF>(tile + at, slot(turn) + at, rows, post, back, owned, dpost);
                __syncwarp();
                const int64_t place = first_head + (int64_t)row * args.pitch + key;
                store_heads<HALF>(args.out + place, head_stride, tile + at);
                store_heads<HALF>(args.grad + place, head_stride, slot(turn) + at);
            }
        }
        copies_wait<0>();
        before += turns, begin = segment.stop;
    }
    __syncthreads();
    dpost.for_all([&](int place, float sum) {
        store_shared(shared + (warp * HEADS * HEADS + place) * 4, __float_as_uint(sum));
    });
    __syncthreads();
    float* part = args.parts + ((int64_t)batch * args.tasks + task.index) * HEADS * HEADS;
#pragma unroll 1
    for (int i = thread_index(); i < HEADS * HEADS; i += THREADS) {
        float sum = 0;
#pragma unroll 1
        for (int of_warp = 0; of_warp < HEADS; of_warp++)
            sum += __uint_as_float(load_shared(shared + (of_warp * HEADS * HEADS + i) * 4));
        part[i] += sum;
    }
}
