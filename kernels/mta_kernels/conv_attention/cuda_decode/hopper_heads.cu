// Conv attention of one new query a sequence, from the KV cache, for sm_90a: one read of K and V, by the copy engine. The
// formulas are few_heads.cu's.
//
//   r [keys x folded queries] = k folded^T,   out^T [dimensions x heads] = v^T p^T      both wgmma, all in shared memory
//
// A program takes a run of the keys (work.cuh). A producer thread copies tiles of KEYS keys, and of as many values, into a
// ring of STAGES buffers. Consumer warp groups take tiles in turn; SHARING of them share a tile, with HEADS query heads each.
// At the end they add up in shared memory. The last program of a head adds up all its programs' parts, or merge.cu does.
//
// The copy engine permutes a tile's keys, and fold_head orders the folded queries, so that a thread has RUN neighbouring
// keys with all taps of CLASS_HEADS heads. It adds the diagonals of r in registers. Shuffles pass what a run adds to later
// scores to the next lanes, and shared memory passes it to the next warp and the next tile.
//
// The newest keys, which not all queries of the window see, are zeros in the product. What they add is computed apart.
#include "hopper_copies.cuh"
#include "hopper_fold.cuh"
#include "parts.cuh"

// A consumer warp group's part of a segment. A thread has keys lane / 4 of its warp's runs, and heads CLASS_HEADS (lane % 4)
// and the next. Of `out` it has these heads, and dimensions 64 s + 16 warp + lane / 4, and 8 more.
struct Consumer {
    uint32_t shared;
    int group, lane, warp;  // of the group's four
    int of_team;            // of the warp groups that share tiles
    float out[SLABS][4];
    float subtracted[CLASS_HEADS], sum[CLASS_HEADS], unit[CLASS_HEADS];

    DEVICE explicit Consumer(uint32_t of) : shared(of) {
        group = consumer_index(), of_team = group % SHARING;
        lane = thread_index() % 32, warp = __shfl_sync(~0u, thread_index() / 32 % 4, 0);
    }
    DEVICE void meet() const { warpgroup_barrier(1 + group); }
    DEVICE int head(int i) const { return lane % 4 * CLASS_HEADS + i; }  // of the warp group's
    DEVICE void release(int buffer) const {
        __syncwarp();
        if (lane == 0) barrier_arrive(shared + EMPTY_AT + buffer % STAGES * 8);
    }
    DEVICE uint32_t wait(int buffer) const {
        barrier_wait(full_barrier(shared, buffer), buffer / FULLS & 1);
        return shared + buffer % STAGES * TILE_BYTES;
    }
    // Zeros in rows of a tile, by this warp group.
    template <class Outside> DEVICE void clear(uint32_t tile, Outside outside) const {
#pragma unroll 1
        for (int i = warp * 32 + lane; i < KEYS * 8; i += 128)
            if (outside(i / 8))
                for (int slab = 0; slab < SLABS; slab++) store_shared(tile + slab * SLAB_BYTES + i * 16, uint4{0, 0, 0, 0});
    }

    DEVICE void begin() {
#pragma unroll
        for (int i = 0; i < SLABS * 4; i++) out[i / 4][i % 4] = 0;
#pragma unroll
        for (int i = 0; i < CLASS_HEADS; i++) {
            subtracted[i] = LEAST, sum[i] = 0;
            unit[i] = IN_UNITS<ELEMENT> ? load_shared_float(shared + UNITS_AT + (of_team * HEADS + head(i)) * 4) : 1;
        }
    }

    // Scores of the tile in `buffer`: of a run, and what the run adds to scores after it.
    DEVICE void multiply_keys(const Tiles& tiles, int tile, int buffer, float (&scores)[CLASS_HEADS][RUN + BEHIND]) const {
        const uint32_t keys = wait(buffer);
        const int newest = tiles.length - NEWEST - tiles.column(tile);  // from this column on, not multiplied here
        const int before = -tiles.column(tile);  // and none before this one
        if (newest < KEYS || before > 0) {
            clear(keys, [&](int row) {
                const int column = row / OF_WARP * OF_WARP + row % 8 * RUN + row / 8 % RUN;
                return column >= newest || column < before;
            });
            fence_async_proxy();
            meet();
        }
        const uint64_t left = operand(keys, 16, M_TILES * 1024, SWIZZLE_128);
        const uint64_t right = operand(shared + FOLDED_AT + of_team * FOLDED, 16, 1024, SWIZZLE_128);
#pragma unroll
        for (int m = 0; m < M_TILES; m++) {
            float sums[COLUMNS / 2];
            products_begin();
#pragma unroll
            for (int step = 0; step < STEPS; step++)
                Product<COLUMNS / 2, ELEMENT>::run(sums, left + bytes_on(m * 1024 + step / 4 * SLAB_BYTES + step % 4 * 32),
                                                   right + bytes_on(step / 4 * FOLDED_SLAB + step % 4 * 32), step > 0);
            products_commit();
            products_wait<0>();
            if (m == M_TILES - 1) release(buffer);
#pragma unroll
            for (int h = 0; h < 2; h++)
#pragma unroll
                for (int i = 0; i < CLASS_HEADS * KEY_TAPS; i++)
                    scores[i / KEY_TAPS][h * M_TILES + m + BEHIND - i % KEY_TAPS] += sums[i / 2 * 4 + h * 2 + i % 2];
        }
    }

    // Passes on what runs add to the scores after them. `number` counts the program's tiles.
    DEVICE void carry_on(int number, bool is_first, float (&scores)[CLASS_HEADS][RUN + BEHIND]) const {
        const int run = lane / 4, round = number / ROUND;
        const auto slot = [&](int of_group, int of_round, int of_warp) {
            const int number = of_warp < 3 ? of_warp : 3 + of_round % 2;
            return shared + CARRIED_AT + (of_group * CARRIED_SLOTS + number) * CARRIED + run * RUN * 4;
        };
        float behind[CLASS_HEADS][RUN] = {};
#pragma unroll
        for (int i = 0; i < CLASS_HEADS; i++)
#pragma unroll
            for (int j = 0; j < BEHIND; j++) {
                const int runs = 1 + j / RUN;
                const float found = __shfl_sync(~0u, scores[i][RUN + j], lane - 4 * runs & 31);
                if (run >= runs) scores[i][j % RUN] += found;
                else behind[i][j % RUN] += found;
            }
        if (run < SPREAD)
#pragma unroll
            for (int i = 0; i < CLASS_HEADS; i++)
#pragma unroll
                for (int j = 0; j < RUN; j += 4)
                    store_floats(slot(group, round, warp) + head(i) * SPREAD * RUN * 4 + j * 4, (float(&)[4])behind[i][j]);
        meet();
        uint32_t from = slot(group, round, warp - 1);
        if (warp == 0 && number > 0) {
            const int before = (number - 1) % ROUND * SHARING + of_team;
            barrier_wait(shared + HANDED_AT + before * 8, (number - 1) / ROUND & 1);
            from = slot(before, (number - 1) / ROUND, 3);
        }
        if (run < SPREAD && !(is_first && warp == 0))
#pragma unroll
            for (int i = 0; i < CLASS_HEADS; i++)
#pragma unroll
                for (int j = 0; j < RUN; j += 4) {
                    float found[4];
                    load_floats(found, from + head(i) * SPREAD * RUN * 4 + j * 4);
#pragma unroll
                    for (int k = 0; k < 4; k++) scores[i][j + k] += found[k];
                }
    }

    // Subtract a greater number from now on: scores have become so large that probabilities might overflow.
    DEVICE void raise(const float (&maxima)[CLASS_HEADS]) {
        float maximum[CLASS_HEADS];
#pragma unroll
        for (int i = 0; i < CLASS_HEADS; i++) {
            maximum[i] = maxima[i];
#pragma unroll
            for (int other = 4; other < 32; other *= 2) maximum[i] = fmaxf(maximum[i], __shfl_xor_sync(~0u, maximum[i], other));
            if (lane < 4) store_shared(shared + MAXIMA_AT + ((group * 4 + warp) * HEADS + head(i)) * 4, maximum[i]);
        }
        meet();
#pragma unroll
        for (int i = 0; i < CLASS_HEADS; i++) {
            maximum[i] = MINUS_INFINITY;
#pragma unroll
            for (int of = 0; of < 4; of++)
                maximum[i] = fmaxf(maximum[i], load_shared_float(shared + MAXIMA_AT + ((group * 4 + of) * HEADS + head(i)) * 4));
            if (!(maximum[i] > subtracted[i] + MOST)) maximum[i] = subtracted[i];  // another head's are large
            const float scale = exp2_fast(subtracted[i] - maximum[i]);
            subtracted[i] = maximum[i];
            sum[i] *= scale;
#pragma unroll
            for (int s = 0; s < SLABS; s++) out[s][i] *= scale, out[s][2 + i] *= scale;
        }
    }

    // The online softmax of a run: probabilities to shared memory, [KEYS / 8, 8 columns, 8 keys].
    DEVICE void online_softmax(int number, const float (&scores)[CLASS_HEADS][RUN + BEHIND]) {
        float maxima[CLASS_HEADS];
        bool large = false;
#pragma unroll
        for (int i = 0; i < CLASS_HEADS; i++) {
            maxima[i] = scores[i][0];
#pragma unroll
            for (int j = 1; j < RUN; j++) maxima[i] = fmaxf(maxima[i], scores[i][j]);
            maxima[i] *= unit[i];
            large |= maxima[i] > subtracted[i] + MOST;
        }
        const bool rises = warpgroup_any(1 + group, large);
        if (warp == 0 && lane == 0) barrier_arrive(shared + HANDED_AT + group * 8);  // all have stored and loaded these
        if (rises) raise(maxima);
        const uint32_t to = shared + PROBABILITIES_AT + group * PROBABILITIES + (warp * OF_WARP + lane / 4 * RUN) / 8 * 128 +
                            lane / 4 * RUN % 8 * 2 + lane % 4 * 32;
#pragma unroll
        for (int i = 0; i < CLASS_HEADS; i++)
#pragma unroll
            for (int j = 0; j < RUN; j += 4) {
                float p[4];
#pragma unroll
                for (int k = 0; k < 4; k++) p[k] = exp2_fast(scores[i][j + k] * unit[i] - subtracted[i]), sum[i] += p[k];
                store_shared(to + i * 16 + j * 2, pack<ELEMENT>(p[0], p[1]), pack<ELEMENT>(p[2], p[3]));
                if (CLASS_HEADS == 1) store_shared(to + 16 + j * 2, 0u, 0u);
            }
    }

    DEVICE void take_tile(const Tiles& tiles, int tile, int number) {
        float scores[CLASS_HEADS][RUN + BEHIND] = {};
        multiply_keys(tiles, tile, 2 * number, scores);
        carry_on(number, tile == 0, scores);
        const int first = tiles.score(tile), key = first + warp * OF_WARP + lane / 4 * RUN;
        if (tiles.reads_newest && first + KEYS > tiles.length - SPAN) {
#pragma unroll
            for (int i = 0; i < CLASS_HEADS; i++)
#pragma unroll
                for (int j = 0; j < RUN; j++) {
                    const int at = key + j - (tiles.length - SPAN);
                    if (at >= 0 && at < SPAN)
                        scores[i][j] += inverse_of(unit[i]) *
                                        load_shared_float(shared + NEWEST_AT + ((of_team * HEADS + head(i)) * SPAN + at) * 4);
                }
        }
        const bool is_whole = first >= tiles.start && first + KEYS <= tiles.stop;
        if (!is_whole)
#pragma unroll
            for (int j = 0; j < RUN; j++)
                if (key + j < tiles.start || key + j >= tiles.stop)
#pragma unroll
                    for (int i = 0; i < CLASS_HEADS; i++) scores[i][j] = MINUS_INFINITY;
        online_softmax(number, scores);
        const uint32_t values = wait(2 * number + 1);
        if (!is_whole) clear(values, [&](int row) { return first + row < tiles.start || first + row >= tiles.stop; });
        fence_async_proxy();
        meet();
        const uint64_t left = operand(values, SLAB_BYTES, 1024, SWIZZLE_128);
        const uint64_t right = operand(shared + PROBABILITIES_AT + group * PROBABILITIES, 128, 128, NO_SWIZZLE);
        products_begin();
#pragma unroll
        for (int step = 0; step < KEYS / 16; step++)
#pragma unroll
            for (int slab = 0; slab < SLABS; slab++)
                Product<4, ELEMENT>::run_rows(out[slab], left + bytes_on(slab * SLAB_BYTES + step * 2048),
                                              right + bytes_on(step * 256));
        products_commit();
        products_wait<0>();
        release(2 * number + 1);
    }

    // Adds up the warp groups' parts of a segment: to `out` if they are all, else to this program's part in global memory.
    DEVICE void finish(const Arguments& args, const Segment& segment) {
#pragma unroll
        for (int i = 0; i < CLASS_HEADS; i++) {
            float all = sum[i];
#pragma unroll
            for (int other = 4; other < 32; other *= 2) all += __shfl_xor_sync(~0u, all, other);
            if (lane < 4) {
                const int at = ((group * 4 + warp) * HEADS + head(i)) * 4;
                store_shared(shared + SUMS_AT + at, all);
                store_shared(shared + MAXIMA_AT + at, subtracted[i] == LEAST ? MINUS_INFINITY : subtracted[i]);
            }
        }
        block_sync(OF_ALL, THREADS);  // all have finished with the folded queries
#pragma unroll
        for (int i = 0; i < SLABS * 4; i++) {
            const int number = i / 4 * 64 + warp * 16 + i / 2 % 2 * 8 + lane / 4;
            if (number < DEPTH && i % 2 < CLASS_HEADS)
                store_shared(shared + FOLDED_AT + (group * HEADS + head(i % 2)) * OUT_PITCH + number * 4, out[i / 4][i % 4]);
        }
        block_sync(OF_ALL, THREADS);
#pragma unroll 1
        for (int i = thread_index(); i < ALL_HEADS * DEPTH / 4; i += THREADS) {
            const int head = i / (DEPTH / 4), number = i % (DEPTH / 4) * 4;
            float maximum = MINUS_INFINITY, total = 0, value[4] = {};
            const auto of_group = [&](int team) { return team * SHARING + head / HEADS; };
            const auto statistic_at = [&](int team, int warp) {
                return shared + ((of_group(team) * 4 + warp) * HEADS + head % HEADS) * 4;
            };
#pragma unroll
            for (int team = 0; team < ROUND; team++) maximum = fmaxf(maximum, load_shared_float(statistic_at(team, 0) + MAXIMA_AT));
#pragma unroll 1
            for (int team = 0; team < ROUND; team++) {
                const float subtracted = maximum == MINUS_INFINITY ? 0 : maximum;
                const float scale = exp2_fast(load_shared_float(statistic_at(team, 0) + MAXIMA_AT) - subtracted);
                float values[4];
                load_floats(values, shared + FOLDED_AT + (of_group(team) * HEADS + head % HEADS) * OUT_PITCH + number * 4);
#pragma unroll
                for (int warp = 0; warp < 4; warp++) total += scale * load_shared_float(statistic_at(team, warp) + SUMS_AT);
#pragma unroll
                for (int j = 0; j < 4; j++) value[j] += scale * values[j];
            }
            write_part(args, segment, head, number, maximum, total, value);
        }
        block_sync(OF_ALL, THREADS);  // all have read what the next folded queries overwrite
        const auto meet = [] { block_sync(OF_ALL, THREADS); };
        if (LAST_ADDS_UP && segment.programs > 1 && last_to_come(args, segment, shared + MAXIMA_AT, meet)) add_parts(args, segment);
    }
};

DEVICE void consume(Work& work, const Arguments& args, int first_head, uint32_t shared) {
    Consumer consumer(shared);
    int before = 0;  // tiles of the segments before
    bool is_first = true;
    do {
        Segment segment = work.segment;
        work.count_sharers(segment);
        const Tiles tiles(segment);
        fold(args, segment, first_head, is_first, tiles.reads_newest, shared);
        consumer.begin();
        const int team = consumer.group / SHARING;
#pragma unroll 1
        for (int tile = (team + ROUND - before % ROUND) % ROUND; tile < tiles.count; tile += ROUND)
            consumer.take_tile(tiles, tile, before + tile);
        consumer.finish(args, segment);
        before += tiles.count, is_first = false;
    } while (work.advance());
}

extern "C" __global__ void MAXIMUM_THREADS(THREADS + 128)
    cuda_decode(const __grid_constant__ Maps maps, const __grid_constant__ Arguments args) {
    let_next_start();
    const uint32_t shared = shared_memory();
    const int first_head = blockIdx.x % HEAD_BLOCKS * ALL_HEADS;
    if (thread_index() == THREADS + 32) {
        for (int i = 0; i < FULLS; i++) barrier_init(shared + FULL_AT + i * 8, 1);
        for (int stage = 0; stage < STAGES; stage++) barrier_init(shared + EMPTY_AT + stage * 8, 4 * SHARING);
        for (int group = 0; group < CONSUMERS; group++) barrier_init(shared + HANDED_AT + group * 8, 1);
        barrier_init(shared + ASKED_AT, ALL_HEADS < WARPS ? ALL_HEADS : WARPS);
        barrier_init_done();
        fence_async_proxy();
    }
    if (thread_index() == THREADS + 64) prefetch_map(&maps.key_tile), prefetch_map(&maps.value_tile);
    if (thread_index() == THREADS + 64) prefetch_map(&maps.key_group), prefetch_map(&maps.value_part);
    Work work;
    if (!work.begin(args.lengths, blockIdx.x / HEAD_BLOCKS, args.programs, args.splits, TILE_UNITS)) return;
    __syncthreads();
    if (consumer_index() == CONSUMERS) {
        deallocate_registers<PRODUCER_REGISTERS>();
        if (thread_index() == THREADS) produce(work, args, maps, shared);
    } else {
        allocate_registers<CONSUMER_REGISTERS>();
        consume(work, args, first_head, shared);
    }
}
