// The kernel of a decode step that reads K: logits of the newest row, and the logsumexp of a program's keys.
//
// A warp multiplies tiles of its head's keys by the query or, with a convolution, by the query folded with its taps:
//   folded[b] = scale * sum over a of taps[a, b] q_window[a],  r[b, y] = folded[b] . k[y],
//   c[j] = sum over b of r[b, j - PRE_PAD + b]
// A tile completes the scores that end PRE_KEY_TAPS - 1 - PRE_PAD keys before its own end; what its columns add to later
// ones is carried on. The newest PRE_QUERY_TAPS - 1 keys are not seen by all queries of the window: their columns are
// computed apart. After TURN scores the warps meet, and each mixes 8 keys of all heads.
#include "layout.cuh"

constexpr int NEWEST = PRE_QUERY_TAPS - 1;
constexpr int TAP_TILES = PRE_KEY_TAPS > 8 ? 2 : 1;       // of 8 taps
constexpr int R_PITCH = (KEYS + 4) * 4;                   // of a tap's products in shared memory
constexpr int S_PITCH = (TURN + 4) * 4;                   // of a head's scores
constexpr int PRODUCTS = PRE_CONV ? 16 * R_PITCH : 0;     // of a warp
constexpr int PRODUCTS_AT = HEADS * RING;
constexpr int SCORES_AT = PRODUCTS_AT + HEADS * PRODUCTS, SCORES = HEADS * S_PITCH;  // two turns'
constexpr int FOUND_AT = SCORES_AT + 2 * SCORES;          // a maximum and a sum of each warp and head
static_assert(FOUND_AT + HEADS * 16 * 8 == SHARED_BYTES, "as in plan.py");
static_assert(PRE_KEY_TAPS <= 16, "a tile carries on into the next one alone");

struct Queries {
    uint32_t numbers[TAP_TILES][STEPS][2];  // as the right operand: columns are taps, or all the one query

    DEVICE void load(const Arguments& args, const Segment& segment) {
        const int lane = threadIdx.x % 32, head = threadIdx.x / 32;
        const char* q = args.q.start + segment.sequence * args.q.stride_batch + head * args.q.stride_head;
        const auto pair_at = [&](int row, int i) {
            return *(const uint32_t*)(q + row * args.q.stride_row + (i / 2 * 16 + i % 2 * 8 + lane % 4 * 2) * 2);
        };
        if (!PRE_CONV) {
#pragma unroll
            for (int i = 0; i < 2 * STEPS; i++) numbers[0][i / 2][i % 2] = pair_at(args.window - 1, i);
            return;
        }
        // folded [taps x numbers] = taps^T [taps x queries] q_window: what comes out lies as the next product takes it.
        const auto is_query = [&](int a) {  // before the first token is none
            return a < PRE_QUERY_TAPS && args.window - PRE_QUERY_TAPS + a >= 0 && a >= PRE_QUERY_TAPS - segment.length;
        };
        uint32_t coarse[4], fine[4];
#pragma unroll
        for (int i = 0; i < 4; i++) {
            float numbers[2], rest[2];
#pragma unroll
            for (int e = 0; e < 2; e++) {
                const int tap = lane / 4 + i % 2 * 8, a = lane % 4 * 2 + i / 2 * 8 + e;
                numbers[e] = tap < PRE_KEY_TAPS && is_query(a) ? args.pre_taps.at(head, a, tap) : 0;
                rest[e] = numbers[e] - to_float(from_float<ELEMENT>(numbers[e]));
            }
            coarse[i] = pack<ELEMENT>(numbers[0], numbers[1]), fine[i] = pack<ELEMENT>(rest[0], rest[1]);
        }
        const auto number_at = [&](int a, int number) -> uint32_t {
            if (!is_query(a)) return 0;
            return *(const uint16_t*)(q + (args.window - PRE_QUERY_TAPS + a) * args.q.stride_row + number * 2);
        };
#pragma unroll
        for (int i = 0; i < 2 * STEPS; i++) {
            const int a = lane % 4 * 2, number = i * 8 + lane / 4;
            const uint32_t low = number_at(a + 1, number) << 16 | number_at(a, number);
            const uint32_t high = PRE_QUERY_TAPS > 8 ? number_at(a + 9, number) << 16 | number_at(a + 8, number) : 0;
            float sums[4] = {};
            multiply<ELEMENT>(sums, coarse, low, high);
            if (args.pre_taps.is_float) multiply<ELEMENT>(sums, fine, low, high);
#pragma unroll
            for (int n = 0; n < TAP_TILES; n++)
                numbers[n][i / 2][i % 2] = pack<ELEMENT>(sums[2 * n] * args.scale, sums[2 * n + 1] * args.scale);
        }
    }
};

// The newest keys' columns of r, of the queries that see them, over those of all: one key after the other.
DEVICE void put_newest(const Arguments& args, const Segment& segment, uint32_t tile, uint32_t products, int first) {
    const int lane = threadIdx.x % 32, head = threadIdx.x / 32;
    const char* q = args.q.start + segment.sequence * args.q.stride_batch + head * args.q.stride_head;
    constexpr int PAIRS = (HEAD_DIM / 2 + 31) / 32;  // of a lane
    float taps[PRE_QUERY_TAPS];
    uint32_t queries[PRE_QUERY_TAPS][PAIRS];
#pragma unroll
    for (int a = 0; a < PRE_QUERY_TAPS; a++) {  // all on their way at once
        const int row = args.window - PRE_QUERY_TAPS + a;
        const bool there = row >= 0 && a >= PRE_QUERY_TAPS - segment.length;
        taps[a] = there && lane < PRE_KEY_TAPS ? args.pre_taps.at(head, a, lane) * args.scale : 0;
#pragma unroll
        for (int i = 0; i < PAIRS; i++) {
            const bool inside = there && lane + 32 * i < HEAD_DIM / 2;
            queries[a][i] = inside ? *(const uint32_t*)(q + row * args.q.stride_row + (lane + 32 * i) * 4) : 0;
        }
    }
#pragma unroll 1
    for (int key = max(first, max(segment.length - NEWEST, 0)); key < min(first + KEYS, segment.length); key++) {
        float products_of[PRE_QUERY_TAPS] = {}, sum = 0;
#pragma unroll
        for (int i = 0; i < PAIRS; i++) {
            if (lane + 32 * i >= HEAD_DIM / 2) continue;
            const uint32_t y = load_shared(tile + (key - first) * PITCH + (lane + 32 * i) * 4);
#pragma unroll
            for (int a = 0; a < PRE_QUERY_TAPS; a++) {
                const uint32_t x = queries[a][i];
                products_of[a] += to_float(ELEMENT{(uint16_t)x}) * to_float(ELEMENT{(uint16_t)y}) +
                                  to_float(ELEMENT{(uint16_t)(x >> 16)}) * to_float(ELEMENT{(uint16_t)(y >> 16)});
            }
        }
#pragma unroll
        for (int other = 1; other < 32; other *= 2)
#pragma unroll
            for (int a = 0; a < PRE_QUERY_TAPS; a++) products_of[a] += __shfl_xor_sync(~0u, products_of[a], other);
#pragma unroll
        for (int a = 0; a < PRE_QUERY_TAPS; a++)
            if (a >= PRE_QUERY_TAPS - (segment.length - key)) sum += products_of[a] * taps[a];
        if (lane < PRE_KEY_TAPS) store_shared(products + lane * R_PITCH + (key - first) * 4, sum);
    }
}

// Scores that a tile completes, to `scores`: KEYS numbers.
DEVICE void score(const Arguments& args, const Segment& segment, const Queries& queries, uint32_t tile, uint32_t products,
                  uint32_t scores, int first, float& carried) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int half = 0; half < KEYS / 16; half++) {
        float r[TAP_TILES][4] = {};
#pragma unroll
        for (int step = 0; step < STEPS; step++) {
            uint32_t keys[4];
            load_matrices(keys, tile + (half * 16 + lane % 16) * PITCH + lane / 16 * 16 + step * 32);
#pragma unroll
            for (int n = 0; n < TAP_TILES; n++)
                multiply<ELEMENT>(r[n], keys, queries.numbers[n][step][0], queries.numbers[n][step][1]);
        }
        const int row = half * 16 + lane / 4;
        if (PRE_CONV) {
#pragma unroll
            for (int i = 0; i < 4 * TAP_TILES; i++)
                store_shared(products + (i / 4 * 8 + lane % 4 * 2 + i % 2) * R_PITCH + (row + i / 2 % 2 * 8) * 4,
                             r[i / 4][i % 4]);
        } else if (lane % 4 == 0) {
            store_shared(scores + row * 4, r[0][0] * args.scale);
            store_shared(scores + (row + 8) * 4, r[0][2] * args.scale);
        }
    }
    if (!PRE_CONV) return;
    __syncwarp();
    if (NEWEST > 0 && first + KEYS > segment.length - NEWEST) {
        put_newest(args, segment, tile, products, first);
        __syncwarp();
    }
    const int x = lane % KEYS;
    float now = carried, next = 0;
#pragma unroll
    for (int tap = 0; tap < PRE_KEY_TAPS; tap++) {
        const int column = x - (PRE_KEY_TAPS - 1) + tap;
        const float value = load_shared_float(products + tap * R_PITCH + (column & KEYS - 1) * 4);
        if (column >= 0) now += value;
        else next += value;
    }
    carried = next;
    if (lane < KEYS) store_shared(scores + x * 4, now);
}

// The largest logit, and the sum of exponentials below it, of two heads: lane / 4, and 8 more.
struct Found {
    float maximum[2], sum[2];

    DEVICE void clear() {
#pragma unroll
        for (int i = 0; i < 2; i++) maximum[i] = MINUS_INFINITY, sum[i] = 0;
    }
    DEVICE void add(int i, float other_maximum, float other_sum) {
        const float larger = fmaxf(maximum[i], other_maximum), below = larger == MINUS_INFINITY ? 0 : larger;
        sum[i] = sum[i] * exp2_fast((maximum[i] - below) * LOG2E) + other_sum * exp2_fast((other_maximum - below) * LOG2E);
        maximum[i] = larger;
    }
};

// Mixes 8 keys of all heads, those from `first` on, and writes their logits.
DEVICE void mix_and_keep(const Arguments& args, const Segment& segment, const Mixing& mixing, uint32_t scores, int first,
                         Found& found) {
    const int lane = threadIdx.x % 32;
    float mixed[4] = {};
    if (PRE_MIX) {
        float numbers[4], rest[4];
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const int head = lane % 4 * 2 + i % 2 + i / 2 * 8;
            numbers[i] = head < HEADS ? load_shared_float(scores + head * S_PITCH + lane / 4 * 4) : 0;
            rest[i] = numbers[i] - to_float(from_float<ELEMENT>(numbers[i]));
        }
        const uint32_t coarse[2] = {pack<ELEMENT>(numbers[0], numbers[1]), pack<ELEMENT>(numbers[2], numbers[3])};
        multiply<ELEMENT>(mixed, mixing.coarse, coarse[0], coarse[1]);
        multiply<ELEMENT>(mixed, mixing.coarse, pack<ELEMENT>(rest[0], rest[1]), pack<ELEMENT>(rest[2], rest[3]));
        if (args.pre_mix.is_float) multiply<ELEMENT>(mixed, mixing.fine, coarse[0], coarse[1]);
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
            found.add(half, to_float(logit), 1);
        }
    }
}

// The logsumexp of each head, of what all warps have found, to global memory.
DEVICE void keep_found(float* to, uint32_t shared, Found& found) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#pragma unroll
    for (int i = 0; i < 2; i++) {
#pragma unroll
        for (int other = 1; other < 4; other *= 2) {
            const float maximum = __shfl_xor_sync(~0u, found.maximum[i], other);
            const float sum = __shfl_xor_sync(~0u, found.sum[i], other);
            found.add(i, maximum, sum);
        }
        if (lane % 4 == 0) {
            const uint32_t at = shared + FOUND_AT + (warp * 16 + lane / 4 + i * 8) * 8;
            store_shared(at, found.maximum[i]), store_shared(at + 4, found.sum[i]);
        }
    }
    __syncthreads();
    if (threadIdx.x < HEADS) {
        Found all;
        all.clear();
        for (int other = 0; other < HEADS; other++) {
            const uint32_t at = shared + FOUND_AT + (other * 16 + threadIdx.x) * 8;
            all.add(0, load_shared_float(at), load_shared_float(at + 4));
        }
        to[threadIdx.x] = all.sum[0] > 0 ? all.maximum[0] + log2f(all.sum[0]) / LOG2E : MINUS_INFINITY;
    }
}

extern "C" __global__ void __launch_bounds__(THREADS + OTHER_THREADS, 1) mta_decode_keys(const __grid_constant__ Arguments args) {
    let_next_kernel_begin();
    const uint32_t shared = shared_memory();
    const int warp = threadIdx.x / 32;
    const uint32_t ring = shared + warp * RING, products = shared + PRODUCTS_AT + warp * PRODUCTS;
    Work work;
    if (!work.begin(args.lengths, blockIdx.x, args.programs, args.splits)) return;
    Stream stream;
    const auto begin = [&](const Segment& segment) {
        const int keys = segment.stop - segment.start, last = segment.stop - PRE_PAD + PRE_KEY_TAPS - 1;
        stream.begin(args, args.k, segment, ring, segment.start - PRE_PAD, 0, min(last, segment.length),
                     keys > 0 ? (keys + PRE_KEY_TAPS - 1 + KEYS - 1) / KEYS : 0);
    };
    Mixing mixing;
    begin(work.segment);
    if (PRE_MIX) mixing.load(args.pre_mix, false);
    for (bool more = true; more;) {
        const Segment segment = work.segment;
        Queries queries;
        queries.load(args, segment);
        Found found;
        found.clear();
        float carried = 0;
        const int first_score = segment.start - (PRE_KEY_TAPS - 1);
#pragma unroll 1
        for (int turn = 0; turn * TILES_A_TURN < stream.tiles; turn++) {
            const uint32_t scores = shared + SCORES_AT + turn % 2 * SCORES;
            const int last = min(stream.tiles - turn * TILES_A_TURN, TILES_A_TURN);
#pragma unroll 1
            for (int i = 0; i < last; i++) {
                const int tile = turn * TILES_A_TURN + i;
                stream.load(args, ring, tile + STAGES - 1);
                copies_wait<STAGES - 1>();
                __syncwarp();
                score(args, segment, queries, ring + tile % STAGES * TILE, products, scores + warp * S_PITCH + i * KEYS * 4,
                      stream.first + tile * KEYS, carried);
                __syncwarp();
            }
            __syncthreads();
#pragma unroll 1
            for (int job = warp; job < last * (KEYS / 8); job += HEADS)
                mix_and_keep(args, segment, mixing, scores + job * 32, first_score + turn * TURN + job * 8, found);
        }
        more = work.advance();
        if (more) begin(work.segment);
        keep_found(args.found + (int64_t)(blockIdx.x + segment.sequence) * HEADS, shared, found);
        __syncthreads();
    }
}
