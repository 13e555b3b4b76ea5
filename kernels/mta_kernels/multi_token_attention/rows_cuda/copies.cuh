// Rows between memory and shared memory: each byte is read once and written once.
#pragma once
#include "layout.cuh"

#if BULK

// A lane of the copying warp has whole heads, so that its loads into a buffer follow its own stores from there.

DEVICE void load_row(const Arguments& args, const Row& row, uint32_t shared, int stage) {
    const int bytes = (row.stop - row.start) * 2, lane = thread_index() % 32;
    const uint32_t full = shared + FULL_AT + 8 * stage;
    __syncwarp();  // of no bytes the stage is full at once: a lane that still waits for it would miss the next phase
    if (lane == 0) barrier_expect(full, bytes * HEADS * OPERANDS);
    if (bytes == 0) return;
#pragma unroll 1
    for (int operand = 0; operand < OPERANDS; operand++)
#pragma unroll 1
        for (int head = lane; head < HEADS; head += 32) {
            const ELEMENT* source = args.operands[operand] + row.offset + head * row.head_stride(args) + row.start;
            copy_bytes(stage_at(args, shared, stage, operand) + head * args.pitch, source, bytes, full);
        }
}

DEVICE void store_zeros(ELEMENT* destination, int count, uint32_t shared) {
#pragma unroll 1
    for (; count > 0; destination += ZEROS / 2, count -= ZEROS / 2)
        store_bytes(destination, shared + ZEROS_AT, min(count * 2, ZEROS));
}

DEVICE void store_row(const Arguments& args, const Row& row, uint32_t shared, int stage, int rank) {
    const int bytes = (row.stop - row.start) * 2, lane = thread_index() % 32;
    const Stored stored(args, row);
#pragma unroll 1
    for (int operand = 0; operand < OPERANDS; operand++)
#pragma unroll 1
        for (int head = lane; head < HEADS; head += 32) {
            ELEMENT* destination = args.operands[operand] + row.offset + head * row.head_stride(args);
            const uint32_t source = stage_at(args, shared, stage, operand) + head * args.pitch;
            if (bytes > 0) store_bytes(destination + row.start, source, bytes);
            if (head % CLUSTER != rank) continue;
            store_zeros(destination + stored.from, row.first - stored.from, shared);
            store_zeros(destination + row.end, stored.to - row.end, shared);
        }
    stores_commit();
}

// The copying warp: loads rows into the stages in turn, and stores each when all warps have finished it.
DEVICE void copy_rows(const Arguments& args, uint32_t shared, int cluster, int rank) {
    Turn coming, going;
    int stored = cluster;
    const auto store_next = [&] {
        barrier_wait(shared + DONE_AT + 8 * going.stage, going.round);
        store_row(args, Row(args, stored, rank), shared, going.stage, rank);
        stored += args.clusters, going.next(args.stages);
    };
    int waiting = 0;  // rows that are loaded, and not yet stored
#pragma unroll 1
    for (int index = cluster; index < args.all_rows; index += args.clusters) {
        if (waiting == args.stages) {
            store_next();
            stores_wait();
            waiting--;
        }
        load_row(args, Row(args, index, rank), shared, coming.stage);
        coming.next(args.stages), waiting++;
    }
    for (; waiting > 0; waiting--) store_next();
    stores_wait();
}

#else

// Without a copy engine all threads copy; several blocks an SM keep the memory busy.

DEVICE void load_row(const Arguments& args, const Row& row, uint32_t shared) {
    const int lane = thread_index() % 32, units = (row.stop - row.start) / 8;
#pragma unroll 1
    for (int i = thread_index() / 32; i < HEADS * OPERANDS; i += WARPS) {
        const int operand = i / HEADS, head = i % HEADS;
        const ELEMENT* source = args.operands[operand] + row.offset + head * row.head_stride(args) + row.start;
        const uint32_t destination = stage_at(args, shared, 0, operand) + head * args.pitch;
#pragma unroll 4
        for (int unit = lane; unit < units; unit += 32) copy_async(destination + unit * 16, source + unit * 8, true);
    }
    copies_commit();
    copies_wait<0>();
    threads_barrier<COMPUTING>();
}

DEVICE void store_row(const Arguments& args, const Row& row, uint32_t shared) {
    threads_barrier<COMPUTING>();
    const Stored stored(args, row);
    const int lane = thread_index() % 32, first = row.first / 8, end = row.end / 8;
#pragma unroll 1
    for (int i = thread_index() / 32; i < HEADS * OPERANDS; i += WARPS) {
        const int operand = i / HEADS, head = i % HEADS;
        uint4* destination = (uint4*)(args.operands[operand] + row.offset + head * row.head_stride(args));
        const uint32_t source = stage_at(args, shared, 0, operand) + head * args.pitch;
#pragma unroll 4
        for (int unit = stored.from / 8 + lane; unit < stored.to / 8; unit += 32)
            destination[unit] = unit >= first && unit < end ? load_shared_16(source + (unit - first) * 16) : uint4{0, 0, 0, 0};
    }
    threads_barrier<COMPUTING>();
}

#endif
