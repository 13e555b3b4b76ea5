// The loop of both kernels. In a turn, each stage has another tick, and a stage that has none does nothing:
//
//   load      LEAD ticks ahead of the convolution: copies begin
//   arrive    the next tick: what has come is masked, and of logits made probabilities
//   convolve  this tick: a warp has a head at a time
//   mix       the tick before, from the other buffer of results: a warp has a row at a time
//
// One barrier a turn. Half of the warps arrive and mix first, the others convolve first, so that tensor cores, shared
// memory and the units for powers of two are busy at the same time. With one buffer of results a second barrier stands
// between convolve and mix, which then has the same tick.
#pragma once
#include "convolve.cuh"
#include "load.cuh"
#include "mix.cuh"

template <bool Value> struct Constant {
    static constexpr bool value = Value;
};

DEVICE void convolve_heads(const Arguments& args, const Tick& tick, uint32_t shared, uint32_t result,
                           const Taps (&taps)[HEADS_A_WARP]) {
    if (!tick.convolves()) return;
    const int warp = thread_index() / 32;
    const auto each = [&](auto bounds, const auto& reach) {
#pragma unroll
        for (int i = 0; i < HEADS_A_WARP; i++) {
            const int head = i * WARPS + warp;
            if (head < HEADS)
                convolve<decltype(bounds)::value>(tick, shared + head * RING_HEAD, result + head * PLANE, taps[i], reach);
        }
    };
    if constexpr (DOCUMENTS) {
        const Reach reach(args, tick, thread_index() % 32);
        if (!reach.unbounded) return each(Constant<true>(), reach);
    }
    each(Constant<false>(), AllRows());
}

// `sums` and `use` are mix.cuh's, with the tick before; `end(tick)` comes after the last of some rows.
template <class Sums, class Use, class End>
DEVICE void run_steps(const Arguments& args, Sums (&sums)[ROWS_A_WARP][BLOCKS][2], Use use, End end) {
    const uint32_t shared = shared_memory();
    const int lane = thread_index() % 32, warp = thread_index() / 32;
    Taps taps[HEADS_A_WARP];
#pragma unroll
    for (int i = 0; i < HEADS_A_WARP; i++) taps[i].load(args, min(i * WARPS + warp, HEADS - 1), lane);
    Mixing mixing;
    mixing.load(args, shared);
#pragma unroll 1
    for (int i = HEADS * PLANE / 16 + thread_index(); i < RESULT / 16; i += THREADS)  // of heads that there are not
        for (int buffer = 0; buffer < RESULTS; buffer++)
            store_shared(shared + RESULTS_AT + buffer * RESULT + i * 16, uint4{0, 0, 0, 0});

    const int64_t my_chunk = first_chunk(args), my_numbers = first_numbers(args);
    const auto tick_at = [&](int index) { return shared + TICKS_AT + index % TICKS * TICK; };
    const auto mix = [&](const Tick& tick, uint32_t result) {
        if (!tick.convolves()) return;
        mix_rows(args, tick, mixing, shared, result, my_numbers, sums, [&](auto&&... x) { use(tick, x...); });
        if (tick.kind == LAST) end(tick);
    };
    const auto arrive_next = [&](int index) {
        copies_wait<LEAD - 1>();
        arrive(args, Tick::at(tick_at(index)), shared);
    };
    const bool thinks = thread_index() == THREADS - 32, convolves_first = RESULTS == 1 || warp / 4 % 2 == 0;
    Stream stream(args);
    // Tick i is convolved in turn i. Tick -1, before the first, is nothing.
    if (thinks) {
        Tick().store(tick_at(TICKS - 1));
#pragma unroll 1
        for (int i = 0; i <= LEAD; i++) stream.next(args).store(tick_at(i));
    }
    __syncthreads();
#pragma unroll 1
    for (int i = 0; i < LEAD; i++) load(args, Tick::at(tick_at(i)), shared, my_chunk);
    arrive_next(0);
    __syncthreads();
#pragma unroll 1
    for (int turn = 0;; turn++) {
        const Tick before = Tick::at(tick_at(turn + TICKS - 1)), now = Tick::at(tick_at(turn));
        if (before.kind == NOTHING && now.kind == NOTHING) break;
        const uint32_t result = shared + RESULTS_AT + turn % RESULTS * RESULT;
        load(args, Tick::at(tick_at(turn + LEAD)), shared, my_chunk);
        if (thinks) stream.next(args).store(tick_at(turn + LEAD + 1));
#pragma unroll 1
        for (int half = 0; half < 2; half++) {
            if ((half == 0) == convolves_first) {
                convolve_heads(args, now, shared, result, taps);
                if (RESULTS == 1) __syncthreads();
            } else {
                if (RESULTS == 1) mix(now, result);
                else mix(before, shared + RESULTS_AT + (turn + 1) % 2 * RESULT);
                arrive_next(turn + 1);
            }
        }
        __syncthreads();
    }
}
