// The arguments of the kernels of a decode step, and their layout of shared memory.
//
// A program takes an equal run of the keys of all sequences (work.cuh), and each of its HEADS warps takes one head of
// them; the warps synchronise where heads are mixed. A warp reads its head's rows by cp.async as a stream of tiles of
// KEYS keys; up to STAGES - 1 tiles are in flight while it multiplies one. A program and a sequence share result slot
// `program + sequence`, so the slots of a sequence are contiguous.
//
// Constants come from the compiler's command line: ELEMENT Half or Bfloat16; HEADS from 8 to 16; HEAD_DIM, a multiple of 16
// up to 128; PAGED; STAGES; PRE_QUERY_TAPS, PRE_KEY_TAPS, PRE_PAD, 1, 1 and 0 without a convolution before, and the same of
// POST, after; PRE_CONV, PRE_MIX, POST_CONV, POST_MIX, whether there are these parts; PRE_TAPS_FLOAT, PRE_MIX_FLOAT,
// POST_TAPS_FLOAT and POST_MIX_FLOAT, whether their numbers are float32.
#pragma once
#include <sm80_decode.cuh>
#include <work.cuh>

constexpr int THREADS = 32 * HEADS;
constexpr int KEYS = 16;                        // of a tile
constexpr int CHUNKS = HEAD_DIM / 8;            // 16 bytes
constexpr int STEPS = HEAD_DIM / 16;            // products are 16 deep
// Eight rows' chunks cover all banks: by a swizzle or, if a row does not fill the banks, by an odd pitch.
constexpr bool SWIZZLED = CHUNKS % 8 == 0;
constexpr int PITCH = (SWIZZLED ? CHUNKS : CHUNKS + 1) * 16;
constexpr int TILE = KEYS * PITCH, RING = STAGES * TILE;
constexpr int TURN = 128;                       // keys, after which the warps synchronise
constexpr int TILES_A_TURN = TURN / KEYS;
constexpr float LOG2E = 1.4426950408889634f;

template <bool Float> DEVICE float number_of(const void* start, int64_t at) {
    return Float ? ((const float*)start)[at] : to_float(((const ELEMENT*)start)[at]);
}

// Where 16 bytes of a row of a tile are, and the bytes 2 * step chunks further.
DEVICE uint32_t place(int row, int chunk) { return row * PITCH + (SWIZZLED ? chunk ^ row % 8 : chunk) * 16; }
DEVICE uint32_t at_step(uint32_t place, int step) { return SWIZZLED ? place ^ step * 32 : place + step * 32; }

struct Rows {  // [B, heads, rows, HEAD_DIM], or of pages in place of sequences: strides in bytes, rows contiguous
    const char* start;
    int64_t stride_batch, stride_head, stride_row;
};
struct Weight {  // [heads, query taps, key taps]; float32 or of the scores' type, which constants say
    const void* start;
    int64_t stride_head, stride_query, stride_key;
    int is_float;

    template <bool Float> DEVICE float at(int head, int query, int key) const {
        return number_of<Float>(start, head * stride_head + query * stride_query + key * stride_key);
    }
};
struct Matrix {  // float32 or of the scores' type
    const void* start;
    int64_t stride_row, stride_column;
    int is_float;

    DEVICE float at(int row, int column) const {
        const int64_t place = row * stride_row + column * stride_column;
        return is_float ? number_of<true>(start, place) : number_of<false>(start, place);
    }
};
struct Arguments {
    Rows q, k, v;
    Weight pre_taps, post_taps;
    Matrix pre_mix, post_mix;  // [out, in] and [in, out], of heads
    const int* table;          // [B, pages of a sequence]
    int64_t table_stride_batch, table_stride_page;
    int page_bits, window;     // rows of q
    Lengths lengths;           // of one KV head
    int programs, splits, slots;  // of rows of logits
    int wide;                  // whether 8 logits from a multiple of 8 keys on are 16 aligned bytes
    float scale;
    ELEMENT* logits;           // [B, HEADS, slots, S], the row of position i in slot i % slots
    int64_t stride_lb, stride_lh, stride_ls, stride_ln;
    float* logsumexp;          // [B, HEADS, slots] of a state, or none
    int64_t stride_sb, stride_sh, stride_ss;
    int* seen;                 // [B] of a state
    int64_t stride_seen;
    float* found;              // [slots of programs, HEADS]: logsumexp of a program's keys
    float* partial;            // [slots of programs, HEADS, HEAD_DIM]
    ELEMENT* out;              // [B, HEADS, HEAD_DIM]
    Matrix norm, gate, bias;   // [1, HEAD_DIM], [1 or HEAD_DIM, HEAD_DIM], [as many, 1], or none
    float eps, factor;         // of the norm
};

// The newest row of logits of a head.
DEVICE ELEMENT* newest_logits(const Arguments& args, int sequence, int length, int head) {
    return args.logits + sequence * args.stride_lb + head * args.stride_lh + max(length - 1, 0) % args.slots * args.stride_ls;
}

// One head's rows of a segment, tile by tile: tile i has the rows from `first` + KEYS i on, zeros outside [from, end).
struct Stream {
    const char* rows;
    const int* table;
    int first, from, end, tiles;
    int page;  // PAGED: of a lane's row of the next tile

    DEVICE void look_up_page(const Arguments& args, int tile) {
        const int key = first + tile * KEYS + (int)(threadIdx.x % KEYS);
        page = key >= from && key < end ? table[(key >> args.page_bits) * args.table_stride_page] : 0;
    }
    DEVICE const char* row_of(const Arguments& args, const Rows& cache, int key, int of_page) const {
        if (!PAGED) return rows + (int64_t)key * (int)cache.stride_row;  // 32 bits take fewer instructions
        return rows + of_page * cache.stride_batch + (int64_t)(key & (1 << args.page_bits) - 1) * (int)cache.stride_row;
    }
    DEVICE void load(const Arguments& args, const Rows& cache, uint32_t ring, int tile) {
        if (tile < tiles) {
            const uint32_t stage = ring + tile % STAGES * TILE;
            const int lane = threadIdx.x % 32;
#pragma unroll
            for (int i = 0; i < KEYS * CHUNKS / 32; i++) {
                const int row = (i * 32 + lane) / CHUNKS, chunk = (i * 32 + lane) % CHUNKS;
                const int key = first + tile * KEYS + row;
                const bool inside = key >= from && key < end;
                const char* source = row_of(args, cache, key, PAGED ? __shfl_sync(~0u, page, row) : 0) + chunk * 16;
                copy_stream(stage + place(row, chunk), inside ? source : rows, inside);
            }
            if (PAGED) look_up_page(args, tile + 1);
        }
        copies_commit();
    }
    // Each lane prefetches a row from tile `tile` on into L2.
    DEVICE void ask_for_rows(const Arguments& args, const Rows& cache, int tile) const {
        const int key = first + tile * KEYS + (int)(threadIdx.x % 32);
        if (key < from || key >= end) return;
        const char* row = row_of(args, cache, key, PAGED ? table[(key >> args.page_bits) * args.table_stride_page] : 0);
#pragma unroll
        for (int i = 0; i < HEAD_DIM * 2; i += 128) ask_for(row + i);
    }
    // Begins with the rows from `first_row` on that are in [from_row, end_row).
    DEVICE void begin(const Arguments& args, const Rows& cache, const Segment& segment, uint32_t ring, int first_row,
                      int from_row, int end_row, int tile_count) {
        const int head = threadIdx.x / 32;
        rows = cache.start + (PAGED ? 0 : segment.sequence * cache.stride_batch) + head * cache.stride_head;
        table = args.table + segment.sequence * args.table_stride_batch;
        first = first_row, from = from_row, end = end_row, tiles = tile_count;
        if (PAGED) look_up_page(args, 0);
#pragma unroll 1
        for (int i = 0; i < STAGES - 1; i++) load(args, cache, ring, i);
    }
};

// A mixing as the left operand of a product of 16 rows (out) and 16 columns (in), in two parts if its numbers are float32.
struct Mixing {
    uint32_t coarse[4], fine[4];

    DEVICE void store(uint32_t at) const {
        store_shared(at, uint4{coarse[0], coarse[1], coarse[2], coarse[3]});
        store_shared(at + 16, uint4{fine[0], fine[1], fine[2], fine[3]});
    }
    DEVICE void load(uint32_t at) {
        const uint4 first = load_shared_16(at), second = load_shared_16(at + 16);
        coarse[0] = first.x, coarse[1] = first.y, coarse[2] = first.z, coarse[3] = first.w;
        fine[0] = second.x, fine[1] = second.y, fine[2] = second.z, fine[3] = second.w;
    }
    // All loads are in flight before the first is used.
    template <bool Float> DEVICE void load(const Matrix& matrix, bool transposed) {
        const int lane = threadIdx.x % 32;
        const int64_t stride_out = transposed ? matrix.stride_column : matrix.stride_row;
        const int64_t stride_in = transposed ? matrix.stride_row : matrix.stride_column;
        float numbers[4][2];
#pragma unroll
        for (int i = 0; i < 8; i++) {
            const int out = lane / 4 + i / 2 % 2 * 8, in = lane % 4 * 2 + i / 4 * 8 + i % 2;
            numbers[i / 2][i % 2] =
                number_of<Float>(matrix.start, min(out, HEADS - 1) * stride_out + min(in, HEADS - 1) * stride_in);
        }
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const int out = lane / 4 + i % 2 * 8, in = lane % 4 * 2 + i / 2 * 8;
            const float low = out < HEADS && in < HEADS ? numbers[i][0] : 0;
            const float high = out < HEADS && in + 1 < HEADS ? numbers[i][1] : 0;
            coarse[i] = pack<ELEMENT>(low, high);
            fine[i] = pack<ELEMENT>(low - to_float(ELEMENT{(uint16_t)coarse[i]}),
                                    high - to_float(ELEMENT{(uint16_t)(coarse[i] >> 16)}));
        }
    }
};

DEVICE bool is_finite(float x) { return fabsf(x) <= 3.402823466e38f; }

// Mixes numbers given as the sum of Parts right operands; `Float` if the mixing has two parts.  Heads of different groups
// have a weight of 0, and 0 * NaN is NaN. So where a result is not finite, the product leaves out non-finite numbers, and
// a head that mixes one of them gets NaN.
template <int Parts, bool Float> DEVICE void mix_heads(const Mixing& mixing, uint32_t (&numbers)[Parts][2], float (&mixed)[4]) {
    const auto multiply_all = [&] {
#pragma unroll
        for (int part = 0; part < Parts; part++) multiply<ELEMENT>(mixed, mixing.coarse, numbers[part][0], numbers[part][1]);
        if (Float) multiply<ELEMENT>(mixed, mixing.fine, numbers[0][0], numbers[0][1]);
    };
    multiply_all();
    if (!__any_sync(~0u, !(is_finite(mixed[0]) && is_finite(mixed[1]) && is_finite(mixed[2]) && is_finite(mixed[3])))) return;
    const uint32_t one = pack<ELEMENT>(1, 0);
    uint32_t weighted[4] = {}, spoiled[2] = {};  // ones where a weight is not 0, and where a number is not finite
    float found[4] = {};
#pragma unroll
    for (int half = 0; half < 32; half += 16) {
#pragma unroll
        for (int i = 0; i < 4; i++)
            if (mixing.coarse[i] >> half & 0x7FFF) weighted[i] |= one << half;
#pragma unroll
        for (int i = 0; i < 2; i++) {
            if (is_finite(to_float(ELEMENT{(uint16_t)(numbers[0][i] >> half)}))) continue;
            spoiled[i] |= one << half;
#pragma unroll
            for (int part = 0; part < Parts; part++) numbers[part][i] &= ~(0xFFFFu << half);
        }
    }
    multiply<ELEMENT>(found, weighted, spoiled[0], spoiled[1]);
#pragma unroll
    for (int i = 0; i < 4; i++) mixed[i] = 0;
    multiply_all();
#pragma unroll
    for (int i = 0; i < 4; i++)
        if (found[i] > 0) mixed[i] = __uint_as_float(0x7FC00000);
}

// A sum of exponentials below the largest exponent.
struct Total {
    float maximum, sum;

    DEVICE void clear() { maximum = MINUS_INFINITY, sum = 0; }
    DEVICE void add(float other_maximum, float other_sum) {
        const float larger = fmaxf(maximum, other_maximum), below = larger == MINUS_INFINITY ? 0 : larger;
        sum = sum * exp2_fast((maximum - below) * LOG2E) + other_sum * exp2_fast((other_maximum - below) * LOG2E);
        maximum = larger;
    }
    // Adds the totals of the lanes whose numbers differ from this lane's in bits from `first` to below `last`.
    DEVICE void add_lanes(int first, int last) {
#pragma unroll
        for (int other = first; other < last; other *= 2) {
            const float other_maximum = __shfl_xor_sync(~0u, maximum, other), other_sum = __shfl_xor_sync(~0u, sum, other);
            add(other_maximum, other_sum);
        }
    }
    DEVICE void store(uint32_t at) const { store_shared(at, maximum), store_shared(at + 4, sum); }
    DEVICE void load(uint32_t at) { maximum = load_shared_float(at), sum = load_shared_float(at + 4); }
    DEVICE float logarithm(float of_nothing) const { return sum > 0 ? maximum + log2f(sum) / LOG2E : of_nothing; }
};
