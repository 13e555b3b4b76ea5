// A consumer warp group of the forward: 64 rows of scores, their convolution, softmax and product with the values.
#pragma once
#include <convolution.cuh>
#include <forward_scheduler.cuh>
#include <forward_rows.cuh>

// An infinite score makes c infinite in its block of 16 columns, and NaN where zeros of T meet it in the window. Masked columns
// may hide it: the row then finds the infinity where its mask begins, in this tile or (if a block has no zeros) the one before.
constexpr int FULL_WINDOW = KEY_TAPS >= 16;

// Which keys the warp group's rows of a work tile see.
struct RowMask {
    int position;                      // of local row 0 among the keys
    int seen_by_all, end_seen_by_all;  // keys that no row of the warp group masks
    const int (&begin)[2], (&end)[2];  // of this thread's two rows

    // Scores that a row does not see are zeros to the convolution.
    DEVICE void mask_scores(float (&scores)[32], int first_key, int local_row, int column) const {
        if (SPANS ? first_key < seen_by_all || first_key + KEYS > end_seen_by_all : CAUSAL && first_key + KEYS - 1 > position) {
#pragma unroll
            for (int i = 0; i < 32; i++) {
                const int key = first_key + i / 4 * 8 + column + i % 2, h = i / 2 % 2;
                if (SPANS ? key < begin[h] || key >= end[h] : key > position + local_row + h * 8) scores[i] = 0;
            }
        }
    }

    DEVICE void mask_convolved(float (&c)[32], int first_key, int column) const {
        if (first_key - LEFT < seen_by_all || first_key + KEYS - LEFT + FULL_WINDOW > end_seen_by_all) {
#pragma unroll
            for (int i = 0; i < 32; i++) {
                const int key = first_key - LEFT + i / 4 * 8 + column + i % 2, h = i / 2 % 2;
                c[i] = fmaf(c[i], 0, c[i]);  // infinity becomes NaN, see FULL_WINDOW
                if (key < begin[h] || key >= end[h]) c[i] = MINUS_INFINITY;
            }
        }
    }
};

// What a thread holds in registers. Each array is a variable of its own, not a member of a struct with others. The compiler
// would keep such a struct in memory until it has unrolled all loops.
using Accumulator = float[VALUE_DIM / 2];
using QueryFragments = uint32_t[STEPS_IN_REGISTERS ? STEPS_IN_REGISTERS : 1][4];

DEVICE void load_queries(QueryFragments& query, uint32_t queries_at, int thread) {
    const int row = thread / 32 * 16 + thread % 16;
#pragma unroll
    for (int step = 0; step < STEPS_IN_REGISTERS; step++)
        load_matrices(query[step],
                      queries_at + step / 4 * SLAB + row * 128 + ((step % 4 * 2 + thread % 32 / 16) ^ row % 8) * 16);
}

// The main loop over the tiles of keys of one work tile.
struct Mainloop {
    const Block& block;
    const ConsumerThread& own;
    const RowMask& mask;
    OnlineSoftmax<KEYS>& softmax;
    uint64_t queries, toeplitz;
    int first_tile, end_tile;
    int to_iteration;  // to add to a tile's number for its iteration
    // c of this tile: even and odd blocks of 16 scores apart, since wgmmas into overlapping windows of one array serialize.
    float (&even)[32], (&odd)[32], (&scores)[32];
    Accumulator& accumulator;
    QueryFragments& query;
    uint32_t (&halves)[4][4];  // a tile's scores in fp16: A fragments of the tap 0
    bool& next_is_full;        // tested one phase early: branching on a fresh test stalls about 100 cycles

    DEVICE int iteration_of(int tile) const { return tile + to_iteration; }

    DEVICE void multiply_keys(int stage) {
        const uint64_t keys = own.first_keys + bytes_on(stage * SLABS * SLAB);
        products_begin();
#pragma unroll
        for (int step = 0; step < DEPTH_STEPS; step++) {
            const uint64_t on = bytes_on(step / 4 * SLAB + step % 4 * 32);
            if (step < STEPS_IN_REGISTERS)
                Product<32, ELEMENT>::run_fragments(scores, query[step], keys + on, step > 0);
            else
                Product<32, ELEMENT>::run(scores, queries + on, keys + on, step > 0);
        }
        products_commit();
    }

    DEVICE void multiply_values(int stage) {
        const uint64_t values = own.first_values + bytes_on(stage * VALUE_SLABS * SLAB);
        products_begin();
#pragma unroll
        for (int step = 0; step < 4; step++)
            Product<VALUE_DIM / 2, ELEMENT>::run_registers(accumulator, softmax.probabilities + 4 * step,
                                                           values + bytes_on(step * 16 * 128));
        products_commit();
    }

    // Mask a tile's scores and store them in fp16 for the row shifts. Buffers alternate: a warp may be a tile ahead.
    DEVICE void store_scores(int tile) {
        const int iteration = iteration_of(tile), first_key = tile * KEYS;
        const int buffer = (iteration & 1) * SCORE_TILE;
        mask.mask_scores(scores, first_key, own.local_row, own.column);
#pragma unroll
        for (int i = 0; i < 32; i += 2) halves[i / 8][i / 2 % 4] = pack<Half>(scores[i], scores[i + 1]);
        if constexpr (!PINGPONG) convolve_own(even, odd, halves, toeplitz);
        if constexpr (QUERY_TAPS > 1) {
#pragma unroll
            for (int block = 0; block < 4; block++)
                store_matrices(own.store_at + buffer + block * 2 * PITCH, halves[block]);
            if (own.stores_halo) {
                store_matrices(own.halo_at + buffer, {halves[0][1], halves[0][3], halves[1][1], halves[1][3]});
                store_matrices(own.halo_at + buffer + 4 * PITCH, {halves[2][1], halves[2][3], halves[3][1], halves[3][3]});
            }
            fence_async_proxy();
        }
        next_is_full = block.pipeline.is_full(iteration + 1);
    }

    // c of a tile; with two consumers, only in this one's phase.
    DEVICE void convolve(int buffer) {
        if constexpr (QUERY_TAPS > 1) {
            warpgroup_barrier(own.warpgroup + 1);
            if constexpr (PINGPONG) pingpong_wait(own.warpgroup);
        }
        if constexpr (PINGPONG) convolve_own(even, odd, halves, toeplitz);
        if constexpr (QUERY_TAPS > 1) {
            products_begin();
            convolve_shifted<1, 8>(even, odd, own.score_tiles + bytes_on(buffer), PITCH, toeplitz);
            products_commit();
        }
        products_wait<0>();
    }

    DEVICE void process_tile(int tile) {
        const int iteration = iteration_of(tile), first_key = tile * KEYS;
        const int buffer = (iteration & 1) * SCORE_TILE;
        if constexpr (!PINGPONG) store_scores(tile);
        convolve(buffer);
        const int next = iteration + 1, next_stage = block.pipeline.stage(next);
        if (!next_is_full) block.pipeline.wait(next);
        multiply_keys(next_stage);  // the next scores, during this tile's softmax; unused after the last tile
        if constexpr (PINGPONG && QUERY_TAPS > 1) pingpong_arrive(1 - own.warpgroup);

#pragma unroll
        for (int i = 8; i < 32; i++) even[i] += odd[i - 8];
        mask.mask_convolved(even, first_key, own.column);
        softmax.update(even, accumulator);
#pragma unroll
        for (int i = 0; i < 8; i++) even[i] = odd[24 + i], even[8 + i] = 0;  // carried to the next tile

        multiply_values(next_stage);
        if constexpr (PINGPONG) {
            products_wait<1>();
            store_scores(tile + 1);  // after the last tile only for the next warp group's halo
        }
        products_wait<0>();
        if (own.thread == 0 && tile + 1 < end_tile) block.pipeline.release(next);  // but not the next work tile's keys
    }

    // A tile that only later warp groups see: release its stage and pass the phase on.
    DEVICE void skip_tile(int tile) const {
        const int next = iteration_of(tile) + 1;
        block.pipeline.wait(next);
        warpgroup_barrier(own.warpgroup + 1);  // no thread still waits for the stage that is released
        if (own.thread == 0 && tile + 1 < end_tile) block.pipeline.release(next);
        if constexpr (PINGPONG && QUERY_TAPS > 1) pingpong_wait(own.warpgroup), pingpong_arrive(1 - own.warpgroup);
    }

    // `tiles`: the end of those with a key that a row of this warp group sees.
    DEVICE void run(int tiles) {
        const int iteration = iteration_of(first_tile);
        block.pipeline.wait(iteration);
        multiply_keys(block.pipeline.stage(iteration));
        products_wait<0>();
        if (own.thread == 0) block.pipeline.release(iteration);
        if constexpr (PINGPONG) store_scores(first_tile);
        for (int tile = first_tile; tile < tiles; tile++) process_tile(tile);
        for (int tile = tiles; tile < end_tile; tile++) skip_tile(tile);
    }
};

DEVICE void consume(const Arguments& args, const Block& block, int warpgroup, int thread) {
    const ConsumerThread own(block, warpgroup, thread);
    const TileScheduler scheduler{block};
    if (PINGPONG && QUERY_TAPS > 1 && warpgroup == 1) pingpong_arrive(0);
    int iterations = 0;  // key tiles of the work tiles before
#pragma unroll 1
    for (int count = 0; true; count++) {
        const int slot = count % SLOTS;
        barrier_wait(block.tile_full + 8 * slot, count / SLOTS & 1);
        const WorkTile found = scheduler.read(slot);
        if (!found.exists()) break;
        const int first_tile = found.first_tile, end_tile = found.end_tile;
        const int first_row = found.first_row + warpgroup * WARPGROUP_STRIDE - HALO;
        barrier_wait(block.queries_full + 8 * slot, count / SLOTS & 1);
        const float unit = scheduler.unit(slot);
        const int position = opaque(first_row + (args.at.key_rows - args.at.query_rows));
        const auto end_of = [&](int row) { return CAUSAL && !SPANS ? position + row + 1 : keys_end(args.at, first_row + row); };
        int begin[2], end[2];
#pragma unroll
        for (int h = 0; h < 2; h++) {
            begin[h] = keys_begin(args.at, first_row + own.local_row + 8 * h);
            end[h] = end_of(own.local_row + 8 * h);
        }
        const RowMask mask{position, keys_begin(args.at, first_row + ROWS - 1), end_of(0), begin, end};
        const int last_end = (end_of(ROWS - 1) + LEFT + KEYS - 1) / KEYS;
        const int tiles = CAUSAL || SPANS ? min(max(last_end, first_tile + 1), end_tile) : end_tile;
        float even[32], odd[32], scores[32];
        Accumulator accumulator;
        float reference[2] = {-1e30f, -1e30f}, running_sum[2] = {0, 0};
#pragma unroll
        for (int i = 0; i < 32; i++) even[i] = odd[i] = 0;
#pragma unroll
        for (int i = 0; i < VALUE_DIM / 2; i++) accumulator[i] = 0;
        QueryFragments query;
        const int of_slot = slot % QUERY_SLOTS * QUERY_BYTES;
        load_queries(query, own.queries_at + of_slot, opaque(thread));  // so that no register holds its addresses in between
        if constexpr (QUERIES_IN_REGISTERS) {
            fence_async_proxy();  // an arrival does not wait for loads, and the next copy overwrites what they read
            warpgroup_barrier(warpgroup + 1);
            if (thread == 0) barrier_arrive(block.queries_empty);
        }
        uint32_t probabilities[16];
        float sums[2];
        uint32_t halves[4][4];
        bool next_is_full = false;
        OnlineSoftmax<KEYS> softmax{unit, reference, running_sum, sums, probabilities};
        const uint64_t queries = moved(own.first_queries, of_slot), toeplitz = moved(own.first_taps, slot * QUERY_TAPS * TAP);
        Mainloop mainloop{block, own, mask, softmax, queries, toeplitz, first_tile, end_tile, opaque(iterations - first_tile),
                          even, odd, scores, accumulator, query, halves, next_is_full};
        mainloop.run(tiles);
        const WorkTile work = scheduler.read(slot);  // again: the loop has no registers for it
        const int first_written = work.first_row + warpgroup * WARPGROUP_STRIDE - HALO;
        const int halo = SHARED_HALO && warpgroup > 0 ? 0 : HALO;
        write_rows<1>(args, work, softmax, accumulator, first_written + thread / 32 * 16, first_written + halo, own.lane);
        warpgroup_barrier(warpgroup + 1);  // all have read the slot, and no product reads its T
        if (thread == 0) {
            barrier_arrive(block.tile_empty + 8 * slot);
            if constexpr (QUERY_SLOTS == 1 && !QUERIES_IN_REGISTERS) barrier_arrive(block.queries_empty);
        }
        iterations += end_tile - first_tile;
    }
}
