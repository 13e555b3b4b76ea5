// Copies stored numbers of all heads, a few keys of a row at a time, from memory into a warp's ring and back.
//
// Constants come from the compiler's command line: ELEMENT Half or Bfloat16; HEADS, 1 to 16; KEYS of a tile; OPERANDS, 1
// or 2; CAUSAL, DOCUMENTS; STAGES of the ring; SHARED_BYTES, as heads.py counts them; BLOCKS_AN_SM, for which the compiler
// leaves registers. A block is a warp.
#pragma once
#include <stored.cuh>

constexpr int PITCH = KEYS * 2 + 16;  // of a head in the ring
#include "mixing.cuh"

constexpr int TILE = HEADS * PITCH, STAGE = OPERANDS * TILE;
static_assert(STAGES * STAGE == SHARED_BYTES, "as in heads.py");
static_assert(KEYS % 16 == 0 && BLOCK % KEYS == 0, "whole tiles");

struct Arguments {
    ELEMENT *x, *grad, *out;        // [B, HEADS, rows, pitch]
    const ELEMENT* mix;             // [HEADS, HEADS]
    const int* documents;           // [2, key_rows]
    const float* logsumexp;         // [B, HEADS, query_rows]
    const float *residual, *delta;  // [B, HEADS, rows]
    float* sums;                    // [B, HEADS, rows, segments]
    float* parts;                   // [warps, HEADS, HEADS]
    int rows, pitch, first_position, first_row, query_rows, key_rows, above, owned;  // of a chunk
    int run, segments, tasks, warps;  // keys of a segment, segments of a row, of all rows
    const float* loss_scale;          // of stored.cuh
};

// A warp's tiles in turn: warps share the segments of rows, and go through the stored tiles of each.
struct Tiles {
    int task, key = 0, end = 0, batch, row;

    DEVICE Tiles(const Arguments& args) : task(block_index() - args.warps) { next(args); }
    DEVICE bool exist(const Arguments& args) const { return task < args.tasks; }
    DEVICE void next(const Arguments& args) {
        key += KEYS;
#pragma unroll 1
        while (key >= end && (task += args.warps) < args.tasks) {
            const int of_all = task / args.segments;
            batch = of_all / args.rows, row = of_all % args.rows;
            key = task % args.segments * args.run;
            end = min(key + args.run, stored_end(args, row));
        }
    }
    DEVICE bool is_last() const { return key + KEYS >= end; }  // of its segment
    DEVICE int64_t place(const Arguments& args) const {
        return ((int64_t)batch * HEADS * args.rows + row) * args.pitch + key;
    }
    DEVICE int row_of(const Arguments& args, int head) const { return (batch * HEADS + head) * args.rows + row; }
};

DEVICE void load_tile(const Arguments& args, const ELEMENT* source, uint32_t tile) {
    const int64_t stride = (int64_t)args.rows * args.pitch;
    for_chunks<KEYS>(stride, [&](uint32_t address, int64_t place) { copy_async(tile + address, source + place, true); });
}

// Runs `compute(tiles, address of the stage)` for all tiles of a warp; `store` writes back what it leaves there.
template <class Compute, class Store>
DEVICE void for_tiles(const Arguments& args, const Compute& compute, const Store& store) {
    const uint32_t ring = shared_memory();
    Tiles coming(args), tiles = coming;
    uint32_t free = ring, full = ring;
    const auto load = [&] {
        if (coming.exist(args)) {
            const int64_t place = coming.place(args);
            load_tile(args, args.x + place, free);
            if (OPERANDS == 2) load_tile(args, args.grad + place, free + TILE);
            coming.next(args);
        }
        copies_commit();
        free = free + STAGE == ring + SHARED_BYTES ? ring : free + STAGE;
    };
#pragma unroll 1
    for (int i = 0; i < STAGES - 1; i++) load();
#pragma unroll 1
    for (; tiles.exist(args); tiles.next(args)) {
        copies_wait<STAGES - 2>();
        __syncwarp();  // all have copied; the stage before is stored
        load();
        compute(tiles, full);
        __syncwarp();
        store(tiles.place(args), full);
        full = full + STAGE == ring + SHARED_BYTES ? ring : full + STAGE;
    }
    copies_wait<0>();
}
