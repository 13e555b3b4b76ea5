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
constexpr int MIXING_AT = FOUND_AT + HEADS * 16 * 8;      // as each lane takes it: registers are few
static_assert(MIXING_AT + 32 * 32 == SHARED_BYTES, "as in plan.py");
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
        // All numbers are read before one is used, those that there are not from a place that there is.
        constexpr int DEEP = PRE_QUERY_TAPS > 8 ? 4 : 2;  // queries of a lane
        const char* rows[DEEP];
        bool known[DEEP];
#pragma unroll
        for (int i = 0; i < DEEP; i++) {
            const int a = lane % 4 * 2 + i / 2 * 8 + i % 2, row = args.window - PRE_QUERY_TAPS + a;
            known[i] = a < PRE_QUERY_TAPS && row >= 0 && a >= PRE_QUERY_TAPS - segment.length;  // after the first token
            rows[i] = q + (known[i] ? row : args.window - 1) * args.q.stride_row;
        }
        uint16_t window[2 * STEPS][DEEP];
        float taps[2][DEEP];
#pragma unroll
        for (int i = 0; i < DEEP; i++) {
            const int a = min(lane % 4 * 2 + i / 2 * 8 + i % 2, PRE_QUERY_TAPS - 1);
#pragma unroll
            for (int n = 0; n < 2; n++)
                taps[n][i] = args.pre_taps.at<PRE_TAPS_FLOAT>(head, a, min(n * 8 + lane / 4, PRE_KEY_TAPS - 1));
#pragma unroll
            for (int n = 0; n < 2 * STEPS; n++) window[n][i] = *(const uint16_t*)(rows[i] + (n * 8 + lane / 4) * 2);
        }
        uint32_t coarse[4] = {}, fine[4] = {};
#pragma unroll
        for (int i = 0; i < DEEP; i += 2)
#pragma unroll
            for (int n = 0; n < 2; n++) {
                const bool is_tap = n * 8 + lane / 4 < PRE_KEY_TAPS;
                const float low = is_tap && known[i] ? taps[n][i] : 0, high = is_tap && known[i + 1] ? taps[n][i + 1] : 0;
                uint32_t& both = coarse[i + n];
                both = pack<ELEMENT>(low, high);
                fine[i + n] = pack<ELEMENT>(low - to_float(ELEMENT{(uint16_t)both}),
                                            high - to_float(ELEMENT{(uint16_t)(both >> 16)}));
            }
#pragma unroll
        for (int i = 0; i < 2 * STEPS; i++) {
            uint32_t pairs[2] = {};
#pragma unroll
            for (int n = 0; n < DEEP; n++)
                if (known[n]) pairs[n / 2] |= (uint32_t)window[i][n] << n % 2 * 16;
            float sums[4] = {};
            multiply<ELEMENT>(sums, coarse, pairs[0], pairs[1]);
            if (PRE_TAPS_FLOAT) multiply<ELEMENT>(sums, fine, pairs[0], pairs[1]);
#pragma unroll
            for (int n = 0; n < TAP_TILES; n++)
                numbers[n][i / 2][i % 2] = pack<ELEMENT>(sums[2 * n] * args.scale, sums[2 * n + 1] * args.scale);
        }
    }
};

// r of the newest of 16 keys from `first` on, which not all queries see, in the place of that of the tensor cores' one
// product: s [keys x queries] = k q_window^T where a key is seen, r [keys x taps] = s taps.
DEVICE void put_newest(const Arguments& args, const Segment& segment, uint32_t key_row, int first, float (&r)[TAP_TILES][4]) {
    constexpr int QUERY_TILES = PRE_QUERY_TAPS > 8 ? 2 : 1;
    const int lane = threadIdx.x % 32, head = threadIdx.x / 32, length = segment.length;
    const char* q = args.q.start + segment.sequence * args.q.stride_batch + head * args.q.stride_head;
    uint32_t coarse[4] = {}, fine[4] = {};
#pragma unroll
    for (int n = 0; n < QUERY_TILES; n++) {
        const int row = max(args.window - PRE_QUERY_TAPS + min(n * 8 + lane / 4, PRE_QUERY_TAPS - 1), 0);
        const uint32_t* query = (const uint32_t*)(q + row * args.q.stride_row) + lane % 4;
        float s[4] = {};
#pragma unroll
        for (int step = 0; step < STEPS; step++) {
            uint32_t keys[4];
            load_matrices(keys, key_row + step * 32);
            multiply<ELEMENT>(s, keys, query[step * 8], query[step * 8 + 4]);
        }
        // What a query does not see, or is no query, may be anything.
        const int oldest = max(PRE_QUERY_TAPS - args.window, 0);
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const int a = n * 8 + lane % 4 * 2 + i % 2, key = first + lane / 4 + i / 2 * 8;
            const bool seen = key >= 0 && a < PRE_QUERY_TAPS && a >= max(PRE_QUERY_TAPS - (length - key), oldest);
            s[i] = seen ? s[i] * args.scale : 0;
        }
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const uint32_t both = pack<ELEMENT>(s[2 * i], s[2 * i + 1]);
            coarse[2 * n + i] = both;
            fine[2 * n + i] = pack<ELEMENT>(s[2 * i] - to_float(ELEMENT{(uint16_t)both}),
                                            s[2 * i + 1] - to_float(ELEMENT{(uint16_t)(both >> 16)}));
        }
    }
#pragma unroll
    for (int n = 0; n < TAP_TILES; n++) {
        const int tap = n * 8 + lane / 4;
        uint32_t taps[2] = {}, rest[2] = {};
#pragma unroll
        for (int i = 0; i < 2 * QUERY_TILES; i++) {
            const int a = lane % 4 * 2 + i / 2 * 8 + i % 2;
            const float number = args.pre_taps.at<PRE_TAPS_FLOAT>(head, min(a, PRE_QUERY_TAPS - 1), min(tap, PRE_KEY_TAPS - 1));
            const ELEMENT rounded = from_float<ELEMENT>(a < PRE_QUERY_TAPS && tap < PRE_KEY_TAPS ? number : 0);
            taps[i / 2] |= (uint32_t)rounded.bits << i % 2 * 16;
            if (PRE_TAPS_FLOAT && a < PRE_QUERY_TAPS && tap < PRE_KEY_TAPS)
                rest[i / 2] |= (uint32_t)from_float<ELEMENT>(number - to_float(rounded)).bits << i % 2 * 16;
        }
        float products[4] = {};
        multiply<ELEMENT>(products, coarse, taps[0], taps[1]);
        multiply<ELEMENT>(products, fine, taps[0], taps[1]);
        if (PRE_TAPS_FLOAT) multiply<ELEMENT>(products, coarse, rest[0], rest[1]);
#pragma unroll
        for (int i = 0; i < 4; i++)
            if (first + lane / 4 + i / 2 * 8 >= length - NEWEST) r[n][i] = products[i];
    }
}

// Scores that a tile completes, to `scores`: KEYS numbers.
DEVICE void score(const Arguments& args, const Segment& segment, const Queries& queries, uint32_t tile, uint32_t products,
                  uint32_t scores, int first, float& carried) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int half = 0; half < KEYS / 16; half++) {
        const uint32_t key_row = tile + (half * 16 + lane % 16) * PITCH + lane / 16 * 16;
        float r[TAP_TILES][4] = {};
#pragma unroll
        for (int step = 0; step < STEPS; step++) {
            uint32_t keys[4];
            load_matrices(keys, key_row + step * 32);
#pragma unroll
            for (int n = 0; n < TAP_TILES; n++)
                multiply<ELEMENT>(r[n], keys, queries.numbers[n][step][0], queries.numbers[n][step][1]);
        }
        if (NEWEST > 0 && first + half * 16 + 16 > segment.length - NEWEST)
            put_newest(args, segment, key_row, first + half * 16, r);
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

// Mixes 8 keys of all heads, those from `first` on, and writes their logits.
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
        const uint32_t coarse[2] = {pack<ELEMENT>(numbers[0], numbers[1]), pack<ELEMENT>(numbers[2], numbers[3])};
        multiply<ELEMENT>(mixed, mixing.coarse, coarse[0], coarse[1]);
        multiply<ELEMENT>(mixed, mixing.coarse, pack<ELEMENT>(rest[0], rest[1]), pack<ELEMENT>(rest[2], rest[3]));
        if (PRE_MIX_FLOAT) multiply<ELEMENT>(mixed, mixing.fine, coarse[0], coarse[1]);
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

// The logsumexp of each head, of what all warps have found for heads lane / 4 and 8 more, to global memory.
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

extern "C" __global__ void __launch_bounds__(THREADS + OTHER_THREADS, 1) mta_decode_keys(const __grid_constant__ Arguments args) {
    let_next_start();
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
    begin(work.segment);
    if (PRE_MIX && warp == 0) {  // the others see it behind their first barrier
        Mixing mixing;
        mixing.load<PRE_MIX_FLOAT>(args.pre_mix, false);
        mixing.store(shared + MIXING_AT + threadIdx.x * 32);
    }
    for (bool more = true; more;) {
        const Segment segment = work.segment;
        Queries queries;
        queries.load(args, segment);
        Total found[2];
        found[0].clear(), found[1].clear();
        float carried = 0;
        const int first_score = segment.start - (PRE_KEY_TAPS - 1);
#pragma unroll 1
        for (int turn = 0; turn * TILES_A_TURN < stream.tiles; turn++) {
            const uint32_t scores = shared + SCORES_AT + turn % 2 * SCORES;
            const int last = min(stream.tiles - turn * TILES_A_TURN, TILES_A_TURN);
#pragma unroll 1
            for (int i = 0; i < last; i++) {
                const int tile = turn * TILES_A_TURN + i;
                stream.load(args, args.k, ring, tile + STAGES - 1);
                copies_wait<STAGES - 1>();
                __syncwarp();
                score(args, segment, queries, ring + tile % STAGES * TILE, products, scores + warp * S_PITCH + i * KEYS * 4,
                      stream.first + tile * KEYS, carried);
                __syncwarp();
            }
            __syncthreads();
#pragma unroll 1
            for (int job = warp; job < last * (KEYS / 8); job += HEADS)
                mix_and_keep(args, segment, shared + MIXING_AT, scores + job * 32, first_score + turn * TURN + job * 8, found);
        }
        more = work.advance();
        if (more) begin(work.segment);
        keep_found(args.found + (int64_t)(blockIdx.x + segment.sequence) * HEADS, shared, found);
        __syncthreads();
    }
}
