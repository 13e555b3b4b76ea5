// What hopper_heads.cu prepares in shared memory for a segment before its keys: the folded queries, and what the newest keys
// add to scores.
#pragma once
#include "hopper_layout.cuh"

// Where a lane's numbers of the window and of the weight are: of query tap `tap` of a KV head's head, and of the next taps.
struct Source {
    const char *queries, *weights;
    int first, end;  // taps from `tap` on that there are

    DEVICE Source(const Arguments& args, const Segment& segment, int head, int tap, int chunk, int key_tap) {
        const int query_head = segment.kv_head * args.group + head, held = args.window - QUERY_TAPS;
        queries = args.q.start + segment.sequence * args.q.stride_batch + query_head * args.q.stride_head +
                  (held + tap) * args.q.stride_row + chunk * 16;
        const Weight& weight = args.weight;
        weights = (const char*)weight.start + (query_head * weight.stride_head + tap * weight.stride_query +
                                               key_tap * weight.stride_key) * (weight.is_float ? 4 : 2);
        first = max(QUERY_TAPS - segment.length, max(-held, 0)) - tap, end = head < args.group ? QUERY_TAPS - tap : 0;
    }
    // A chunk of eight numbers; before the first token there is no query, whatever the window holds there.
    DEVICE uint4 chunk(const Arguments& args, int tap, int further, bool inside) const {
        const bool exists = inside && tap >= first && tap < end;
        return exists ? *(const uint4*)(queries + tap * args.q.stride_row + further * 16) : uint4{0, 0, 0, 0};
    }
    // A weight's bits as loaded, so that no load waits for the one before; and its value.
    DEVICE uint32_t weight_bits(const Arguments& args, int tap, int further, bool inside) const {
        const int64_t at = tap * args.weight.stride_query + further * args.weight.stride_key;
        if (!inside || tap >= end) return 0;
        return args.weight.is_float ? ((const uint32_t*)weights)[at] : ((const uint16_t*)weights)[at];
    }
    DEVICE static float weight(const Arguments& args, uint32_t bits) {
        return (args.weight.is_float ? __uint_as_float(bits) : to_float(ELEMENT{(uint16_t)bits})) * args.factor;
    }
};

// A power of two from which numbers up to `largest` are less than 2^(exponent + 1) away. The weights' unit times the queries'
// unit is finite: queries of fp16 are below 2^16.
DEVICE float unit_of(float largest, int exponent) {
    const int biased = min(max((int)(__float_as_uint(largest) >> 23) - exponent, 67), 247);
    return __uint_as_float(biased << 23);
}
DEVICE float largest_of_warp(float x) {
#pragma unroll
    for (int other = 1; other < 32; other *= 2) x = fmaxf(x, __shfl_xor_sync(~0u, x, other));
    return x;
}

// What the newest keys, which not all queries of the window see, add to the last scores of a head, by a warp: [SPAN]. Query
// tap a and the key `back` before the newest add w[a, NEWEST + TAIL - 1 - back - i] times their product to score i.
struct Newest {
    uint4 keys[(HEAD_DIM + 31) / 32];

    DEVICE void load(const Arguments& args, const Segment& segment) {
        const int lane = thread_index() % 32, back = lane / 4, key = segment.length - 1 - back;
        Cache cache;
        cache.open(args, segment);
        const bool exists = back < NEWEST && key >= 0;
        const char* from = cache.keys + row_offset(args.k, key, PAGED && exists ? cache.page_of(args, key) : 0, args.page_bits);
#pragma unroll
        for (int i = 0; i < (HEAD_DIM + 31) / 32; i++) {
            const bool inside = exists && i * 4 + lane % 4 < HEAD_DIM / 8;
            keys[i] = inside ? *(const uint4*)(from + (i * 4 + lane % 4) * 16) : uint4{0, 0, 0, 0};
        }
    }
    DEVICE void store(const Arguments& args, const Segment& segment, int head, uint32_t to) const {
        const int lane = thread_index() % 32, key_tap = NEWEST + TAIL - 1 - lane % 4 * 2;
        const Source source(args, segment, head, lane / 4, lane % 4, key_tap);
        float sums[4] = {};  // of query lane / 4, and the keys 2 (lane % 4) and one more back
#pragma unroll
        for (int i = 0; i < (HEAD_DIM + 31) / 32; i++) {  // a lane's eight numbers are two pairs of two steps
            const uint4 queries = source.chunk(args, 0, i * 4, i * 4 + lane % 4 < HEAD_DIM / 8);
            const uint32_t left[2][4] = {{queries.x, 0, queries.y, 0}, {queries.z, 0, queries.w, 0}};
            multiply<ELEMENT>(sums, left[0], keys[i].x, keys[i].y);
            multiply<ELEMENT>(sums, left[1], keys[i].z, keys[i].w);
        }
        float weights[SPAN + 1];
#pragma unroll
        for (int i = 0; i < SPAN + 1; i++)
            weights[i] = Source::weight(args, source.weight_bits(args, 0, -i, key_tap - i >= 0 && key_tap - i < KEY_TAPS));
#pragma unroll
        for (int i = 0; i < 2; i++)  // a query sees the key if it is not older
            if (lane / 4 < NEWEST - lane % 4 * 2 - i) sums[i] = 0;
#pragma unroll
        for (int i = 0; i < SPAN; i++) {
            float sum = weights[i] * sums[0] + weights[i + 1] * sums[1];
#pragma unroll
            for (int lanes = 1; lanes < 32; lanes *= 2) sum += __shfl_xor_sync(~0u, sum, lanes);
            if (lane == 0) store_shared(to + i * 4, sum);
        }
    }
};

// The folded queries of a head, by a warp: [16 key taps x 16] [16 x 8 dimensions]. The left operand has each weight as
// the sum of two 16-bit numbers. A column of product i is dimension 8 column + i, so that a lane loads and stores whole
// chunks. In fp16, the result is in units of a power of two.
DEVICE void fold_head(const Arguments& args, const Segment& segment, int first_head, int head, bool is_first, bool reads_newest,
                      uint32_t shared) {
    const int lane = thread_index() % 32, tap = lane % 4 * 2, key_tap = lane / 4;
    const Source source(args, segment, first_head + head, tap, lane / 4, key_tap);
    uint32_t queries[SLABS][2][4];
#pragma unroll
    for (int i = 0; i < SLABS * 2; i++) {
        const uint4 of = source.chunk(args, i % 2, i / 2 * 8, i / 2 * 64 + lane / 4 * 8 < HEAD_DIM);
        uint32_t(&to)[4] = queries[i / 2][i % 2];
        to[0] = of.x, to[1] = of.y, to[2] = of.z, to[3] = of.w;
    }
    uint32_t weight_bits[4];
#pragma unroll
    for (int i = 0; i < 4; i++)
        weight_bits[i] = source.weight_bits(args, i % 2, i / 2 * 8, key_tap + i / 2 * 8 < KEY_TAPS);
    Newest newest;
    if (reads_newest) newest.load(args, segment);
    if (QUERIES_FIRST && is_first && lane == 0) barrier_arrive(shared + ASKED_AT);
    if (reads_newest) newest.store(args, segment, first_head + head, shared + NEWEST_AT + head * SPAN * 4);
    float weights[2][2], unit = 1, inverse = 1;
#pragma unroll
    for (int i = 0; i < 4; i++) weights[i / 2][i % 2] = Source::weight(args, weight_bits[i]);
    if constexpr (IN_UNITS<ELEMENT>) {
        float largest = 0, largest_query = 0;
#pragma unroll
        for (int i = 0; i < 4; i++) largest = fmaxf(largest, fabsf(weights[i / 2][i % 2]));
#pragma unroll
        for (int i = 0; i < SLABS * 8; i++) {
            const uint32_t pair = queries[i / 8][i / 4 % 2][i % 4];
            largest_query = fmaxf(largest_query, fmaxf(fabsf(to_float(ELEMENT{(uint16_t)pair})),
                                                       fabsf(to_float(ELEMENT{(uint16_t)(pair >> 16)}))));
        }
        const float of_weights = unit_of(largest_of_warp(largest), 0), of_queries = unit_of(largest_of_warp(largest_query), 10);
#pragma unroll
        for (int i = 0; i < 4; i++) weights[i / 2][i % 2] *= inverse_of(of_weights);
        unit = of_weights * of_queries, inverse = inverse_of(of_queries);  // eight products below 2 x 2^11 fit fp16
    }
    if (lane == 0) store_shared(shared + UNITS_AT + head * 4, unit);
    uint32_t left[4];
#pragma unroll
    for (int i = 0; i < 2; i++) {
        left[i] = pack<ELEMENT>(weights[i][0], weights[i][1]);
        left[2 + i] = pack<ELEMENT>(weights[i][0] - to_float(ELEMENT{(uint16_t)left[i]}),
                                    weights[i][1] - to_float(ELEMENT{(uint16_t)(left[i] >> 16)}));
    }
#pragma unroll
    for (int slab = 0; slab < SLABS; slab++) {
        const uint32_t(&even)[4] = queries[slab][0], (&odd)[4] = queries[slab][1];
        float sums[8][4] = {};
#pragma unroll
        for (int i = 0; i < 8; i++) {
            const uint32_t right = i % 2 ? even[i / 2] >> 16 | odd[i / 2] & 0xFFFF0000 : even[i / 2] & 0xFFFF | odd[i / 2] << 16;
            multiply<ELEMENT>(sums[i], left, right, right);
        }
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int number = head % CLASS_HEADS * KEY_TAPS + key_tap + half * 8;
            const int row = number / 2 * 8 + head % HEADS / CLASS_HEADS * 2 + number % 2;
            const uint32_t to = shared + FOLDED_AT + head / HEADS * FOLDED + slab * FOLDED_SLAB + row * 128;
            if (key_tap + half * 8 < KEY_TAPS)
#pragma unroll
                for (int i = 0; i < 2; i++) {
                    uint32_t pairs[4];
#pragma unroll
                    for (int j = 0; j < 4; j++)
                        pairs[j] = pack<ELEMENT>(sums[2 * j][half * 2 + i] * inverse, sums[2 * j + 1][half * 2 + i] * inverse);
                    store_shared(to + (tap + i ^ row % 8) * 16, uint4{pairs[0], pairs[1], pairs[2], pairs[3]});
                }
        }
    }
}

// The folded queries, [COLUMNS, DEPTH] of each sharing warp group, and what the newest keys add to scores.
DEVICE void fold(const Arguments& args, const Segment& segment, int first_head, bool is_first, bool reads_newest,
                 uint32_t shared) {
#pragma unroll 1
    for (int head = thread_index() / 32; head < ALL_HEADS; head += WARPS)
        fold_head(args, segment, first_head, head, is_first && head < WARPS, reads_newest, shared);
    fence_async_proxy();
    block_sync(OF_ALL, THREADS);
}
