// Mixes R, the convolved probabilities x, by post to `out`, and replaces `grad`, out's gradient, by R's gradient:
//
//   grad[g] := sum over h of post[g, h] grad[h],   out[h] := sum over g of R[g] post[g, h],
//   dpost[g, h] += sum over keys and owned rows of R[g] grad[h]
//
// walk.cuh lists the constants. A score is 4 bytes read, 2 of them times 1 + HALO / run, and 4 written.
// An SM of an H200 moves a turn's 98 KB in 5500 cycles, in which its warps issue a quarter of what they could.
#include "walk.cuh"

// Tiles of the gradient: STAGES - 1 turns are loaded ahead while the last TILES may still be in use.
constexpr int SLOTS = STAGES + TILES - 1, GRAD_AT = TILES_END;
static_assert(GRAD_AT + SLOTS * TILE == SHARED_BYTES, "as in heads.py");
static_assert(MIXERS * HEADS * HEADS * 4 <= SHARED_BYTES, "room for sums of all warps");

// Mixes x by post at Keys keys, and replaces the gradient of the mixed x by x's gradient.
template <int Keys>
DEVICE void mix_both(uint32_t x, uint32_t grad, uint32_t rows, const Weights& post, const Weights& back, bool owned,
                     ScaledProducts& dpost) {
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
    const Task task(args, batch * HEADS + min(warp, HEADS - 1), block_index() % tasks);
    if (!task.visible(args, 0)) {
        if (warp < HEADS) store_zeros(args, task, args.out), store_zeros(args, task, args.grad);
        return;
    }
    const uint32_t shared = shared_memory();
    const auto slot = [&](int turn) { return shared + GRAD_AT + turn % SLOTS * TILE; };
    ScaledProducts dpost;
    if (warp < HEADS) {
        allocate_registers();
        const Bands<PAD, false> bands(args.taps + warp * QUERY_TAPS * KEY_TAPS);
        const int turns = convolve_turns(
            args, task, bands, 0, lane * 4,
            [&](const Segment& segment, int turn, int first, bool whole) {
                const uint32_t ring = slot(turn) + warp * PITCH;
                const ELEMENT* rows = args.grad + (task.place + (int64_t)first * args.pitch + task.first_key);
                const auto copy = [&](int i) {
                    const int step = i / (KEYS / 8), key = i % (KEYS / 8) * 8;
                    copy_async(ring + step * TILE_ROW + key * 2, rows + ((int64_t)step * args.pitch + key), true);
                };
                if (whole) {
#pragma unroll
                    for (int i = lane; i < QUERY_TAPS * KEYS / 8; i += 32) copy(i);
                    return;
                }
#pragma unroll 1
                for (int i = lane; i < QUERY_TAPS * KEYS / 8; i += 32) {
                    const int row = first + i / (KEYS / 8), key = task.first_key + i % (KEYS / 8) * 8;
                    if (row >= segment.begin && row < segment.stop && key < stored_end(args, row)) copy(i);
                }
            },
            [](const Segment&, uint32_t, int) {});
        meet_mixers(turns);
    } else {
        deallocate_registers();
        const Weights post(args.mix, 1, HEADS), back(args.mix, HEADS, 1);
        const uint32_t rows = matrix_row();
        const int64_t head_stride = (int64_t)args.rows * args.pitch, first_head = batch * HEADS * head_stride;
        mix_turns(args, task, warp - HEADS, 0, [&](const Unit& unit) {
            if (unit.key >= stored_end(args, unit.row)) return;
            const uint32_t of_out = unit.tile(), of_grad = slot(unit.turn) + unit.at;
            const bool owned = unit.row >= args.above && unit.row < args.above + args.owned;
            if (owned) dpost.begin_row(gradient_unit(args, batch, unit.row));
            mix_both<UNIT>(of_out, of_grad, rows, post, back, owned, dpost);
            __syncwarp();
            const int64_t place = first_head + (int64_t)unit.row * args.pitch + unit.key;
            store_heads<UNIT>(args.out + place, head_stride, of_out);
            store_heads<UNIT>(args.grad + place, head_stride, of_grad);
        });
    }
    __syncthreads();
    if (warp >= HEADS)
        dpost.for_all([&](int place, float sum) {  // without the loss scale
            store_shared(shared + ((warp - HEADS) * HEADS * HEADS + place) * 4, __float_as_uint(sum));
        });
    __syncthreads();
    float* part = args.parts + ((int64_t)batch * args.tasks + task.index) * HEADS * HEADS;
#pragma unroll 1
    for (int i = thread_index(); i < HEADS * HEADS; i += THREADS) {
        float sum = 0;
#pragma unroll 1
        for (int mixer = 0; mixer < MIXERS; mixer++)
            sum += __uint_as_float(load_shared(shared + (mixer * HEADS * HEADS + i) * 4));
        part[i] += sum;
    }
}
