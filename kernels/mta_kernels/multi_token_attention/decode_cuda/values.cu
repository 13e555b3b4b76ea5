// The kernel of a decode step that reads V: partial outputs of a program's keys.
//
// A warp makes probabilities of its head's logits, TURN keys at a time, and convolves them on top of what older rows add.
// Then the warps meet, and each mixes 8 keys of all heads. Of what comes out a warp takes its head's row, by which it
// multiplies the values: out^T [numbers x 1] = v^T p^T. The first values are on their way before there are logits.
#include "layout.cuh"

constexpr int A_PITCH = TURN * 2 + 16;                   // of a head's probabilities, before and after they are mixed
constexpr int P_COUNT = TURN + POST_KEY_TAPS - 1;        // probabilities that a turn is convolved of
constexpr int P_A_LANE = (P_COUNT + 31) / 32, KEYS_A_LANE = TURN / 32;
constexpr int ROW = POST_CONV ? P_COUNT * 4 : 0;         // of a warp
constexpr int UNMIXED_AT = HEADS * RING;
constexpr int MIXED_AT = POST_MIX ? UNMIXED_AT + HEADS * A_PITCH : UNMIXED_AT;
constexpr int ROWS_AT = MIXED_AT + HEADS * A_PITCH;
constexpr int FOUND_AT = ROWS_AT + HEADS * ROW;          // 2 HEADS maxima and sums of each head
static_assert(FOUND_AT + 2 * HEADS * 16 * 8 == SHARED_BYTES, "as in plan.py");
static_assert(POST_KEY_TAPS <= 32, "a lane has one tap");

// The logsumexp of this warp's head, of what all programs of a sequence have found; 0 without keys.
DEVICE float logsumexp_of(const Arguments& args, const Segment& segment, uint32_t shared) {
    const int lane = threadIdx.x % 32, head = threadIdx.x % 16;
    const float* found = args.found + (int64_t)(segment.first_program + segment.sequence) * HEADS + head;
    Total total;
    total.clear();
    constexpr int AT_ONCE = 5;
#pragma unroll 1
    for (int first = threadIdx.x / 16; first < segment.programs; first += AT_ONCE * 2 * HEADS) {
        float some[AT_ONCE];
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++) {
            const int program = first + i * 2 * HEADS;
            some[i] = program < segment.programs && head < HEADS ? __ldcg(found + program * HEADS) : MINUS_INFINITY;
        }
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++) total.add(some[i], 1);
    }
    total.store(shared + FOUND_AT + threadIdx.x * 8);
    __syncthreads();
    total.clear();
    if (lane < 2 * HEADS) total.load(shared + FOUND_AT + (lane * 16 + threadIdx.x / 32) * 8);
    total.add_lanes(1, 32);
    return total.logarithm(0);
}

// A turn's logits of this warp's head, and what older rows add: on their way from global memory.
struct Fetched {
    ELEMENT logits[P_A_LANE];
    float older[KEYS_A_LANE];

    DEVICE void load(const Arguments& args, const Segment& segment, int first) {
        const int lane = threadIdx.x % 32, head = threadIdx.x / 32;
        const ELEMENT* row = newest_logits(args, segment.sequence, segment.length, head);
        const float* add = args.older + segment.sequence * args.stride_ob + head * args.stride_oh;
#pragma unroll
        for (int i = 0; i < P_A_LANE; i++) {
            const int key = first - POST_PAD + lane + 32 * i;
            const bool there = key >= 0 && key < segment.length && key < segment.stop - POST_PAD + POST_KEY_TAPS - 1;
            logits[i] = from_float<ELEMENT>(MINUS_INFINITY);
            if (there) logits[i] = row[key * args.stride_ln];
        }
#pragma unroll
        for (int i = 0; i < KEYS_A_LANE; i++) {
            const int key = first + lane + 32 * i;
            older[i] = OLDER && key < segment.stop ? add[key] : 0;
        }
    }
    // This warp's row of probabilities, convolved, to `to`: zeros from the segment's end on.
    DEVICE void make_probabilities(const Segment& segment, int first, float logsumexp, float tap, uint32_t row, uint32_t to) {
        const int lane = threadIdx.x % 32;
        float sums[P_A_LANE];
#pragma unroll
        for (int i = 0; i < P_A_LANE; i++) {
            sums[i] = to_float(from_float<ELEMENT>(exp2_fast((to_float(logits[i]) - logsumexp) * LOG2E)));
            if (POST_CONV && lane + 32 * i < P_COUNT) store_shared(row + (lane + 32 * i) * 4, sums[i]);
        }
        if (POST_CONV) {
            __syncwarp();
#pragma unroll
            for (int i = 0; i < KEYS_A_LANE; i++) sums[i] = older[i];
#pragma unroll
            for (int b = 0; b < POST_KEY_TAPS; b++) {
                const float of_b = __shfl_sync(~0u, tap, b);
#pragma unroll
                for (int i = 0; i < KEYS_A_LANE; i++) sums[i] += of_b * load_shared_float(row + (lane + 32 * i + b) * 4);
            }
        }
#pragma unroll
        for (int i = 0; i < KEYS_A_LANE; i++) {
            const bool there = first + lane + 32 * i < segment.stop;
            store_shared(to + (lane + 32 * i) * 2, from_float<ELEMENT>(there ? sums[i] : 0).bits);
        }
    }
};

// Mixes 8 keys of all heads.
DEVICE void mix(const Mixing& mixing, uint32_t unmixed, uint32_t mixed, int first) {
    const int lane = threadIdx.x % 32;
    const auto number = [&](int head) -> uint32_t {
        if (head >= HEADS) return 0;
        return load_shared(unmixed + head * A_PITCH + (first + lane / 8 * 2) * 2) >> lane / 4 % 2 * 16 & 0xFFFF;
    };
    const int head = lane % 4 * 2;
    float sums[4] = {};
    multiply<ELEMENT>(sums, mixing.coarse, number(head + 1) << 16 | number(head), number(head + 9) << 16 | number(head + 8));
#pragma unroll
    for (int half = 0; half < 2; half++)
        if (lane / 4 + half * 8 < HEADS)
            store_shared(mixed + (lane / 4 + half * 8) * A_PITCH + (first + lane % 4 * 2) * 2,
                         pack<ELEMENT>(sums[half * 2], sums[half * 2 + 1]));
}

// out^T += v^T p^T of a tile; all columns of the products are the one row of probabilities.
DEVICE void add_values(uint32_t tile, uint32_t probabilities, float (&out)[STEPS][4]) {
    const int lane = threadIdx.x % 32;
    const uint32_t row = tile + (lane / 16 * 8 + lane % 8) * PITCH + lane / 8 % 2 * 16;
#pragma unroll
    for (int half = 0; half < KEYS / 16; half++) {
        const uint32_t low = load_shared(probabilities + (half * 16 + lane % 4 * 2) * 2);
        const uint32_t high = load_shared(probabilities + (half * 16 + 8 + lane % 4 * 2) * 2);
#pragma unroll
        for (int step = 0; step < STEPS; step++) {
            uint32_t values[4];
            load_matrices_transposed(values, row + half * 16 * PITCH + step * 32);
            multiply<ELEMENT>(out[step], values, low, high);
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS + OTHER_THREADS, 1) mta_decode_values(const __grid_constant__ Arguments args) {
    let_next_start();
    const uint32_t shared = shared_memory();
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const uint32_t ring = shared + warp * RING, unmixed = shared + UNMIXED_AT, mixed = shared + MIXED_AT;
    Work work;
    if (!work.begin(args.lengths, blockIdx.x, args.programs, args.splits)) return;
    Stream stream;
    const auto begin = [&](const Segment& segment) {
        stream.begin(args, args.v, segment, ring, segment.start, segment.start, segment.stop,
                     (segment.stop - segment.start + KEYS - 1) / KEYS);
    };
    begin(work.segment);
    stream.ask_ahead(args, args.v);
    Mixing mixing;
    if (POST_MIX) mixing.load<POST_MIX_FLOAT>(args.post_mix, true);
    float tap = 0;
    if (POST_CONV && lane < POST_KEY_TAPS) tap = args.post_taps.at<POST_TAPS_FLOAT>(warp, args.post_query_taps - 1, lane);
    wait_for_launch_before();
    for (bool more = true; more;) {
        Segment segment = work.segment;
        work.count_sharers(segment);
        Fetched fetched;
        fetched.load(args, segment, segment.start);
        const float logsumexp = logsumexp_of(args, segment, shared);
        if (args.seen && segment.first_program == blockIdx.x && lane == 0) {
            const int slot = max(segment.length - 1, 0) % args.slots;
            if (segment.length > 0)
                args.logsumexp[segment.sequence * args.stride_sb + warp * args.stride_sh + slot * args.stride_ss] = logsumexp;
            if (warp == 0) args.seen[segment.sequence * args.stride_seen] = segment.length;
        }
        float out[STEPS][4] = {};
#pragma unroll 1
        for (int turn = 0; turn * TILES_A_TURN < stream.tiles; turn++) {
            const int first = segment.start + turn * TURN, last = min(stream.tiles - turn * TILES_A_TURN, TILES_A_TURN);
            fetched.make_probabilities(segment, first, logsumexp, tap, shared + ROWS_AT + warp * ROW,
                                       unmixed + warp * A_PITCH);
            if (POST_MIX) {
                __syncthreads();
#pragma unroll 1
                for (int job = warp; job < last * (KEYS / 8); job += HEADS) mix(mixing, unmixed, mixed, job * 8);
                __syncthreads();
            }
            fetched.load(args, segment, first + TURN);
            __syncwarp();
#pragma unroll 1
            for (int i = 0; i < last; i++) {
                const int tile = turn * TILES_A_TURN + i;
                stream.load(args, args.v, ring, tile + STAGES - 1);
                copies_wait<STAGES - 1>();
                __syncwarp();
                add_values(ring + tile % STAGES * TILE, mixed + warp * A_PITCH + i * KEYS * 2, out);
                __syncwarp();
            }
        }
        more = work.advance();
        if (more) begin(work.segment);
        float* to = args.partial + ((int64_t)(blockIdx.x + segment.sequence) * HEADS + warp) * HEAD_DIM;
#pragma unroll
        for (int i = 0; i < 2 * STEPS; i++)
            if (lane % 4 == i % 4) to[i * 8 + lane / 4] = out[i / 2][i % 2 * 2];
        __syncthreads();
    }
}
