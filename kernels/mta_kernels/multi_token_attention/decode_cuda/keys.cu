// The kernel of a decode step that reads K: logits of the newest row, and the logsumexp of a program's keys.
//
// A warp multiplies the window's queries by tiles of its head's keys, and keeps the scores as two 16-bit parts. After each
// turn of TURN keys it convolves them (bands.cuh), each query's with a row of taps. Then the warps synchronise, and each
// mixes 8 keys of all heads. A turn convolves TURN of TURN + 16 scores: a block of 16 needs BEFORE earlier scores.
#include "bands.cuh"
#include "layout.cuh"

constexpr int BEFORE = keys_before(PRE_PAD);
constexpr int AT_ONCE = PRE_TAPS_FLOAT ? 2 : PRE_QUERY_TAPS;  // rows of taps; limited by registers
constexpr int PARTS = 1 + PRE_TAPS_FLOAT;                 // of a tap
constexpr int SCORES_ROW = (16 + TURN) * 2;               // of a query: 16 keys more than a turn convolves
constexpr int SCORES = 2 * PRE_QUERY_TAPS * SCORES_ROW;   // of a warp: the coarse parts, and the rest
constexpr int TAPS = PARTS * PRE_QUERY_TAPS * BAND_BYTES;
constexpr int S_PITCH = (TURN + 4) * 4;                   // of a head's convolved scores
constexpr int SCORES_AT = HEADS * RING;
constexpr int TAPS_AT = SCORES_AT + HEADS * SCORES;
constexpr int CONVOLVED_AT = TAPS_AT + HEADS * TAPS, CONVOLVED = HEADS * S_PITCH;  // two turns'
constexpr int FOUND_AT = CONVOLVED_AT + 2 * CONVOLVED;    // a maximum and a sum of each warp and head
constexpr int MIXING_AT = FOUND_AT + HEADS * 16 * 8;      // as each lane reads it, to save registers
static_assert(MIXING_AT + 32 * 32 == SHARED_BYTES, "as in step.py");
static_assert(PRE_QUERY_TAPS <= 16 && PRE_KEY_TAPS <= 16, "rows of a product; a block's keys");

struct Queries {
    uint32_t numbers[STEPS][4];  // as the left operand: rows are queries of the window, zeros where there is none

    DEVICE void load(const Arguments& args, const Segment& segment) {
        const int lane = threadIdx.x % 32, head = threadIdx.x / 32;
        const char* q = args.q.start + segment.sequence * args.q.stride_batch + head * args.q.stride_head;
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int a = lane / 4 + half * 8, row = args.window - PRE_QUERY_TAPS + a;
            const bool known = a < PRE_QUERY_TAPS && row >= 0 && a >= PRE_QUERY_TAPS - segment.length;
#pragma unroll
            for (int i = 0; i < 2 * STEPS; i++) {
                uint32_t& pair = numbers[i / 2][i % 2 * 2 + half];
                pair = 0;
                if (known) pair = *(const uint32_t*)(q + row * args.q.stride_row + (i * 8 + lane % 4 * 2) * 2);
            }
        }
    }
};

// Scores of a tile, with the keys from `first` on, to `scores`: a column of this warp's.
DEVICE void score(const Arguments& args, const Segment& segment, const Queries& queries, uint32_t tile, uint32_t scores,
                  int first) {
    const int lane = threadIdx.x % 32;
    const uint32_t key_row = tile + place(lane / 16 * 8 + lane % 8, lane / 8 % 2);
    float sums[2][4] = {};
#pragma unroll
    for (int step = 0; step < STEPS; step++) {
        uint32_t keys[4];
        load_matrices(keys, at_step(key_row, step));
#pragma unroll
        for (int half = 0; half < 2; half++) multiply<ELEMENT>(sums[half], queries.numbers[step], keys[half * 2], keys[half * 2 + 1]);
    }
    const bool all_see = first + KEYS <= segment.length - (PRE_QUERY_TAPS - 1);
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const int half = i / 2, a = lane / 4 + i % 2 * 8, column = half * 8 + lane % 4 * 2;
        float pair[2] = {sums[half][i % 2 * 2] * args.scale, sums[half][i % 2 * 2 + 1] * args.scale};
        if (!all_see)
#pragma unroll
            for (int e = 0; e < 2; e++)
                if (first + column + e > segment.length - PRE_QUERY_TAPS + a) pair[e] = 0;
        const uint32_t coarse = pack<ELEMENT>(pair[0], pair[1]);
        const uint32_t rest = pack<ELEMENT>(pair[0] - to_float(ELEMENT{(uint16_t)coarse}),
                                            pair[1] - to_float(ELEMENT{(uint16_t)(coarse >> 16)}));
        if (a >= PRE_QUERY_TAPS) continue;
        store_shared(scores + a * SCORES_ROW + column * 2, coarse);
        store_shared(scores + (PRE_QUERY_TAPS + a) * SCORES_ROW + column * 2, rest);
    }
}

// Convolves a turn's scores, and keeps the scores that the next turn needs.
DEVICE void convolve(uint32_t scores, uint32_t taps, uint32_t convolved) {
    const int lane = threadIdx.x % 32;
    float sums[4] = {}, fine[4] = {};  // two chains of products
#pragma unroll AT_ONCE
    for (int a = 0; a < PRE_QUERY_TAPS; a++) {
        const uint32_t row = scores + a * SCORES_ROW + lane / 4 * 32 + lane % 4 * 16;
        const uint4 coarse = load_shared_16(row), rest = load_shared_16(row + PRE_QUERY_TAPS * SCORES_ROW);
        Band<PRE_PAD> band;
        band.load(taps + a * BAND_BYTES);
        band.multiply_by(coarse, sums);
        band.multiply_by(rest, fine);
        if (PRE_TAPS_FLOAT) {
            band.load(taps + (PRE_QUERY_TAPS + a) * BAND_BYTES);
            band.multiply_by(coarse, fine);
        }
    }
#pragma unroll
    for (int i = 0; i < 4; i++) store_shared(convolved + Band<PRE_PAD>::key_of(i) * 4, sums[i] + fine[i]);
    __syncwarp();
#pragma unroll
    for (int i = lane; i < 4 * PRE_QUERY_TAPS; i += 32) {
        const uint32_t row = scores + i / 2 * SCORES_ROW + i % 2 * 16;
        store_shared(row, load_shared_16(row + TURN * 2));
    }
    __syncwarp();
}

// Mixes 8 keys of all heads, from `first` on, and writes their logits.
DEVICE void mix_and_keep(const Arguments& args, const Segment& segment, uint32_t mix, uint32_t scores, int first,
                         Total (&found)[2]) {
    const int lane = threadIdx.x % 32;
    float mixed[4] = {};
    if (PRE_MIX) {
        Mixing mixing;
        mixing.load(mix + lane * 32);
        float numbers[4], rest[4];
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const int head = lane % 4 * 2 + i % 2 + i / 2 * 8;
            numbers[i] = head < HEADS ? load_shared_float(scores + head * S_PITCH + lane / 4 * 4) : 0;
            rest[i] = numbers[i] - to_float(from_float<ELEMENT>(numbers[i]));
        }
        uint32_t parts[2][2] = {{pack<ELEMENT>(numbers[0], numbers[1]), pack<ELEMENT>(numbers[2], numbers[3])},
                                {pack<ELEMENT>(rest[0], rest[1]), pack<ELEMENT>(rest[2], rest[3])}};
        mix_heads<2, PRE_MIX_FLOAT>(mixing, parts, mixed);
    } else {
#pragma unroll
        for (int i = 0; i < 4; i++)
            if (lane / 4 + i / 2 * 8 < HEADS)
                mixed[i] = load_shared_float(scores + (lane / 4 + i / 2 * 8) * S_PITCH + (lane % 4 * 2 + i % 2) * 4);
    }
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const int head = lane / 4 + half * 8;
        if (head >= HEADS) continue;
        ELEMENT* row = newest_logits(args, segment.sequence, segment.length, head);
#pragma unroll
        for (int e = 0; e < 2; e++) {
            const int key = first + lane % 4 * 2 + e;
            if (key < segment.start || key >= segment.stop) continue;
            const ELEMENT logit = from_float<ELEMENT>(mixed[half * 2 + e]);
            row[key * args.stride_ln] = logit;
            found[half].add(to_float(logit), 1);
        }
    }
}

// The logsumexp of heads lane / 4 and 8 more, over all warps, to global memory.
DEVICE void keep_found(float* to, uint32_t shared, Total (&found)[2]) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#pragma unroll
    for (int i = 0; i < 2; i++) {
        found[i].add_lanes(1, 4);
        if (lane % 4 == 0) found[i].store(shared + FOUND_AT + (warp * 16 + lane / 4 + i * 8) * 8);
    }
    __syncthreads();
    Total all;
    all.clear();
    if (lane < HEADS) all.load(shared + FOUND_AT + (lane * 16 + warp) * 8);
    all.add_lanes(1, 16);
    if (lane == 0) to[warp] = all.logarithm(MINUS_INFINITY);
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) mta_decode_keys(const __grid_constant__ Arguments args) {
    let_next_start();
    const uint32_t shared = shared_memory();
    const int warp = threadIdx.x / 32;
    const uint32_t ring = shared + warp * RING, scores = shared + SCORES_AT + warp * SCORES, taps = shared + TAPS_AT + warp * TAPS;
    Work work;
    if (!work.begin(args.lengths, blockIdx.x, args.programs, args.splits)) return;
    Stream stream;
    const auto begin = [&](const Segment& segment) {  // 16 keys more, which the last ones are convolved with
        const int keys = segment.stop - segment.start, last = segment.stop - PRE_PAD + PRE_KEY_TAPS - 1;
        stream.begin(args, args.k, segment, ring, segment.start - BEFORE, max(segment.start - PRE_PAD, 0),
                     min(last, segment.length), keys > 0 ? (keys + 16 + KEYS - 1) / KEYS : 0);
    };
    begin(work.segment);
    if (PRE_MIX && warp == 0) {  // the others see it after their first barrier
        Mixing mixing;
        mixing.load<PRE_MIX_FLOAT>(args.pre_mix, false);
        mixing.store(shared + MIXING_AT + threadIdx.x * 32);
    }
    put_taps<PRE_QUERY_TAPS, PRE_KEY_TAPS, PRE_TAPS_FLOAT>(
        taps, [&](int a, int i) { return PRE_CONV ? args.pre_taps.at<PRE_TAPS_FLOAT>(warp, a, i) : 1; });
    for (bool more = true; more;) {
        const Segment segment = work.segment;
        Queries queries;
        queries.load(args, segment);
#pragma unroll 1
        for (int i = threadIdx.x % 32; i < SCORES / 16; i += 32) store_shared(scores + i * 16, uint4{0, 0, 0, 0});
        __syncwarp();
        Total found[2];
        found[0].clear(), found[1].clear();
#pragma unroll 1
        for (int turn = 0; turn * TILES_A_TURN < stream.tiles - 1; turn++) {
            const uint32_t convolved = shared + CONVOLVED_AT + turn % 2 * CONVOLVED;
            const int before = turn * TILES_A_TURN, last = min(stream.tiles - 1 - before, TILES_A_TURN);
#pragma unroll 1
            for (int i = turn > 0; i <= last; i++) {
                stream.load(args, args.k, ring, before + i + STAGES - 1);
                copies_wait<STAGES - 1>();
                __syncwarp();
                score(args, segment, queries, ring + (before + i) % STAGES * TILE, scores + i * KEYS * 2,
                      stream.first + (before + i) * KEYS);
                __syncwarp();
            }
            convolve(scores, taps, convolved + warp * S_PITCH);
            __syncthreads();
#pragma unroll 1
            for (int job = warp; job < last * (KEYS / 8); job += HEADS)
                mix_and_keep(args, segment, shared + MIXING_AT, convolved + job * 32, segment.start + turn * TURN + job * 8,
                             found);
        }
        more = work.advance();
        if (more) begin(work.segment);
        keep_found(args.found + (int64_t)(blockIdx.x + segment.sequence) * HEADS, shared, found);
        __syncthreads();
    }
}
