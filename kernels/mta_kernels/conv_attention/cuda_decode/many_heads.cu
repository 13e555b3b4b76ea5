// Conv attention of one new query a sequence, from the KV cache, for sm_80 and later: one read of K and V.
//
//   s[a, y] = q_window[a] . k[y]                                        tensor cores; 0 where query a does not see key y
//   c[j]    = factor * sum over a, b of weight[a, b] s[a, j - PAD + b]  in registers; factor = scale * log2(e)
//   out     = sum over j of 2^(c[j] - max) v[j] / sum over j of 2^(c[j] - max)
//
// A program takes a run of the keys (work.cuh). Teams of its warps take tiles of KEYS keys, and of as many values, in
// turn, by cp.async. Each of a team's SHARING warps has 8 query heads of a KV head. Heads beyond these have programs of
// their own: HEAD_BLOCKS programs read the same keys at the same time. few_heads.cu takes up to four heads.
//
// The rows and columns of the products are chosen so that all between K and V stays in a lane's registers:
//   s [queries x keys] = q k^T,   out^T [dimensions x heads] = v^T p^T
// A pair of rows of the first product, and a column of the second, is head lane / 4, so a lane has all queries of a
// head. The columns of a product are keys t of all 8 blocks of BLOCK keys in a tile. So after BLOCK products a lane has
// a run of RUN = 2 BLOCK neighbouring scores of each query, from blocks 2 (lane % 4) and the next. It convolves them
// without other lanes. What a run adds to later scores goes to the next lane, and to the next tile. The second product
// takes keys in the same order: probabilities are an operand as they are.
//
// A tile has the columns y of s, and the values of the scores that these complete, which end KEY_TAPS - 1 - PAD keys
// earlier. At the end warps add up in shared memory, and merge.cu adds up the programs that share a head.
//
// Constants come from the compiler's command line: ELEMENT Half or Bfloat16; HEAD_DIM up to 256; SHARING, HEAD_BLOCKS;
// QUERY_TAPS, KEY_TAPS, PAD; BLOCK; PAGED; ALIGNED, whether rows are in chunks of 16 bytes (else loads are of one
// number, and slow); WARPS, STAGES; SHARED_BYTES, as plan.py counts them, which chooses all these.
#include "queries.cuh"
#include "merge.cuh"

// A warp's state for one segment. A lane has scores of head lane / 4. Lanes of a head hold the number that is subtracted
// from its scores; `sum` is of this lane's keys. Of `out` a lane holds dimensions lane / 4, and 8 more, of every 16, and
// heads 2 (lane % 4) and the next.
struct Sums {
    float out[STEPS][4];
    float subtracted, sum;

    DEVICE void clear() {
        subtracted = LEAST, sum = 0;
#pragma unroll
        for (int i = 0; i < STEPS * 4; i++) out[i / 4][i % 4] = 0;
    }
};

// The address of this lane's row of four matrices in a tile: two of keys t of all blocks, two of keys t + 1.
DEVICE uint32_t matrix_row(uint32_t tile) {
    const int lane = thread_index() % 32;
    return tile + lane % 8 * BLOCK_BYTES + lane / 16 * PITCH + lane / 8 % 2 * 16;
}

// Adds a tile's columns to the scores that read them: a lane adds to its run and the TAIL scores after it. With
// `masked` some query does not see some of the keys; `unseen` is the first key of the run that query 0 does not see.
DEVICE void multiply_keys(uint32_t shared, uint32_t tile, bool masked, int unseen, float (&scores)[RUN + TAIL]) {
    const int lane = thread_index() % 32, warp = thread_index() / 32;
    const uint32_t row = matrix_row(tile);
    uint32_t taps = shared + TAPS_AT + warp % SHARING * TAPS + lane / 4 * 16;
    uint32_t query_row = shared + QUERIES_AT + warp % SHARING * QUERIES + lane % 16 * Q_PITCH + lane / 16 * 16;
#pragma unroll 1
    for (int query = 0; query < QUERY_TAPS; query += 2) {
        float sums[BLOCK][4] = {};
#pragma unroll
        for (int step = 0; step < STEPS; step++) {
            uint32_t queries[4];
            load_matrices(queries, query_row + step * 32);
#pragma unroll
            for (int t = 0; t < BLOCK; t += 2) {
                uint32_t keys[4];
                load_matrices(keys, row + t * PITCH + step * 32);
                multiply<ELEMENT>(sums[t], queries, keys[0], keys[1]);
                multiply<ELEMENT>(sums[t + 1], queries, keys[2], keys[3]);
            }
        }
        query_row += 16 * Q_PITCH;
#pragma unroll
        for (int next = 0; next < 2; next++) {
            if (query + next >= QUERY_TAPS) break;
            if (masked)
#pragma unroll
                for (int i = 0; i < RUN; i++)
                    if (i >= unseen + query + next) sums[i % BLOCK][next * 2 + i / BLOCK] = 0;
#pragma unroll
            for (int tap = 0; tap < KEY_TAPS; tap += 4) {
                float four[4];
                load_floats(four, taps);
                taps += 8 * 16;
#pragma unroll
                for (int i = 0; i < 4; i++)
#pragma unroll
                    for (int y = 0; y < RUN; y++)
                        if (tap + i < KEY_TAPS)
                            scores[y + TAIL - tap - i] += four[i] * sums[y % BLOCK][next * 2 + y / BLOCK];
            }
        }
    }
}

// Passes on what runs add to later scores: to the next lane, and from the last run to the next team's tile, or from the
// last team to the first one's next tile, through shared memory. A team releases the next one after it has read, so
// none is a whole round ahead, and two slots of each are enough.
DEVICE void carry_on(uint32_t shared, int tile, int tiles, float (&scores)[RUN + TAIL]) {
    const int lane = thread_index() % 32, warp = thread_index() / 32, team = warp / SHARING;
    const auto slot = [&](int tile, int warp) {
        return shared + CARRIED_AT + (tile % 2 * WARPS + warp) * CARRIED + lane / 4 * 16;
    };
    const uint32_t to = slot(tile, warp);
    const uint32_t from = team ? slot(tile, warp - SHARING) : slot(tile + 1, WARPS - SHARING + warp);
    const bool is_first = team == 0 && tile == 0, is_last = team == TEAMS - 1 && tile == tiles - 1;
    float before[TAIL_CHUNKS + 1][4] = {};
#pragma unroll
    for (int i = 0; i < TAIL; i++) before[i / 4][i % 4] = __shfl_sync(~0u, scores[RUN + i], lane - 1 & 31);
    const auto far = [&](int i) { return i < FAR ? before[(RUN + i) / 4][(RUN + i) % 4] : 0; };
    if (lane % 4 == 3)
#pragma unroll
        for (int i = 0; i < TAIL_CHUNKS; i++) {
            float behind[4];
#pragma unroll
            for (int j = 0; j < 4; j++) behind[j] = i * 4 + j < TAIL ? scores[RUN + i * 4 + j] + far(i * 4 + j) : 0;
            store_floats(to + i * 128, behind);
        }
    if (!is_first) block_sync(OF_NEXT + team, 64 * SHARING);
    if (lane % 4 == 0)
#pragma unroll
        for (int i = 0; i < TAIL_CHUNKS; i++) {
            load_floats(before[i], from + i * 128);
#pragma unroll
            for (int j = 0; j < 4; j++)
                if (is_first) before[i][j] = 0;
        }
    if (!is_last) block_arrive(OF_NEXT + (team + 1) % TEAMS, 64 * SHARING);
#pragma unroll
    for (int i = 0; i < TAIL - FAR; i++) scores[i] += before[i / 4][i % 4];
#pragma unroll
    for (int i = 0; i < FAR; i++) {
        const float further = __shfl_sync(~0u, far(i), lane - 1 & 31);
        if (lane % 4) scores[i] += further;
    }
}

// Subtract a greater number from now on: scores have become so large that probabilities might overflow.
DEVICE void raise(float maximum, Sums& sums) {
    const int lane = thread_index() % 32;
    maximum = fmaxf(maximum, __shfl_xor_sync(~0u, maximum, 1));
    maximum = fmaxf(maximum, __shfl_xor_sync(~0u, maximum, 2));
    if (!(maximum > sums.subtracted + MOST)) maximum = sums.subtracted;  // another head's are large
    const float scale = exp2_fast(sums.subtracted - maximum);
    sums.subtracted = maximum;
    sums.sum *= scale;
    const float of_heads[2] = {__shfl_sync(~0u, scale, lane % 4 * 8), __shfl_sync(~0u, scale, lane % 4 * 8 + 4)};
#pragma unroll
    for (int i = 0; i < STEPS * 4; i++) sums.out[i / 4][i % 4] *= of_heads[i % 2];
}

// The online softmax of a run: probabilities as right operands of products with keys t of all blocks.
DEVICE void online_softmax(const float (&scores)[RUN + TAIL], uint32_t (&probabilities)[BLOCK], Sums& sums) {
    float maximum = scores[0];
#pragma unroll
    for (int i = 1; i < RUN; i++) maximum = fmaxf(maximum, scores[i]);
    if (__any_sync(~0u, maximum > sums.subtracted + MOST)) raise(maximum, sums);
#pragma unroll
    for (int t = 0; t < BLOCK; t++) {
        const float first = exp2_fast(scores[t] - sums.subtracted);
        const float second = exp2_fast(scores[BLOCK + t] - sums.subtracted);
        sums.sum += first + second;
        probabilities[t] = pack<ELEMENT>(first, second);
    }
}

// out^T += v^T p^T of one tile.
DEVICE void add_values(uint32_t tile, const uint32_t (&probabilities)[BLOCK], Sums& sums) {
    const uint32_t row = matrix_row(tile);
#pragma unroll
    for (int t = 0; t < BLOCK; t += 2)
#pragma unroll
        for (int step = 0; step < STEPS; step++) {
            uint32_t values[4];
            load_matrices_transposed(values, row + t * PITCH + step * 32);
            multiply<ELEMENT>(sums.out[step], values, probabilities[t], probabilities[t + 1]);
        }
}

DEVICE void meet_team() {
    if (SHARING == 1) __syncwarp();
    else block_sync(OF_TEAM + thread_index() / (32 * SHARING), 32 * SHARING);
}

// A segment's keys, by all warps. The first keys are in flight.
DEVICE void attend(const Arguments& args, const Segment&, Stream& stream, uint32_t shared, Sums& sums) {
    const int lane = thread_index() % 32;
    sums.clear();
#pragma unroll 1
    for (int tile = 0; tile < stream.tiles; tile++) {
        const uint32_t keys = Stream::buffer(shared, tile), values = keys + RING;
        float scores[RUN + TAIL] = {};
        const int first = stream.first_column(tile), newest = stream.cache.length - QUERY_TAPS;
        copies_wait<2 * STAGES - 1>();
        meet_team();
        multiply_keys(shared, keys, first + KEYS - 1 > newest,
                      newest + 1 - first - lane % 4 * RUN, scores);
        meet_team();
        stream.load_keys(args, shared, tile + STAGES);
        carry_on(shared, tile, stream.tiles, scores);
        const int key = stream.first_score(tile) + lane % 4 * RUN;
#pragma unroll
        for (int i = 0; i < RUN; i++) {
            if (key + i < stream.start || key + i >= stream.stop) scores[i] = MINUS_INFINITY;
        }
        uint32_t probabilities[BLOCK];
        online_softmax(scores, probabilities, sums);
        copies_wait<2 * STAGES - 1>();
        meet_team();
        add_values(values, probabilities, sums);
        meet_team();
        stream.load_values(args, shared, tile + STAGES);
    }
}

// Adds up the warps' sums of a segment.
DEVICE void finish(const Arguments& args, const Segment& segment, uint32_t shared, Sums& sums) {
    const int warp = thread_index() / 32, lane = thread_index() % 32;
    __syncthreads();  // all have finished with the queries
    float sum = sums.sum;
    sum += __shfl_xor_sync(~0u, sum, 1);
    sum += __shfl_xor_sync(~0u, sum, 2);
    if (lane % 4 == 0)
        set_statistic(shared, warp, lane / 4, sums.subtracted == LEAST ? MINUS_INFINITY : sums.subtracted, sum);
    store_out(shared + SCRATCH_AT + warp * SCRATCH, sums.out);
    add_warps(args, segment, shared);
}

#include "program.cuh"
