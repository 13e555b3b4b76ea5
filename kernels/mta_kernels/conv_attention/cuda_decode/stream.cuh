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

// The i-th of a lane's chunks of a tile.
DEVICE int row_of(int i, int lane) {
    return 32 % CHUNKS == 0 ? i * (32 / CHUNKS) + lane / CHUNKS : (i * 32 + lane) / CHUNKS;
}
DEVICE int chunk_of(int i, int lane) { return 32 % CHUNKS == 0 ? lane % CHUNKS : (i * 32 + lane) % CHUNKS; }

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
// scores and values of the keys j from `first_score` + KEYS i on. Each copy is a group of its own, keys before values.
struct Stream {
    Cache cache;
    int start, stop;  // the keys j of this warp
    int tiles, end_column;
    int key_page, value_page;  // PAGED: a lane's row of the next tile

    DEVICE int first_column(int tile) const { return first_score(tile) + KEY_TAPS - 1 - PAD; }
    DEVICE int first_score(int tile) const {
        return start - (KEY_TAPS - 1) + (IN_TURN ? tile * WARPS + (int)thread_index() / 32 : tile) * KEYS;
    }

    // Rows `first` and on to a buffer, zeros for those that are not `begin` to `end`; `page` is that of a lane's row.
    DEVICE void copy_tile(const Arguments& args, const Rows& x, const char* rows, int page, int lane, uint32_t to,
                          int first, int begin, int end) const {
        const auto inside = [&](int row) { return (unsigned)(first + row - begin) < (unsigned)max(end - begin, 0); };
        if (ALIGNED && !PAGED && 32 % CHUNKS == 0) {
            const char* from = rows + row_offset(x, first + row_of(0, lane), 0, 0) + chunk_of(0, lane) * 16;
            const int64_t step = 32 / CHUNKS * (int64_t)(int)x.stride_row;
#pragma unroll
            for (int i = 0; i < CHUNKS; i++)
                copy_chunk(to + row_of(i, lane) * PITCH + chunk_of(i, lane) * 16, from + i * step, 0,
                           HEAD_DIM - chunk_of(i, lane) * 8, inside(row_of(i, lane)));
        } else {
            const int64_t of_lane = row_offset(x, first + lane, page, args.page_bits);
#pragma unroll 4
            for (int i = 0; i < CHUNKS; i++) {
                const int row = row_of(i, lane), chunk = chunk_of(i, lane);
                const uint32_t low = __shfl_sync(~0u, (uint32_t)of_lane, row);
                const int64_t of_row = (int64_t)__shfl_sync(~0u, (int)(of_lane >> 32), row) << 32 | low;
                const char* from = rows + of_row + chunk_offset(x, chunk);
                copy_chunk(to + row * PITCH + chunk * 16, from, x.stride_number, HEAD_DIM - chunk * 8, inside(row));
            }
        }
    }
    DEVICE void load_keys(const Arguments& args, int lane, uint32_t ring, int tile) {
        if (tile < tiles) {
            copy_tile(args, args.k, cache.keys, key_page, lane, ring + tile % STAGES * TILE, first_column(tile), 0,
                      end_column);
            if (PAGED) key_page = cache.page_of(args, first_column(tile + 1) + lane);
        }
        copies_commit();
    }
    DEVICE void load_values(const Arguments& args, int lane, uint32_t ring, int tile) {
        if (tile < tiles) {
            copy_tile(args, args.v, cache.values, value_page, lane, ring + RING + tile % STAGES * TILE,
                      first_score(tile), start, stop);
            if (PAGED) value_page = cache.page_of(args, first_score(tile + 1) + lane);
        }
        copies_commit();
    }
    DEVICE void begin(const Arguments& args, const Segment& segment, const Cache& opened) {
        const int warp = thread_index() / 32, lane = thread_index() % 32, keys = segment.stop - segment.start;
        cache = opened;
        start = segment.start + (IN_TURN ? 0 : keys * warp / WARPS);
        stop = IN_TURN ? segment.stop : segment.start + keys * (warp + 1) / WARPS;
        const int at_once = IN_TURN ? WARPS * KEYS : KEYS;
        tiles = start < stop ? (stop - start + KEY_TAPS - 1 + at_once - 1) / at_once : 0;
        end_column = min(stop - PAD + KEY_TAPS - 1, cache.length);
        if (PAGED) {
            key_page = cache.page_of(args, first_column(0) + lane);
            value_page = cache.page_of(args, first_score(0) + lane);
        }
    }
};
