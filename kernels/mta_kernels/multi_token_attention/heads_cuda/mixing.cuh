// Mixes heads on the tensor cores, 16 keys at a time: [heads x keys] = weights [heads x heads] numbers [heads x keys].
//
// A product gives lane t numbers of heads t / 4 and 8 further, keys 2 (t % 4) and the next of each eight (mma.cuh).
//
// Constants: HEADS, 1 to 16; PITCH, bytes from a head to the next in shared memory: eight heads cover all banks.
#pragma once
#include <stored.cuh>

static_assert(HEADS <= 16 && PITCH % 32 == 16, "one matrix of all heads, in all banks");

// Weights [to, from] as the left side of a product, zeros beyond the heads.
struct Weights {
    uint32_t held[4];
    DEVICE Weights(const ELEMENT* mix, int stride_to, int stride_from) {
        const int lane = lane_index();
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const int to = lane / 4 + i % 2 * 8, from = lane % 4 * 2 + i / 2 * 8;
            uint32_t both[2];
#pragma unroll
            for (int e = 0; e < 2; e++)
                both[e] = to < HEADS && from + e < HEADS ? mix[to * stride_to + (from + e) * stride_from].bits : 0;
            held[i] = both[1] << 16 | both[0];
        }
    }
};

// This lane's row of the four 8 x 8 matrices of a tile's first 16 keys: halves of heads, then of keys. Padding heads
// repeat the last one; their weight is zero.
DEVICE uint32_t matrix_row() {
    const int lane = lane_index();
    return min(lane / 8 % 2 * 8 + lane % 8, HEADS - 1) * PITCH + lane / 16 * 16;
}

// A lane's 16-byte chunks of Keys keys of all heads: `body(address in shared memory, place from the first head's)`, with
// heads `stride` apart.
template <int Keys, class Body> DEVICE void for_chunks(int64_t stride, const Body& body) {
    constexpr int CHUNKS = Keys / 8, ALL = HEADS * CHUNKS, TURNS = (ALL + 31) / 32;
    static_assert(32 % CHUNKS == 0, "a turn has whole heads");
    const int lane = lane_index(), head = lane / CHUNKS, chunk = lane % CHUNKS;
    int64_t place = head * stride + chunk * 8;
    uint32_t address = head * PITCH + chunk * 16;
#pragma unroll
    for (int i = 0; i < TURNS; i++, place += 32 / CHUNKS * stride, address += 32 / CHUNKS * PITCH)
        if ((i + 1) * 32 <= ALL || i * 32 + lane < ALL) body(address, place);
}
template <int Keys> DEVICE void store_heads(ELEMENT* destination, int64_t stride, uint32_t tile) {
    for_chunks<Keys>(stride, [&](uint32_t address, int64_t place) {
        store_global(destination + place, load_shared_16(tile + address));
    });
}

// Numbers at 16 keys, of both halves of the keys.
using Numbers = float[2][4];

// Mixes numbers [from x keys], loaded transposed, to [to x keys].
DEVICE void mix(Numbers& mixed, const Weights& weights, const uint32_t (&numbers)[4]) {
#pragma unroll
    for (int half = 0; half < 2; half++) {
#pragma unroll
        for (int i = 0; i < 4; i++) mixed[half][i] = 0;
        multiply<ELEMENT>(mixed[half], weights.held, numbers[half * 2], numbers[half * 2 + 1]);
    }
}
// Rounds numbers to pairs: halves of heads, then of keys.
DEVICE void round_pairs(uint32_t (&pairs)[4], const Numbers& numbers) {
#pragma unroll
    for (int i = 0; i < 4; i++) pairs[i] = pack<ELEMENT>(numbers[i / 2][i % 2 * 2], numbers[i / 2][i % 2 * 2 + 1]);
}
DEVICE void store_pairs(uint32_t keys, const uint32_t (&pairs)[4]) {
    const int lane = lane_index();
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const int head = lane / 4 + i % 2 * 8;
        if (head < HEADS) store_shared(keys + head * PITCH + i / 2 * 16 + lane % 4 * 4, pairs[i]);
    }
}

// Sums over keys of products of heads.
struct Products {
    float sums[2][4] = {};

    // Adds [heads x keys] times the transpose of another.
    DEVICE void add(const uint32_t (&left)[4], const uint32_t (&right)[4]) {
#pragma unroll
        for (int half = 0; half < 2; half++) multiply<ELEMENT>(sums[half], left, right[half], right[half + 2]);
    }
    template <class Body> DEVICE void for_all(const Body& body) const {  // [heads of the left, of the right]
        const int lane = lane_index();
#pragma unroll
        for (int i = 0; i < 8; i++) {
            const int left = lane / 4 + i % 4 / 2 * 8, right = i / 4 * 8 + lane % 4 * 2 + i % 2;
            if (left < HEADS && right < HEADS) body(left * HEADS + right, sums[i / 4][i % 4]);
        }
    }
};

// The same for gradients whose loss scale, in Half, changes from row to row: `before` sums earlier rows, unscaled.
template <class Element> struct OfGradients : Products {
    DEVICE void begin_row(float) {}
};
template <> struct OfGradients<Half> : Products {
    Products before;  // without the loss scale
    float unit = 1;

    DEVICE void begin_row(float of_row) {
        if (of_row == unit) return;
        end_rows();
        unit = of_row;
    }
    DEVICE void end_rows() {
#pragma unroll
        for (int i = 0; i < 8; i++) before.sums[i / 4][i % 4] += sums[i / 4][i % 4] * unit, sums[i / 4][i % 4] = 0;
    }
    template <class Body> DEVICE void for_all(const Body& body) {
        end_rows();
        before.for_all(body);
    }
};
using ScaledProducts = OfGradients<ELEMENT>;
