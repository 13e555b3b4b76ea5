// Conv attention of one new query a sequence, from the KV cache, for sm_80 and later: one read of K and V.
//
// With one query, its taps fold into the query (factor = scale * log2(e); all scores are in powers of two):
//   folded[b] = factor * sum over a of weight[a, b] q_window[a]      a few vectors a head, made once
//   r[b, y]   = folded[b] . k[y]                                    tensor cores
//   c[j]      = sum over b of r[b, j - PAD + b]                     along the diagonals of r
//   out       = sum over j of 2^(c[j] - max) v[j] / sum over j of 2^(c[j] - max)
// Not all queries of the window see the newest QUERY_TAPS - 1 keys. Their columns of r are computed apart, from the
// queries that see them, and replace the tensor cores' columns: other keys need no mask.
//
// A program takes a run of the keys (work.cuh). Its warps take tiles of 32 keys, and of as many values, in turn, by
// cp.async into a warp's STAGES buffers: a program reads contiguous memory. A tile has the columns y of r, and the
// values of the scores that these complete, which end KEY_TAPS - 1 - PAD keys earlier. A warp carries on what a column
// adds to later scores. All HEADS query heads of a KV head, 1, 2 or 4, share the read. Where they do not fit,
// HEAD_BLOCKS programs read the same keys at the same time. many_heads.cu takes more heads.
// Both products have keys or dimensions as rows, and taps or heads as columns, of which tensor cores take eight at a
// time:
//   r^T [keys x taps] = k folded^T,   out^T [dimensions x heads] = v^T p^T
// At the end warps add up in shared memory, and programs that share a head through global memory: each writes its part.
// The last one to finish adds them up, and sets the count of finished programs to zero for the next call.
//
// K and V are read once, at the speed of memory, if warps multiply faster than keys come: at 4.3 TB/s and 132 SMs 32 keys
// of both every 1000 cycles at HEAD_DIM 128. A warp issues about 530 instructions for them with four heads, a quarter of
// an SM's slots at most. What comes on top is fixed: reading the lengths and dividing the keys before the first copy, and
// the sum over programs after the last.
//
// Constants come from the compiler's command line: ELEMENT Half or Bfloat16; HEAD_DIM up to 256; HEADS; HEAD_BLOCKS;
// QUERY_TAPS, KEY_TAPS, PAD; PAGED; ALIGNED, whether rows are in chunks of 16 bytes (else loads are of one number, and
// slow); WARPS, STAGES; SHARED_BYTES, as plan.py counts them, which chooses all these.
#include "fold.cuh"
#include "merge.cuh"

// The place among KEYS of column y of a tap in a warp's r. `offset` is y - tap without the lane's own part, `least` to 7.
DEVICE uint32_t place_of(int of_lane, int offset, int least) {
    if (offset + least >= 0) return (of_lane + offset) * R_KEY;
    if (offset + 7 < 0) return (of_lane + offset + KEYS) * R_KEY;
    return (of_lane + offset + (of_lane + offset < 0 ? KEYS : 0)) * R_KEY;
}

// r of one tile to shared memory.
DEVICE void multiply_keys(int lane, uint32_t keys, uint32_t folded, uint32_t r) {
    const uint32_t key_row = keys + (lane % 16) * PITCH + lane / 16 * 16;
    const uint32_t query_row = folded + (lane / 16 * 8 + lane % 8) * PITCH + lane / 8 % 2 * 16;
    const int tap_of_lane = lane % 4 * 2 / HEADS, head = lane % 4 * 2 % HEADS;  // of a row tile
    const uint32_t r_at = r + tap_of_lane * R_PITCH + head * 4;
#pragma unroll
    for (int first = 0; first < ROW_PAIRS; first += PAIRS_AT_ONCE) {
        float sums[2 * PAIRS_AT_ONCE][2][4] = {};
#pragma unroll
        for (int step = 0; step < DEPTH / 16; step++) {
            uint32_t a[2][4];
            load_matrices(a[0], key_row + step * 32);
            load_matrices(a[1], key_row + step * 32 + 16 * PITCH);
#pragma unroll
            for (int pair = 0; pair < PAIRS_AT_ONCE && first + pair < ROW_PAIRS; pair++) {
                uint32_t b[4];
                load_matrices(b, query_row + (first + pair) * 16 * PITCH + step * 32);
#pragma unroll
                for (int i = 0; i < 4; i++)
                    if (2 * (first + pair) + i / 2 < ROW_TILES)
                        multiply<ELEMENT>(sums[2 * pair + i / 2][i % 2], a[i % 2], b[i / 2 * 2], b[i / 2 * 2 + 1]);
            }
        }
#pragma unroll
        for (int tile = 0; tile < 2 * PAIRS_AT_ONCE; tile++)
#pragma unroll
            for (int half = 0; half < 4; half++) {
                const int tap = (2 * first + tile) * TAPS_A_TILE;
                if (2 * first + tile >= ROW_TILES) continue;
                const float low = sums[tile][half / 2][half % 2 * 2], high = sums[tile][half / 2][half % 2 * 2 + 1];
                const uint32_t at = r_at + tap * R_PITCH;
                const int of_lane = lane / 4 - tap_of_lane, offset = half * 8 - tap;
                if (HEADS > 1) {
                    store_shared(at + place_of(of_lane, offset, 1 - TAPS_A_TILE), __float_as_uint(low),
                                 __float_as_uint(high));
                } else {
                    store_shared(at + place_of(of_lane, offset, -6), low);
                    store_shared(at + R_PITCH + place_of(of_lane - 1, offset, -7), high);
                }
            }
    }
}

// A warp's state for one segment. A lane has a key of each tile: `carried` is what the columns so far add to the next
// tile's first scores. All lanes hold the number that is subtracted from a head's scores; `sum` is of this lane's keys.
// Of `out` a lane holds dimensions lane / 4, and 8 more, of every 16, and heads 2 (lane % 4) and the next of every 8.
struct Sums {
    float out[STEPS][4];
    float carried[HEADS], subtracted[HEADS], sum[HEADS];
    float units[HEADS];  // of r, where it has any

    DEVICE void clear() {
#pragma unroll
        for (int i = 0; i < HEADS; i++) carried[i] = sum[i] = 0, subtracted[i] = LEAST;
#pragma unroll
        for (int i = 0; i < STEPS * 4; i++) out[i / 4][i % 4] = 0;
    }
};

// The scores of the key that this lane's column completes. `slots` pass what the columns add to the next tile's scores
// to the next warp. The last warp passes it to warp 0, which keeps it until its next tile.
DEVICE void add_diagonals(int lane, uint32_t r, uint32_t slots, float (&carried)[HEADS], float (&scores)[HEADS]) {
    const int first = lane - (KEY_TAPS - 1);
    const uint32_t at = r + (first & KEYS - 1) * R_KEY;
    float next[HEADS] = {};
#pragma unroll
    for (int head = 0; head < HEADS; head++) scores[head] = 0;
#pragma unroll
    for (int tap = 0; tap < KEY_TAPS; tap++) {
        float values[HEADS];
        load_floats(values, at + tap * R_PITCH);
#pragma unroll
        for (int head = 0; head < HEADS; head++)
            if (first + tap >= 0) scores[head] += values[head];
            else next[head] += values[head];
    }
    const int warp = thread_index() / 32;
    if (lane < KEY_TAPS - 1) store_floats(slots + warp * CARRIED + lane * R_KEY, next);
    __syncthreads();
    float before[HEADS] = {};
    if (lane < KEY_TAPS - 1) load_floats(before, slots + (warp ? warp - 1 : WARPS - 1) * CARRIED + lane * R_KEY);
#pragma unroll
    for (int head = 0; head < HEADS; head++) {
        scores[head] += warp ? before[head] : carried[head];
        carried[head] = before[head];
    }
}

// Subtract a greater number from now on: scores have become so large that probabilities might overflow.
DEVICE void raise(int lane, const float (&scores)[HEADS], Sums& sums) {
    float scale[HEADS];
#pragma unroll
    for (int head = 0; head < HEADS; head++) {
        float maximum = scores[head];
#pragma unroll
        for (int other = 1; other < 32; other *= 2) maximum = fmaxf(maximum, __shfl_xor_sync(~0u, maximum, other));
        if (!(maximum > sums.subtracted[head] + MOST)) maximum = sums.subtracted[head];  // another head's are large
        scale[head] = exp2_fast(sums.subtracted[head] - maximum);
        sums.subtracted[head] = maximum;
        sums.sum[head] *= scale[head];
    }
    float of_lane[2] = {1, 1};  // of the heads whose `out` this lane has
#pragma unroll
    for (int head = 0; head < HEADS; head++)
        if (lane % 4 == head / 2) of_lane[head % 2] = scale[head];
#pragma unroll
    for (int i = 0; i < STEPS * 4; i++) sums.out[i / 4][i % 4] *= of_lane[i % 2];
}

// The online softmax: probabilities to shared memory.
DEVICE void online_softmax(int lane, const float (&scores)[HEADS], uint32_t probabilities, Sums& sums) {
    bool large = false;
#pragma unroll
    for (int head = 0; head < HEADS; head++) large |= scores[head] > sums.subtracted[head] + MOST;
    if (__any_sync(~0u, large)) raise(lane, scores, sums);
    float p[HEADS];
#pragma unroll
    for (int head = 0; head < HEADS; head++) {
        p[head] = exp2_fast(scores[head] - sums.subtracted[head]);
        sums.sum[head] += p[head];
    }
    const uint32_t to = probabilities + lane * 16;
    if constexpr (HEADS == 4) store_shared(to, pack<ELEMENT>(p[0], p[1]), pack<ELEMENT>(p[2], p[3]));
    else if constexpr (HEADS == 2) store_shared(to, pack<ELEMENT>(p[0], p[1]));
    else store_shared(to, from_float<ELEMENT>(p[0]).bits);
}

// out^T += v^T p^T of one tile.
DEVICE void add_values(int lane, uint32_t values, uint32_t probabilities, Sums& sums) {
    const uint32_t value_row = values + (lane / 16 * 8 + lane % 8) * PITCH + lane / 8 % 2 * 16;
    uint32_t p[4];
    load_matrices_transposed(p, probabilities + lane * 16);
#pragma unroll
    for (int step = 0; step < STEPS; step++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            uint32_t a[4];
            load_matrices_transposed(a, value_row + half * 16 * PITCH + step * 32);
            multiply<ELEMENT>(sums.out[step], a, p[2 * half], p[2 * half + 1]);
        }
}

// The newest keys' columns of r replace the columns from the tensor cores.
DEVICE void put_newest(int lane, uint32_t r, uint32_t newest, int length, int first_column) {
#pragma unroll 1
    for (int i = lane; i < ROWS * NEWEST; i += 32) {
        const int column = length - 1 - i % COLUMNS - first_column, row = i / COLUMNS, tap = row / HEADS;
        if (column >= 0 && column < KEYS)
            store_shared(r + tap * R_PITCH + (column - tap & KEYS - 1) * R_KEY + row % HEADS * 4,
                         load_shared_float(newest + i * 4));
    }
}

// A segment's keys, by all warps. The first keys are in flight.
DEVICE void attend(const Arguments& args, const Segment& segment, Stream& stream, uint32_t shared, Sums& sums) {
    const int warp = thread_index() / 32, lane = thread_index() % 32;
    const uint32_t r = shared + SCRATCH_AT + warp * SCRATCH, probabilities = r + PROBABILITIES;
    fold(args, segment, shared + SCRATCH_AT, shared + FOLDED_AT, shared + NEWEST_AT, sums.units);
    __syncthreads();
    sums.clear();
    store_shared(probabilities + lane * 16, uint4{0, 0, 0, 0});
#pragma unroll 1
    for (int tile = 0; tile < stream.tiles; tile++) {
        const uint32_t keys = Stream::buffer(shared, tile);
        copies_wait<2 * STAGES - 1>();
        __syncwarp();
        multiply_keys(lane, keys, shared + FOLDED_AT, r);
        __syncwarp();
        stream.load_keys(args, shared, tile + STAGES);
        const int first_column = stream.first_column(tile), key = stream.first_score(tile) + lane;
        if (first_column + KEYS > stream.cache.length - NEWEST) {
            put_newest(lane, r, shared + NEWEST_AT, stream.cache.length, first_column);
            __syncwarp();
        }
        float scores[HEADS];
        add_diagonals(lane, r, shared + CARRIED_AT + tile % 2 * WARPS * CARRIED, sums.carried, scores);
#pragma unroll
        for (int head = 0; IN_UNITS<ELEMENT> && head < HEADS; head++) scores[head] *= sums.units[head];
        if (key < stream.start || key >= stream.stop)
#pragma unroll
            for (int head = 0; head < HEADS; head++) scores[head] = MINUS_INFINITY;
        online_softmax(lane, scores, probabilities, sums);
        __syncwarp();
        copies_wait<2 * STAGES - 1>();
        __syncwarp();
        add_values(lane, keys + RING, probabilities, sums);
        __syncwarp();
        stream.load_values(args, shared, tile + STAGES);
    }
}

// A warp's part becomes the sum of every WARPS'th program's. With few heads that is faster than merge.cu.
DEVICE void add_programs(const Arguments& args, uint32_t shared, int first_program, int programs) {
    constexpr int VECTORS = HEADS * DEPTH / 4;
    constexpr int COUNT = (VECTORS + 31) / 32, AT_ONCE = COUNT > 4 ? 1 : 3;  // in flight
    const int warp = thread_index() / 32, lane = thread_index() % 32;
    Part sums[COUNT];
#pragma unroll 1
    for (int next = warp; next < programs; next += WARPS * AT_ONCE) {
        float2 statistic[AT_ONCE][COUNT];
        float4 part[AT_ONCE][COUNT];
#pragma unroll
        for (int k = 0; k < AT_ONCE; k++) {
            const int program = next + k * WARPS;
            const int64_t slot = 2 * ((int64_t)(first_program + program) * HEAD_BLOCKS + blockIdx.x % HEAD_BLOCKS) +
                                 (program == 0);
            const int64_t first = slot * HEADS;
#pragma unroll
            for (int i = 0; i < COUNT; i++) {
                const int vector = min(lane + 32 * i, VECTORS - 1);
                const bool inside = k == 0 || program < programs;
                const float2* at = args.statistics + first + vector / (DEPTH / 4);
                statistic[k][i] = inside ? __ldcg(at) : float2{MINUS_INFINITY, 0};
                part[k][i] = inside ? __ldcg((const float4*)(args.parts + first * DEPTH) + vector) : float4{0, 0, 0, 0};
            }
        }
#pragma unroll
        for (int k = 0; k < AT_ONCE; k++)
#pragma unroll
            for (int i = 0; i < COUNT; i++) sums[i].add(statistic[k][i], part[k][i]);
    }
#pragma unroll
    for (int i = 0; i < COUNT; i++) {
        const int vector = lane + 32 * i, head = vector / (DEPTH / 4), number = vector % (DEPTH / 4) * 4;
        if (vector < VECTORS) {
            store_floats(shared + SCRATCH_AT + warp * SCRATCH + head * OUT_PITCH + number * 4, sums[i].values);
            if (number == 0) set_statistic(shared, warp, head, sums[i].maximum, sums[i].sum);
        }
    }
}

// Adds up the warps' sums of a segment, and the programs' sums if this is the last program that shares the head.
DEVICE void finish(const Arguments& args, const Segment& segment, uint32_t shared, Sums& sums) {
    const int warp = thread_index() / 32, lane = thread_index() % 32;
#pragma unroll
    for (int i = 0; i < HEADS; i++) {
        float sum = sums.sum[i];
#pragma unroll
        for (int other = 1; other < 32; other *= 2) sum += __shfl_xor_sync(~0u, sum, other);
        const float subtracted = sums.subtracted[i];
        if (lane == 0) set_statistic(shared, warp, i, subtracted == LEAST ? MINUS_INFINITY : subtracted, sum);
    }
    store_out(shared + SCRATCH_AT + warp * SCRATCH, sums.out);
    add_warps(args, segment, shared);
    if (segment.programs == 1 || !last_to_come(args, segment, shared + FLAG_AT, [] { __syncthreads(); })) return;
    add_programs(args, shared, segment.first_program, segment.programs);
    Segment whole = segment;
    whole.programs = 1;
    add_warps(args, whole, shared);
}

#include "program.cuh"
