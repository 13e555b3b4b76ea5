// The warps that mix: logits of a few rows each, their exponentials to memory, and the rows' references and sums.
#pragma once
#include <logits_layout.cuh>

constexpr float NOTHING = -3e38f;  // a reference of no logits
// Large sums, well within the range of bfloat16. A sum above MOST raises its reference by at least this power of two,
// which is below the greatest exponential in such a sum.
constexpr float MOST = 1e18f, RAISE = 40;

// A row's logits as a lane holds them, see `mix_row`.
using Logits = float[4][4];
using Pairs = uint32_t[2][4];  // of these: left sides of products, pairs 2 i + head of either half of the keys
constexpr uint32_t TWO_ONES = 0x3F803F80;  // in bfloat16

struct MixWarp {
    const Arguments& args;
    const Block& block;
    int warp, lane;
    uint32_t weights[4];      // pre, rounded: the left side of the products
    uint32_t matrix_at;       // the row of an 8 x 8 matrix that this lane names, in a buffer
    uint32_t references_at;   // of the warp's first row, this lane's heads: lane / 4 and 8 further
    uint32_t sums_at;         // the same of its sums
    // For a piece:
    int rows;                 // the warp's rows that exist
    int position;             // of the first
    uint16_t* kept;           // the first row of this lane's first head, at the lane's first key of keys 0 to 31
    int first_key;

    DEVICE MixWarp(const Arguments& args, const Block& block, int warp, int lane)
        : args(args), block(block), warp(warp), lane(lane) {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const int out = lane / 4 + i % 2 * 8, in = lane % 4 * 2 + i / 2 * 8;
            weights[i] = pack<Element>(number_at<HEADS, Element>(args.pre, out, in),
                                       number_at<HEADS, Element>(args.pre, out, in + 1));
        }
        matrix_at = (lane / 8 % 2 * 8 + lane % 8) * PLANE + lane / 16 * 16 + warp * MIX_ROWS * STEP_KEYS * 2;
        references_at = block.shared + REFERENCES_AT + warp * MIX_ROWS * 64 + lane / 4 * 8;
        sums_at = references_at + SUMS_AT - REFERENCES_AT;
    }

    DEVICE int first_row(const Piece& piece) const { return block.first_row(piece) + block.part * BLOCK_ROWS + warp * MIX_ROWS; }

    DEVICE void begin(const Piece& piece) {
        const int row = first_row(piece);
        rows = max(0, min(MIX_ROWS, args.rows - row)), position = args.first_position + row;
        first_key = piece.first * BLOCK_KEYS;
        kept = args.kept + (((int64_t)piece.sequence * HEADS + lane / 4) * args.rows + row) * args.pitch + lane % 4 * 8;
        for (int i = 0; i < MIX_ROWS; i++) store_shared(sums_at + i * 64, float2{0, 0});
    }
    DEVICE int last_seen(int row) const { return args.causal ? min(position + row, args.keys - 1) : args.keys - 1; }

    // x[i]: logits, in powers of two, of heads lane / 4 (0, 1) and 8 further (2, 3) at keys 8 (lane % 4) + 2 i and the next. `planes` is the
    // buffer at this lane's matrix row. The products' columns 8 i + 2 b and the next are keys 8 b + 2 i and the next.
    DEVICE void mix_row(Logits& x, uint32_t planes, int row) const {
#pragma unroll
        for (int half = 0; half < 2; half++) {
            uint32_t scores[4];
            load_matrices_transposed(scores, planes + row * STEP_KEYS * 2 + half * 32);
#pragma unroll
            for (int i = 0; i < 2; i++) {
                float(&sums)[4] = x[2 * half + i];
#pragma unroll
                for (int j = 0; j < 4; j++) sums[j] = 0;
                multiply<Element>(sums, weights, scores[2 * i], scores[2 * i + 1]);
            }
        }
    }
    DEVICE void hide(Logits& x, int key, int row) const {
        const int seen = last_seen(row) - key - lane % 4 * 8;  // the last visible one of the lane's eight keys
#pragma unroll
        for (int i = 0; i < 16; i++)
            if (i / 4 * 2 + i % 2 > seen) x[i / 4][i % 4] = MINUS_INFINITY;
    }
    DEVICE float2 greatest(const Logits& x) const {  // of both heads, the same in four lanes
        float found[2];
#pragma unroll
        for (int head = 0; head < 2; head++) {
            found[head] = x[0][2 * head];
#pragma unroll
            for (int i = 1; i < 8; i++) found[head] = fmaxf(found[head], x[i / 2][2 * head + i % 2]);
#pragma unroll
            for (int other = 1; other < 4; other *= 2)
                found[head] = fmaxf(found[head], __shfl_xor_sync(~0u, found[head], other));
        }
        return {found[0], found[1]};
    }

    // The exponentials over the reference, rounded, and their sums over the keys of four lanes, by a product with a matrix
    // of ones. The sums must be of the rounded numbers: else probabilities would not add up to one.
    DEVICE float2 exponentials(Pairs& pairs, const Logits& x, float2 reference) const {
        float e[16], sums[4] = {};
#pragma unroll
        for (int i = 0; i < 16; i++)
            e[i] = exp2_fast(x[i / 4][i % 4] - (i % 4 < 2 ? reference.x : reference.y));
#pragma unroll
        for (int i = 0; i < 8; i++) pairs[i / 4][i % 4] = pack<Element>(e[2 * i], e[2 * i + 1]);
#pragma unroll
        for (int half = 0; half < 2; half++) multiply<Element>(sums, pairs[half], TWO_ONES, TWO_ONES);
        return {sums[0], sums[2]};
    }
    DEVICE void store(const Pairs& pairs, uint16_t* at, bool first, bool second) const {  // at: see `kept`
#pragma unroll
        for (int head = 0; head < 2; head++)
            if (lane / 4 + head * 8 < HEADS && (head ? second : first))
                store_global(head ? at + 8 * args.rows * args.pitch : at,
                             {pairs[0][head], pairs[0][2 + head], pairs[1][head], pairs[1][2 + head]});
    }

    // Each row's reference is the greatest logit of its first keys.
    DEVICE void set_references(uint32_t planes) const {
#pragma unroll 1
        for (int row = 0; row < MIX_ROWS; row++) {
            float x[4][4];
            mix_row(x, planes, row);
            hide(x, 0, row);
            const float2 found = greatest(x);
            if (lane % 4 == 0)
                store_shared(references_at + row * 64, float2{fmaxf(found.x, NOTHING), fmaxf(found.y, NOTHING)});
        }
        __syncwarp();
    }

    // A step of all rows. Rows whose sums are too large are not added; `raise` repeats them.
    template <bool Masked> DEVICE void mix_step(uint32_t planes, int key) const {
        uint32_t too_large = 0;  // a bit a row and head
        uint16_t* at = kept + key;
        Logits x[2];  // while a row's exponentials are computed, the next is mixed
        mix_row(x[0], planes, 0);
#pragma unroll 1
        for (int pair = 0; pair < MIX_ROWS; pair += 2)
#pragma unroll
            for (int i = 0; i < 2; i++) {
                const int row = pair + i;
                mix_row(x[1 - i], planes, i == 0 ? row + 1 : min(row + 1, MIX_ROWS - 1));
                if (Masked) hide(x[i], key, row);
                const float2 sums = load_shared_pair(sums_at + row * 64);
                Pairs pairs;
                const float2 more = exponentials(pairs, x[i], load_shared_pair(references_at + row * 64));
                if (row < rows) store(pairs, at, true, true);
                at += args.pitch;
                const float2 now = {sums.x + more.x, sums.y + more.y};
                const bool grows[2] = {now.x > MOST, now.y > MOST};
                __syncwarp();  // four lanes store the same
                store_shared(sums_at + row * 64, float2{grows[0] ? sums.x : now.x, grows[1] ? sums.y : now.y});
                too_large |= (grows[0] + 2 * grows[1]) << (2 * row);
            }
        if (__any_sync(~0u, too_large != 0)) raise(planes, key, too_large);
    }

    // Repeats the step over raised references, for rows and heads whose sums are too large.
    DEVICE void raise(uint32_t planes, int key, uint32_t raised) const {
#pragma unroll 1
        for (int row = 0; row < rows; row++) {
            const bool first = raised >> (2 * row) & 1, second = raised >> (2 * row + 1) & 1;
            if (!__any_sync(~0u, first || second)) continue;
            float x[4][4];
            mix_row(x, planes, row);
            hide(x, key, row);
            const float2 before = load_shared_pair(references_at + row * 64), sums = load_shared_pair(sums_at + row * 64);
            const float2 found = greatest(x);
            const float2 now = {first ? fmaxf(found.x, before.x + RAISE) : before.x,
                                second ? fmaxf(found.y, before.y + RAISE) : before.y};
            const float factors[2] = {first ? exp2_fast(before.x - now.x) : 1, second ? exp2_fast(before.y - now.y) : 1};
            if (first) scale_kept(row, 0, key, factors[0]);
            if (second) scale_kept(row, 1, key, factors[1]);
            Pairs pairs;
            const float2 more = exponentials(pairs, x, now);
            store(pairs, kept + row * args.pitch + key, first, second);
            __syncwarp();  // four lanes store the same
            store_shared(references_at + row * 64, now);
            store_shared(sums_at + row * 64, float2{sums.x * factors[0] + (first ? more.x : 0),
                                                    sums.y * factors[1] + (second ? more.y : 0)});
        }
    }
    // Rescales the exponentials that this lane stored of a row and head in this piece.
    DEVICE void scale_kept(int row, int head, int key, float factor) const {
        uint16_t* at = kept + (row + (int64_t)head * 8 * args.rows) * args.pitch;
        if (lane / 4 + head * 8 >= HEADS) return;
#pragma unroll 1
        for (int earlier = first_key; earlier < key; earlier += STEP_KEYS) scale_eight(at + earlier, factor);
    }
    static DEVICE void scale_eight(uint16_t* at, float factor) {
        uint4 values = *(const uint4*)at;
        uint32_t* pairs[4] = {&values.x, &values.y, &values.z, &values.w};
#pragma unroll
        for (int i = 0; i < 4; i++)
            *pairs[i] = pack<Element>(unpack<Element>((uint16_t)*pairs[i]) * factor,
                                      unpack<Element>((uint16_t)(*pairs[i] >> 16)) * factor);
        store_global(at, values);
    }

    DEVICE void store_sums(const Piece& piece) const {
        const int64_t first = (int64_t)piece.part * args.batch + piece.sequence;
        float2* parts = args.parts + (first * HEADS + lane / 4) * args.rows + first_row(piece);
#pragma unroll 1
        for (int row = 0; row < rows; row++) {
            if (lane % 4 != 0) continue;
            const float2 sums = load_shared_pair(sums_at + row * 64), reference = load_shared_pair(references_at + row * 64);
            if (lane / 4 < HEADS) parts[row] = {reference.x, sums.x};
            if (lane / 4 + 8 < HEADS) parts[row + 8 * args.rows] = {reference.y, sums.y};
        }
        __syncwarp();  // the next piece begins with other sums
    }

    DEVICE void wait(int count) const {
        const uint32_t barrier = block.full(count % BUFFERS, warp * MIX_ROWS / 16);
#if SPLIT > 1
        barrier_wait_cluster(barrier, count / BUFFERS & 1);
#else
        barrier_wait(barrier, count / BUFFERS & 1);
#endif
    }
    DEVICE void release(int count) const {
        __syncwarp();
        const int rows_of = block.part * ROW_GROUPS + warp * MIX_ROWS / 16;
#if SPLIT > 1
        if (lane < SPLIT) arrive_in_block(block.rank(block.tile, lane), block.empty(count % BUFFERS, rows_of));
#else
        if (lane == 0) barrier_arrive(block.empty(count % BUFFERS, rows_of));
#endif
    }
};

DEVICE void mix_scores(const Arguments& args, const Block& block, int warp, int lane) {
    MixWarp own(args, block, warp, lane);
    int count = 0;  // steps
#pragma unroll 1
    for (Piece piece(args, block.worker); piece.any(); piece.next(args, block.worker)) {
        own.begin(piece);
        const int steps = piece.steps();
#pragma unroll 1
        for (int step = 0; step < steps; step++, count++) {
            const int key = piece.key(step);
            const uint32_t planes = block.planes(count % BUFFERS) + own.matrix_at;
            own.wait(count);
            if (step == 0) own.set_references(planes);
            if (step > 0 || piece.first == 0) {
                if (key + STEP_KEYS - 1 > own.last_seen(0)) own.mix_step<true>(planes, key);
                else own.mix_step<false>(planes, key);
            }
            own.release(count);
        }
        own.store_sums(piece);
    }
}
