// What forward and backward share: the geometry of a tile, which keys a row sees, and scores that fit fp16.
// Constants come from the compiler's command line; see forward.cu.
#pragma once
#include <device.cuh>
#include <wgmma.cuh>

constexpr int HALO = QUERY_TAPS - 1;
constexpr int ROWS = 64, KEYS = 64;
constexpr int CARRIED = 16;
constexpr int LEFT = (KEY_TAPS - 1 - PAD + 7) / 8 * 8;  // columns of c left of a block of scores that it touches
constexpr int LEFT_BACK = (PAD + 7) / 8 * 8;            // columns of ds left of a block of dc
static_assert(QUERY_TAPS >= 1 && QUERY_TAPS <= 8, "eight rows above a score tile hold zeros");
static_assert(LEFT <= CARRIED && PAD <= CARRIED - LEFT, "16 columns of scores touch 32 of c");
static_assert(LEFT_BACK <= CARRIED && KEY_TAPS - 1 - PAD <= CARRIED - LEFT_BACK, "and the other way");

constexpr int SLAB = 64 * 128;  // bytes of 64 rows of 64 numbers, as the copy engine lays them with a 128-byte swizzle
constexpr int DEPTH_STEPS = (HEAD_DIM + 15) / 16;
constexpr int SLABS = (HEAD_DIM + 63) / 64;
constexpr int TAP = 16 * 32 * 2;  // bytes of one T

constexpr float HALF_LIMIT_LOG2 = 15.8f;  // scores go through fp16, whose numbers end at 2^16
constexpr float LN_2 = 0.69314718f, LOG2_E = 1.44269504f;
constexpr int NORM_PARTS = 32;  // maxima of squared norms of rows, a head

struct Positions {
    const int* spans;          // [2, N] or null
    int heads, group;          // query heads, and of them those that share a KV head
    int query_rows, key_rows;  // M, N: the queries are the last M positions
};

DEVICE int clamp_row(const Positions& at, int row) { return row < 0 ? 0 : row < at.query_rows ? row : at.query_rows - 1; }

// The keys that row `row` sees; rows outside are as the nearest.
DEVICE int keys_begin(const Positions& at, int row) { return SPANS ? at.spans[clamp_row(at, row)] : 0; }
DEVICE int keys_end(const Positions& at, int row) {
    int end = CAUSAL ? row + (at.key_rows - at.query_rows) + 1 : at.key_rows;
    if (SPANS) end = min(end, at.spans[at.key_rows + clamp_row(at, row)]);
    return end;
}

DEVICE float warp_max(float value) {
    for (int lane = 1; lane < 32; lane *= 2) value = fmaxf(value, __shfl_xor_sync(~0u, value, lane));
    return value;
}

// The power of two by which the queries of a block, Rows of them, are divided so that no score overflows fp16; 1 for all but
// extreme inputs. |s| <= |q| |k| bounds it before any score is known. Also divides them: the factor goes back in with T's.
// By Threads threads; `largest` has room for a float a warp, `key_norm` is a lane's of the head's NORM_PARTS.
template <int Rows, int Threads>
DEVICE float rescale_queries(uint32_t queries, uint32_t largest, float key_norm, int thread) {
    auto numbers_at = [&](int row, int chunk) {  // the swizzle moves the chunks of a row; threads begin at different ones
        return queries + row / ROWS * (SLABS * SLAB) + chunk / 8 * SLAB + row % ROWS * 128 + (chunk + row) % 8 * 16;
    };
    float norm = 0;
#pragma unroll 1
    for (int row = thread; row < Rows; row += Threads) {
        float sum = 0;
#pragma unroll 2
        for (int chunk = 0; chunk < 8 * SLABS; chunk++) {
            const uint4 numbers = load_shared_16(numbers_at(row, chunk));
            const uint32_t pairs[4] = {numbers.x, numbers.y, numbers.z, numbers.w};
            for (uint32_t pair : pairs) {
                const float low = unpack<ELEMENT>((uint16_t)pair), high = unpack<ELEMENT>((uint16_t)(pair >> 16));
                sum += low * low + high * high;
            }
        }
        norm = fmaxf(norm, sum);
    }
    norm = warp_max(norm);
    key_norm = warp_max(key_norm);
    if (thread % 32 == 0) store_shared(largest + thread / 32 * 4, __float_as_uint(norm));
    part_barrier<Threads>();
    for (int warp = 0; warp < Threads / 32; warp++) norm = fmaxf(norm, __uint_as_float(load_shared(largest + warp * 4)));
    const float excess = 0.5f * (log2f(norm) + log2f(key_norm)) - HALF_LIMIT_LOG2;
    float factor = 1;
    if (excess > 0) {
        factor = exp2f(ceilf(fminf(excess, 60.f)));  // powers of two: exact
        const float inverse = 1 / factor;
        auto divided = [&](uint32_t pair) {
            return pack<ELEMENT>(unpack<ELEMENT>((uint16_t)pair) * inverse, unpack<ELEMENT>((uint16_t)(pair >> 16)) * inverse);
        };
#pragma unroll 1
        for (int row = thread; row < Rows; row += Threads)
#pragma unroll 1
            for (int chunk = 0; chunk < 8 * SLABS; chunk++) {
                const uint4 numbers = load_shared_16(numbers_at(row, chunk));
                store_shared(numbers_at(row, chunk),
                             uint4{divided(numbers.x), divided(numbers.y), divided(numbers.z), divided(numbers.w)});
            }
        fence_async_proxy();
    }
    part_barrier<Threads>();  // also: `largest` may be written again
    return factor;
}
