// The keys and values of a warp, from the cache to shared memory.
#pragma once
#include "layout.cuh"

// A row, or what of it begins at a chunk of eight numbers, is at `start` of row 0 and this many bytes further on.
DEVICE int64_t row_offset(const Rows& x, int key, int page, int page_bits) {
    const int64_t row = PAGED ? key & (1 << page_bits) - 1 : key;
    const int64_t offset = row * (ALIGNED ? (int)x.stride_row : x.stride_row);  // 32 bits take fewer instructions
    return PAGED ? page * x.stride_batch + offset : offset;
}
DEVICE int64_t chunk_offset(const Rows& x, int chunk) {
    return ALIGNED ? chunk * 16 : chunk * 8 * x.stride_number;
}

// A chunk, zeros if not `inside` and from number `count` on. Nothing is read outside.
DEVICE uint4 load_chunk(const char* start, int64_t stride, int count, bool inside) {
    if (ALIGNED) return inside && count > 0 ? *(const uint4*)start : uint4{0, 0, 0, 0};
    const auto number_at = [&](int i) -> uint32_t {
        return inside && i < count ? *(const uint16_t*)(start + i * stride) : 0;
    };
    uint32_t pairs[4];
#pragma unroll
    for (int i = 0; i < 4; i++) pairs[i] = number_at(2 * i + 1) << 16 | number_at(2 * i);
    return {pairs[0], pairs[1], pairs[2], pairs[3]};
}
DEVICE void copy_chunk(uint32_t destination, const char* start, int64_t stride, int count, bool inside) {
    if (ALIGNED) copy_stream(destination, start, inside && count > 0);
    else store_shared(destination, load_chunk(start, stride, count, inside));
}

// One sequence's keys and values for one KV head, as a program reads them.
struct Cache {
    const char *keys, *values;  // of this head
    const int* table;
    int length;

    DEVICE void open(const Arguments& args, const Segment& segment) {
        const int64_t batch = PAGED ? 0 : segment.sequence;
        keys = args.k.start + batch * args.k.stride_batch + segment.kv_head * args.k.stride_head;
        values = args.v.start + batch * args.v.stride_batch + segment.kv_head * args.v.stride_head;
        table = args.table + segment.sequence * args.table_stride_batch;
        length = segment.length;
    }
    DEVICE int page_of(const Arguments& args, int key) const {
        return key >= 0 && key < length ? table[(key >> args.page_bits) * args.table_stride_page] : 0;
    }
};

// The keys of one warp as a stream of tiles. Tile i has the columns y of r from `first_column` + KEYS i on, and the
// scores and values of the keys j from `first_score` + KEYS i on.
struct Stream {
    Cache cache;
    int start, stop;  // the keys j of this warp
    int tiles, end_column;
    int key_page, value_page;  // PAGED: a lane's row of the next tile

    DEVICE int first_column(int tile) const { return start - PAD + tile * KEYS; }
    DEVICE int first_score(int tile) const { return start - (KEY_TAPS - 1) + tile * KEYS; }

    DEVICE void look_up_pages(const Arguments& args, int lane, int tile) {
        key_page = cache.page_of(args, first_column(tile) + lane);
        value_page = cache.page_of(args, first_score(tile) + lane);
    }
    DEVICE void load(const Arguments& args, unsigned lane, uint32_t ring, int tile) {
        if (tile < tiles) {
            const uint32_t stage = ring + tile % STAGES * STAGE;
            const int first_y = first_column(tile), first_j = first_score(tile);
#pragma unroll CHUNKS_AT_ONCE
            for (int i = 0; i < CHUNKS; i++) {
                const int row = (i * 32 + lane) / CHUNKS, chunk = (i * 32 + lane) % CHUNKS;
                const int y = first_y + row, j = first_j + row;
                const int key_at = PAGED ? __shfl_sync(~0u, key_page, row) : 0;
                const int value_at = PAGED ? __shfl_sync(~0u, value_page, row) : 0;
                const uint32_t to = stage + row * PITCH + chunk * 16;
                const char* key = cache.keys + chunk_offset(args.k, chunk);
                const char* value = cache.values + chunk_offset(args.v, chunk);
                copy_chunk(to, key + row_offset(args.k, y, key_at, args.page_bits), args.k.stride_number,
                           HEAD_DIM - chunk * 8, (unsigned)y < (unsigned)end_column);
                copy_chunk(to + TILE, value + row_offset(args.v, j, value_at, args.page_bits), args.v.stride_number,
                           HEAD_DIM - chunk * 8, (unsigned)(j - start) < (unsigned)(stop - start));
            }
            if (PAGED) look_up_pages(args, lane, tile + 1);
        }
        copies_commit();
    }
    DEVICE void begin(const Arguments& args, const Segment& segment, const Cache& opened, uint32_t shared) {
        const int warp = thread_index() / 32, lane = thread_index() % 32, keys = segment.stop - segment.start;
        cache = opened;
        start = segment.start + keys * warp / WARPS, stop = segment.start + keys * (warp + 1) / WARPS;
        tiles = start < stop ? (stop - start + KEY_TAPS - 1 + KEYS - 1) / KEYS : 0;
        end_column = min(stop - PAD + KEY_TAPS - 1, cache.length);
        if (PAGED) look_up_pages(args, lane, 0);
#pragma unroll 1
        for (int i = 0; i < STAGES - 1; i++) load(args, lane, shared + warp * RING, i);
    }
};
