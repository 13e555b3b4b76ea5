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

constexpr int HEADS_A_WARP = (HEADS + WARPS - 1) / WARPS;

template <bool Value> struct Constant {
    static constexpr bool value = Value;
};
struct AllRows {
    int rows[INTERLEAVE][2];
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

// `use` is mix.cuh's, with the tick before; `end(tick)` comes after the last of some rows.
template <class Use, class End> DEVICE void run_steps(const Arguments& args, Use use, End end) {
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

    Stream stream(args);
    Tick ticks[LEAD + 2];  // mix, convolve, arrive ... load
#pragma unroll
    for (int i = 1; i <= LEAD; i++) {
        ticks[i] = stream.next(args);
        load(args, ticks[i], shared);
    }
    copies_wait<LEAD - 1>();
    arrive(args, ticks[1], shared);
    __syncthreads();
    const bool convolve_first = RESULTS == 1 || warp / 4 % 2 == 0;
    const auto mix = [&](const Tick& tick, uint32_t result) {
        if (!tick.convolves()) return;
        mix_rows(args, tick, mixing, shared, result, [&](const auto&... x) { use(tick, x...); });
        if (tick.kind == LAST) end(tick);
    };
    const auto arrive_next = [&] {
        copies_wait<LEAD - 1>();
        arrive(args, ticks[2], shared);
    };
#pragma unroll 1
    for (int turn = 0; ticks[0].kind != NOTHING || ticks[1].kind != NOTHING; turn++) {
        const uint32_t result = shared + RESULTS_AT + turn % RESULTS * RESULT;
        const uint32_t result_before = shared + RESULTS_AT + (turn + 1) % RESULTS * RESULT;
        ticks[LEAD + 1] = stream.next(args);
        load(args, ticks[LEAD + 1], shared);
        if (RESULTS == 1) {
            convolve_heads(args, ticks[1], shared, result, taps);
            __syncthreads();
            mix(ticks[1], result);
            arrive_next();
        } else if (convolve_first) {
            convolve_heads(args, ticks[1], shared, result, taps);
            mix(ticks[0], result_before);
            arrive_next();
        } else {
            arrive_next();
            mix(ticks[0], result_before);
            convolve_heads(args, ticks[1], shared, result, taps);
        }
        __syncthreads();
#pragma unroll
        for (int i = 0; i <= LEAD; i++) ticks[i] = ticks[i + 1];
    }
}
