// The kernel of a decode step that reads V: partial outputs of a program's keys.
//
// A warp computes probabilities from its head's logits, of the newest row and of the state's earlier rows, TURN keys at a
// time, and convolves them (bands.cuh). Then the warps synchronise, and each mixes 8 keys of all heads. Each warp multiplies
// its head's mixed row by the values: out^T [numbers x 1] = v^T p^T. The first values are in flight before there are
// logits.
#include "bands.cuh"
#include "layout.cuh"

constexpr int BEFORE = keys_before(POST_PAD);
constexpr int A_PITCH = TURN * 2 + 16;                   // of a head's probabilities, before and after they are mixed
constexpr int NEWEST = POST_QUERY_TAPS - 1;  // the newest row; earlier rows are the state's
constexpr int AT_ONCE = NEWEST < 1 ? 1 : NEWEST < 8 ? NEWEST : 8;  // of these, in flight
constexpr int TAPS = POST_QUERY_TAPS * BAND_BYTES;       // of a warp
constexpr int ROWS = 16 * 4;                             // of a warp: logsumexp of each row
constexpr int UNMIXED_AT = HEADS * RING;
constexpr int MIXED_AT = POST_MIX ? UNMIXED_AT + HEADS * A_PITCH : UNMIXED_AT;
constexpr int TAPS_AT = MIXED_AT + HEADS * A_PITCH;
constexpr int ROWS_AT = TAPS_AT + HEADS * TAPS;
constexpr int FOUND_AT = ROWS_AT + HEADS * ROWS;         // 2 HEADS maxima and sums of each head
static_assert(FOUND_AT + 2 * HEADS * 16 * 8 == SHARED_BYTES, "as in step.py");
static_assert(POST_QUERY_TAPS <= 16 && POST_KEY_TAPS <= 16, "ROWS; a block's keys");

// The logsumexp of this warp's head, over all programs of a sequence; 0 without keys.
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

// A row's position, and the slot of its logits; there are as many slots as rows.
DEVICE int position_of(const Segment& segment, int row) { return segment.length - POST_QUERY_TAPS + row; }
DEVICE int newest_slot(const Arguments& args, const Segment& segment) { return max(segment.length - 1, 0) % args.slots; }
DEVICE int slot_of(const Arguments& args, int newest, int row) {
    const int slot = newest - (NEWEST - row);
    return slot < 0 ? slot + args.slots : slot;
}

// Loads logits of a row of this warp's head from global memory: 8 keys of a lane, as a band takes them.
DEVICE uint4 load_logits(const Arguments& args, const Segment& segment, int newest, int row, int first) {
    const int lane = threadIdx.x % 32, key = first - BEFORE + lane / 4 * 16 + lane % 4 * 8, position = position_of(segment, row);
    uint32_t pairs[4] = {};
    if (key < 0 || key > position || key >= segment.stop + 16) return uint4{0, 0, 0, 0};
    const ELEMENT* from = args.logits + segment.sequence * args.stride_lb + threadIdx.x / 32 * args.stride_lh +
                          slot_of(args, newest, row) * args.stride_ls + key * args.stride_ln;
    if (args.wide) return *(const uint4*)from;
#pragma unroll
    for (int e = 0; e < 8; e++)
        if (key + e <= position) pairs[e / 2] |= (uint32_t)from[e * args.stride_ln].bits << e % 2 * 16;
    return uint4{pairs[0], pairs[1], pairs[2], pairs[3]};
}

// sums += a row's probabilities, convolved.
DEVICE void convolve(const Segment& segment, uint4 logits, int row, int first, uint32_t taps, uint32_t rows, float (&sums)[4]) {
    const int lane = threadIdx.x % 32, key = first - BEFORE + lane / 4 * 16 + lane % 4 * 8;
    const int seen = key < 0 ? 0 : position_of(segment, row) + 1 - key;  // of these 8 keys
    const float logsumexp = load_shared_float(rows + row * 4);
    const uint32_t pairs[4] = {logits.x, logits.y, logits.z, logits.w};
    uint32_t packed[4];
#pragma unroll
    for (int e = 0; e < 4; e++) {
        const float low = to_float(ELEMENT{(uint16_t)pairs[e]}), high = to_float(ELEMENT{(uint16_t)(pairs[e] >> 16)});
        packed[e] = pack<ELEMENT>(2 * e < seen ? exp2_fast((low - logsumexp) * LOG2E) : 0,
                                  2 * e + 1 < seen ? exp2_fast((high - logsumexp) * LOG2E) : 0);
    }
    Band<POST_PAD> band;
    band.load(taps + row * BAND_BYTES);
    band.multiply_by(uint4{packed[0], packed[1], packed[2], packed[3]}, sums);
}

// The rows before the newest, AT_ONCE at a time.
struct OlderRows {
    uint4 logits[AT_ONCE];

    DEVICE void load(const Arguments& args, const Segment& segment, int row, int first) {
        const int newest = newest_slot(args, segment);
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++)
            if (row + i < NEWEST) logits[i] = load_logits(args, segment, newest, row + i, first);
    }
    // Adds all of them; the first are loaded already.
    DEVICE void add(const Arguments& args, const Segment& segment, int first, uint32_t taps, uint32_t rows, float (&sums)[4]) {
#pragma unroll 1
        for (int row = 0; row < NEWEST; row += AT_ONCE) {
            if (row > 0) load(args, segment, row, first);
#pragma unroll
            for (int i = 0; i < AT_ONCE; i++)
                if (row + i < NEWEST) convolve(segment, logits[i], row + i, first, taps, rows, sums);
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
    uint32_t numbers[1][2] = {{number(head + 1) << 16 | number(head), number(head + 9) << 16 | number(head + 8)}};
    mix_heads<1, false>(mixing, numbers, sums);
#pragma unroll
    for (int half = 0; half < 2; half++)
        if (lane / 4 + half * 8 < HEADS)
            store_shared(mixed + (lane / 4 + half * 8) * A_PITCH + (first + lane % 4 * 2) * 2,
                         pack<ELEMENT>(sums[half * 2], sums[half * 2 + 1]));
}

// out^T += v^T p^T of a tile; all columns of the products are the one row of probabilities.
DEVICE void add_values(uint32_t tile, uint32_t probabilities, float (&out)[STEPS][4]) {
    const int lane = threadIdx.x % 32;
    const uint32_t row = tile + place(lane / 16 * 8 + lane % 8, lane / 8 % 2);
    const uint32_t low = load_shared(probabilities + (lane % 4 * 2) * 2);
    const uint32_t high = load_shared(probabilities + (8 + lane % 4 * 2) * 2);
#pragma unroll
    for (int step = 0; step < STEPS; step++) {
        uint32_t values[4];
        load_matrices_transposed(values, at_step(row, step));
        multiply<ELEMENT>(out[step], values, low, high);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) mta_decode_values(const __grid_constant__ Arguments args) {
    let_next_start();
    const uint32_t shared = shared_memory();
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const uint32_t ring = shared + warp * RING, unmixed = shared + UNMIXED_AT, mixed = shared + MIXED_AT;
    const uint32_t taps = shared + TAPS_AT + warp * TAPS, rows = shared + ROWS_AT + warp * ROWS;
    Work work;
    if (!work.begin(args.lengths, blockIdx.x, args.programs, args.splits)) return;
    Stream stream;
    const auto begin = [&](const Segment& segment) {
        stream.begin(args, args.v, segment, ring, segment.start, segment.start, segment.stop,
                     (segment.stop - segment.start + KEYS - 1) / KEYS);
    };
    begin(work.segment);
    Mixing mixing;
    if (POST_MIX) mixing.load<POST_MIX_FLOAT>(args.post_mix, true);
    put_taps<POST_QUERY_TAPS, POST_KEY_TAPS, false>(
        taps, [&](int a, int i) { return POST_CONV ? args.post_taps.at<POST_TAPS_FLOAT>(warp, a, i) : 1; });
    for (bool more = true; more;) {
        Segment segment = work.segment;
        work.count_sharers(segment);
        float sums[4] = {};
        OlderRows older;
        older.load(args, segment, 0, segment.start);
        if (lane < NEWEST && position_of(segment, lane) >= 0) {
            const int slot = slot_of(args, newest_slot(args, segment), lane);
            store_shared(rows + lane * 4, args.logsumexp[segment.sequence * args.stride_sb + warp * args.stride_sh + slot * args.stride_ss]);
        }
        __syncwarp();
        older.add(args, segment, segment.start, taps, rows, sums);
        wait_for_launch_before();
        uint4 newest = load_logits(args, segment, newest_slot(args, segment), NEWEST, segment.start);
        stream.ask_for_rows(args, args.v, STAGES - 1);  // prefetches while the logsumexp is computed
        const float logsumexp = logsumexp_of(args, segment, shared);
        if (lane == 0) store_shared(rows + NEWEST * 4, logsumexp);
        __syncwarp();
        if (args.seen && segment.first_program == blockIdx.x && lane == 0) {
            const int slot = newest_slot(args, segment);
            if (segment.length > 0)
                args.logsumexp[segment.sequence * args.stride_sb + warp * args.stride_sh + slot * args.stride_ss] = logsumexp;
            if (warp == 0) args.seen[segment.sequence * args.stride_seen] = segment.length;
        }
        float out[STEPS][4] = {};
#pragma unroll 1
        for (int turn = 0; turn * TILES_A_TURN < stream.tiles; turn++) {
            const int first = segment.start + turn * TURN, last = min(stream.tiles - turn * TILES_A_TURN, TILES_A_TURN);
            convolve(segment, newest, NEWEST, first, taps, rows, sums);
#pragma unroll
            for (int i = 0; i < 4; i++)
                store_shared(unmixed + warp * A_PITCH + Band<POST_PAD>::key_of(i) * 2, from_float<ELEMENT>(sums[i]).bits);
            if (POST_MIX) {
                __syncthreads();
#pragma unroll 1
                for (int job = warp; job < last * (KEYS / 8); job += HEADS) mix(mixing, unmixed, mixed, job * 8);
                __syncthreads();
            }
            older.load(args, segment, 0, first + TURN);  // none after the last turn
            newest = load_logits(args, segment, newest_slot(args, segment), NEWEST, first + TURN);
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
            if (first + TURN >= segment.stop) continue;
#pragma unroll
            for (int i = 0; i < 4; i++) sums[i] = 0;
            older.add(args, segment, first + TURN, taps, rows, sums);
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
