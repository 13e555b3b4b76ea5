// The convolution of stored scores along queries and keys. A warp steps down its keys independently of other warps: it
// reads a row once for all rows that see it.
//
// A score is 2 bytes read, times 1 + HALO / run, and 2 written. At 4.1 TB/s an SM of 132 has 29 cycles for 128 keys of
// a row. At 6 x 11 taps these take 6 products 16 deep and 6 products 8 deep, 16 cycles.
#include "products.cuh"

constexpr int LOADS = (2 * EIGHTS + 3) / 4;  // of four matrices
static_assert(RING == SHARED_BYTES, "as in bands.py");

extern "C" __global__ void __launch_bounds__(32, BLOCKS_AN_SM) convolve_rows(const __grid_constant__ Arguments args) {
    const Task task(args);
    if (!task.visible(args, 0)) return store_zeros(args, task, args.out);
    const uint32_t ring = shared_memory();
    const Bands<PAD, false> bands(args.taps + task.batch_head % args.heads * QUERY_TAPS * KEY_TAPS);
    const Copies copies(args);
    uint32_t chunks[LOADS];
#pragma unroll
    for (int i = 0; i < LOADS; i++) chunks[i] = ring + matrix_chunk(4 * i, 2 * EIGHTS);
#pragma unroll 1
    for (int begin = task.first; begin < task.after;) {
        const Segment segment(args, begin, task.after);
        const int turns = (segment.stop - begin + HALO + QUERY_TAPS - 1) / QUERY_TAPS;
        const auto load = [&](int turn) {
            if (turn < turns)
                copies.load<Reach<PAD>::LEFT>(args, task, segment, args.x, ring + turn % STAGES * STAGE,
                                                   begin - HALO + turn * QUERY_TAPS);
            copies_commit();
        };
        RowSums sums;
        __syncwarp();  // all lanes have read the segment before
#pragma unroll 1
        for (int turn = 0; turn < STAGES - 1; turn++) load(turn);
#pragma unroll 1
        for (int turn = 0; turn < turns; turn++) {
            copies_wait<STAGES - 2>();
            __syncwarp();
            load(turn + STAGES - 1);
            const int stage = turn % STAGES * STAGE, first = begin + turn * QUERY_TAPS - HALO;
            const auto compute = [&](auto whole) {
                const int key = task.first_key + thread_index() * 2;
                ELEMENT* out = args.out + (task.place + (int64_t)first * args.pitch + key);
                uint32_t rows[2][LOADS][4];  // of a step and the next
                const auto load_step = [&](int step) {
#pragma unroll
                    for (int i = 0; i < LOADS; i++) load_matrices(rows[step % 2][i], chunks[i] + stage + step * ROW);
                };
                load_step(0);
#pragma unroll
                for (int step = 0; step < QUERY_TAPS; step++, out += args.pitch) {
                    if (step + 1 < QUERY_TAPS) load_step(step + 1);
                    const int row = first + step;  // complete with the rows read so far
                    sums.add(step, rows[step % 2], bands);
                    if (whole.value || (row >= begin && row < segment.stop))
                        store_keys<whole.value>(args, out, row, key, sums.sums[step]);
                    sums.clear(step);
                }
            };
            if (turn_is_whole(args, task, segment, first)) compute(Constant<true>());
            else compute(Constant<false>());
        }
        copies_wait<0>();
        begin = segment.stop;
    }
}
