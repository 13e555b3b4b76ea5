// The backward of forward.cu, in place: from scores S and gradients dB of the mixed probabilities, and the logsumexp.
//
//   dP[g] = sum over h of post[g, h] dB[h]        dL = P (dP - delta),  delta = sum over the row of P dP
//   S[h] := sum over g of P[g] post[g, h]         dB[g] := sum over h of pre[h, g] dL[h]
//   dpost[g, h] = sum over positions of P[g] dB[h],   dpre[h, g] = of dL[h] S[g]
//
// As forward.cu, with two buffers a row. The first pass over a row sums delta and P (the sum is 1 up to the logsumexp's
// rounding); the second replaces S and dB by the results. The gradients of the mixings sum over positions. Positions are
// the inner dimension of a product whose right side is P or dL, with 8 x 8 matrices transposed in registers. Each warp
// sums over all its rows and writes at the end; the sum over warps has a fixed order.
//
// A score takes 8 bytes of memory: 2.3 scores a cycle and SM, which can issue 56 instructions of a warp for 32.
#include "rows.cuh"

// Sums over positions of products of heads, as `multiply` holds them: EIGHTS of columns for each 16 rows.
using Products = float[SQUARES][EIGHTS][4];

// `products` += a tile [rows][positions] times pairs [positions][columns]; masks a `hidden` tile, which may have NaN.
DEVICE void add_products(Products& products, uint32_t tile, const uint32_t (&pairs)[EIGHTS][2], const Lane& lane, const Row& row,
                         int column, bool hidden) {
    uint32_t b[EIGHTS][2];
#pragma unroll
    for (int i = 0; i < EIGHTS * 2; i++) b[i / 2][i % 2] = transpose(pairs[i / 2][i % 2]);
#pragma unroll
    for (int square = 0; square < SQUARES; square++) {
        uint32_t a[4];
        load_matrices(a, tile + lane.along[square]);
        if (hidden) {
            const int position = column + thread_index() % 4 * 2;
#pragma unroll
            for (int i = 0; i < 4; i++) {
                if (!row.sees(position + i / 2 * 8)) a[i] &= 0xFFFF0000u;
                if (!row.sees(position + i / 2 * 8 + 1)) a[i] &= 0xFFFFu;
            }
        }
#pragma unroll
        for (int i = 0; i < EIGHTS; i++) multiply<ELEMENT>(products[square][i], a, b[i][0], b[i][1]);
    }
}

// Stores, or adds, the transpose [columns, rows] of a warp's sums times `unit` to `destination`; clears the sums.
DEVICE void take_products(float* destination, Products& products, float unit, bool adds) {
    const int lane = thread_index() % 32;
#pragma unroll
    for (int i = 0; i < SQUARES * EIGHTS * 4; i++) {
        const int eight = i / 4 % EIGHTS, square = i / 4 / EIGHTS;
        const int row = 16 * square + lane / 4 + i % 4 / 2 * 8, column = head_of(lane, eight, i % 2);
        float& sum = products[square][eight][i % 4];
        float* const place = destination + column * HEADS + row;
        if (row < HEADS && column < HEADS) *place = (adds ? *place : 0) + sum * unit;
        sum = 0;
    }
}

// Beyond it, the rounding of a logsumexp may exceed the range of an exponential: the row's logits are summed again.
constexpr float LARGE = 1 << 20;

// A row's numbers for this lane's heads.
struct Softmax {
    float logsumexp[EIGHTS][2];
    float inverse[EIGHTS][2];    // of the sum of probabilities
    float delta[EIGHTS][2];

    DEVICE Softmax(const Arguments& args, const Row& row) {
        const float* source = args.logsumexp + row.sequence * args.sums_batch + row.number * args.sums_row;
#pragma unroll
        for (int i = 0; i < EIGHTS * 2; i++) {
            const int head = head_of(thread_index(), i / 2, i % 2);
            // Padding heads have logits mixed with zero weights, or else repeat the last head's.
            const float found = PRE_MIX && head >= HEADS ? 0 : source[min(head, HEADS - 1) * args.sums_head];
            logsumexp[i / 2][i % 2] = found == MINUS_INFINITY ? 0 : found;
        }
    }
    DEVICE bool is_large(int i) const { return fabsf(logsumexp[i / 2][i % 2]) > LARGE; }
    DEVICE bool some_is_large() const {  // the same in all warps of a row
        bool found = false;
#pragma unroll
        for (int i = 0; i < EIGHTS * 2; i++) found |= is_large(i);
        return __any_sync(~0u, found);
    }
    DEVICE void set_large(const Sums& sums) {
#pragma unroll
        for (int i = 0; i < EIGHTS * 2; i++) {
            const float2 pair = sums[i / 2][i % 2];
            if (!is_large(i)) continue;
            logsumexp[i / 2][i % 2] = pair.y == 0 ? 0 : fmaf(log2f(pair.y), LN_2, pair.x);
        }
    }
    DEVICE void set_sums(const Sums& sums) {
#pragma unroll
        for (int i = 0; i < EIGHTS * 2; i++) {
            const float2 pair = sums[i / 2][i % 2];
            inverse[i / 2][i % 2] = pair.y == 0 ? 0 : 1 / pair.y;
            delta[i / 2][i % 2] = pair.x * inverse[i / 2][i % 2];
        }
    }
    DEVICE float power(float logit, int eight, int i) const { return exponential(logit, logsumexp[eight][i]); }
};

struct Matrices {
    Weights<false> pre, post_back;
    Weights<true> post, pre_back;
    DEVICE Matrices(uint32_t shared)
        : pre(shared + PRE_AT), post_back(shared + POST_AT), post(shared + POST_AT), pre_back(shared + PRE_AT) {}
};

// Logits and gradients of the probabilities of a tile, [positions x heads].
DEVICE void mix_tile(float (&x)[EIGHTS][4], float (&dp)[EIGHTS][4], uint32_t tile, uint32_t grad_tile, const Lane& lane,
                     const Matrices& weights, const Row& row, int column, bool hidden) {
    mix<PRE_MIX>(x, tile, lane, weights.pre);
    mix<POST_MIX>(dp, grad_tile, lane, weights.post_back);
    if (hidden) {
        hide(x, row, column);
        hide(dp, row, column, 0);
    }
}

DEVICE void differentiate_row(const Arguments& args, const Row& row, Softmax& softmax, uint32_t buffer, const Lane& lane,
                              const Matrices& weights, Products& dpre, Products& dpost, uint32_t shared, int rank,
                              Turn& received) {
    const uint32_t grad_buffer = buffer + HEADS * args.pitch;
    const int first = row.start + thread_index() / 32 * COLUMNS;
    // Calls `use(x, dp, at, column, hidden)` for each tile: logits and gradients, `at` in the buffers.
    const auto for_tiles = [&](auto use) {
#pragma unroll 1
        for (int column = first; column < row.stop; column += WARPS * COLUMNS) {
            const bool hidden = some_hidden(row, column);
#pragma unroll
            for (int i = 0; i < TILES; i++) {
                const int at = (column - row.start) * 2 + i * 32;
                float x[EIGHTS][4], dp[EIGHTS][4];
                mix_tile(x, dp, buffer + at, grad_buffer + at, lane, weights, row, column + 16 * i, hidden);
                use(x, dp, at, column + 16 * i, hidden);
            }
        }
    };
    Sums sums;
    if (softmax.some_is_large()) {
        sum_logits(sums, row, buffer, lane, weights.pre, shared, rank, received);
        softmax.set_large(sums);
    }
#pragma unroll
    for (int i = 0; i < EIGHTS * 2; i++) sums[i / 2][i % 2] = {0, 0};
    for_tiles([&](auto& x, auto& dp, int, int, bool) {
#pragma unroll
        for (int j = 0; j < EIGHTS * 4; j++) {
            float2& pair = sums[j / 4][j % 2];
            const float p = softmax.power(x[j / 4][j % 4], j / 4, j % 2);
            pair = {fmaf(p, dp[j / 4][j % 4], pair.x), pair.y + p};
        }
    });
    merge_sums<OfNumbers>(sums, shared, rank, received);
    softmax.set_sums(sums);
    for_tiles([&](auto& x, auto& dp, int at, int column, bool hidden) {
#pragma unroll
        for (int j = 0; j < EIGHTS * 4; j++) {
            const float p = softmax.power(x[j / 4][j % 4], j / 4, j % 2) * softmax.inverse[j / 4][j % 2];
            x[j / 4][j % 4] = p, dp[j / 4][j % 4] = p * (dp[j / 4][j % 4] - softmax.delta[j / 4][j % 2]);
        }
        if (hidden) {  // even in a row of NaN: the tile has unseen keys, too
            hide(x, row, column, 0);
            hide(dp, row, column, 0);
        }
        uint32_t p[EIGHTS][2], dl[EIGHTS][2];
        round_pairs(p, x);
        round_pairs(dl, dp);
        if (row.high - row.low == 1) {  // a single visible key has probability 1 exactly, whatever its score
#pragma unroll
            for (int j = 0; j < EIGHTS * 2; j++) dl[j / 2][j % 2] = 0;
        }
        if (POST_MIX) add_products(dpost, grad_buffer + at, p, lane, row, column, hidden);
        if (PRE_MIX) add_products(dpre, buffer + at, dl, lane, row, column, hidden);
        mix_back(buffer + at, p, lane, shared + SCRAP_AT, weights.post);
        mix_back(grad_buffer + at, dl, lane, shared + SCRAP_AT, weights.pre_back);
    });
}

extern "C" __global__ void IN_CLUSTERS __launch_bounds__(THREADS, BLOCKS)
    mix_rows_backward(const __grid_constant__ Arguments args) {
    const uint32_t shared = shared_memory();
    run_block(args, shared, [&](int rank, int cluster, int warp) {
        const Lane lane(args.pitch);
        const Matrices weights(shared);
        Products dpre = {}, dpost = {};
        float* const parts = args.parts + ((int64_t)block_index() * WARPS + warp) * 2 * HEADS * HEADS;
        float unit = 1;  // of the gradients in these sums
        bool has_taken = false;
        const auto take_all = [&] {
            take_products(parts, dpre, unit, has_taken);
            take_products(parts + HEADS * HEADS, dpost, unit, has_taken);
            has_taken = true;
        };
        Turn received;
        for_rows(
            args, shared, rank, cluster, [&](const Row& row) { return Softmax(args, row); },
            [&](const Row& row, Softmax& softmax, uint32_t buffer) {
                const float of_row = row.gradient_unit(args);
                if (of_row != unit) take_all(), unit = of_row;
                differentiate_row(args, row, softmax, buffer, lane, weights, dpre, dpost, shared, rank, received);
            });
        take_all();
    });
}
