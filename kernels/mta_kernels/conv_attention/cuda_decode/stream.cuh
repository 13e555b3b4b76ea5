// The keys and values of a team, from the cache to shared memory.
#pragma once
#include "layout.cuh"

// A row, or its part from a chunk of eight numbers on, begins this many bytes after `start` of row 0.
DEVICE int64_t row_offset(const Rows& x, int key, int page, int page_bits) {
    const int64_t row = PAGED ? key & (1 << page_bits) - 1 : key;
    const int64_t offset = row * (ALIGNED ? (int)x.stride_row : x.stride_row);  // 32 bits take fewer instructions
    return PAGED ? page * x.stride_batch + offset : offset;
}
DEVICE int64_t chunk_offset(const Rows& x, int chunk) {
    return ALIGNED ? chunk * 16 : chunk * 8 * x.stride_number;
}

// A chunk; zeros if not `inside`, and from number `count` on. Reads nothing outside.
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

// The keys of a program as a stream of tiles, which teams take in turn. A tile of this team has the columns y from
// `first_column` on, and the scores and values of the keys j from `first_score` on. Each copy is its own group, keys
// before values.
struct Stream {
    Cache cache;
    int start, stop;  // the keys j of this program
    int tiles, end_column;
    int key_pages[KEYS / 32], value_pages[KEYS / 32];  // PAGED: of a lane's rows of the next tile, every 32nd

    DEVICE int first_column(int tile) const { return first_score(tile) + TAIL - PAD; }
    DEVICE int first_score(int tile) const {
        return start - TAIL + (tile * TEAMS + (int)thread_index() / (32 * SHARING)) * KEYS;
    }
    DEVICE void look_up(const Arguments& args, int first, int (&pages)[KEYS / 32]) const {
        if (!PAGED) return;
#pragma unroll
        for (int i = 0; i < KEYS / 32; i++)
            pages[i] = cache.page_of(args, first + i * 32 + (int)thread_index() % 32);
    }

    // Rows from `first` on to a tile; rows outside `begin` to `end` are zeros.
    DEVICE void copy_tile(const Arguments& args, const Rows& x, const char* rows, const int (&pages)[KEYS / 32],
                          uint32_t to, int first, int begin, int end) const {
        constexpr int AT_ONCE = 32 * SHARING, COUNT = KEYS * CHUNKS / AT_ONCE;
        static_assert(KEYS * CHUNKS % AT_ONCE == 0);
        const int thread = thread_index() % AT_ONCE;
        const auto inside = [&](int row) { return (unsigned)(first + row - begin) < (unsigned)max(end - begin, 0); };
        if (ALIGNED && !PAGED && AT_ONCE % CHUNKS == 0 && BLOCK * CHUNKS % AT_ONCE == 0) {
            const int row = thread / CHUNKS, chunk = thread % CHUNKS;
            const char* from = rows + row_offset(x, first + row, 0, 0) + chunk * 16;
            const int64_t step = AT_ONCE / CHUNKS * (int64_t)(int)x.stride_row;
            const uint32_t at = to + place(row, chunk);
#pragma unroll
            for (int i = 0; i < COUNT; i++)
                copy_chunk(at + place(i * (AT_ONCE / CHUNKS), 0), from + i * step, 0, HEAD_DIM - chunk * 8,
                           inside(row + i * (AT_ONCE / CHUNKS)));
        } else {
            int64_t of_lane[KEYS / 32];
#pragma unroll
            for (int i = 0; i < KEYS / 32; i++)
                of_lane[i] = row_offset(x, first + i * 32 + thread % 32, pages[i], args.page_bits);
#pragma unroll
            for (int part = 0; part < KEYS / 32; part++)
#pragma unroll 4
                for (int i = 0; i < COUNT / (KEYS / 32); i++) {
                    const int row = (i * AT_ONCE + thread) / CHUNKS, chunk = (i * AT_ONCE + thread) % CHUNKS;
                    const uint32_t low = __shfl_sync(~0u, (uint32_t)of_lane[part], row);
                    const int64_t of_row = (int64_t)__shfl_sync(~0u, (int)(of_lane[part] >> 32), row) << 32 | low;
                    const char* from = rows + of_row + chunk_offset(x, chunk);
                    copy_chunk(to + place(part * 32 + row, chunk), from, x.stride_number, HEAD_DIM - chunk * 8,
                               inside(part * 32 + row));
                }
        }
    }
    // The buffer of a tile's keys; its values are RING bytes after it.
    DEVICE static uint32_t buffer(uint32_t shared, int tile) {
        return shared + thread_index() / (32 * SHARING) * 2 * RING + tile % STAGES * TILE;
    }
    DEVICE void load_keys(const Arguments& args, uint32_t shared, int tile) {
        if (tile < tiles) {
            copy_tile(args, args.k, cache.keys, key_pages, buffer(shared, tile), first_column(tile), 0, end_column);
            look_up(args, first_column(tile + 1), key_pages);
        }
        copies_commit();
    }
    DEVICE void load_values(const Arguments& args, uint32_t shared, int tile) {
        if (tile < tiles) {
            const uint32_t to = buffer(shared, tile) + RING;
            copy_tile(args, args.v, cache.values, value_pages, to, first_score(tile), start, stop);
            look_up(args, first_score(tile + 1), value_pages);
        }
        copies_commit();
    }
    DEVICE void begin(const Arguments& args, const Segment& segment, const Cache& opened) {
        cache = opened;
        start = segment.start, stop = segment.stop;
        tiles = start < stop ? (stop - start + TAIL + TEAMS * KEYS - 1) / (TEAMS * KEYS) : 0;
        end_column = min(stop - PAD + KEY_TAPS - 1, cache.length);
        look_up(args, first_column(0), key_pages);
        look_up(args, first_score(0), value_pages);
    }
};
