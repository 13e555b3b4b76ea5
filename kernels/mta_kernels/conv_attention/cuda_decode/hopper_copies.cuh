// The producer warp of hopper_heads.cu: it copies tiles of keys and values to the ring.
#pragma once
#include "hopper_layout.cuh"

// Copies a tile's rows from `first` on, in parts of `Part` rows with some in `begin` to `end`; in one copy if all rows are.
template <int Part, class Whole, class Copy>
DEVICE void copy_rows(uint32_t full, int first, int begin, int end, Whole copy_whole, Copy copy_part) {
    const int from = max(begin - first, 0) / Part, to = min(max(end - first + Part - 1, 0) / Part, KEYS / Part);
    barrier_expect(full, max(to - from, 0) * SLABS * Part * 128);
    if (to - from == KEYS / Part) {
        copy_whole();
    } else {
#pragma unroll 1
        for (int part = from; part < to; part++) copy_part(part * Part);
    }
}

// By one thread. In pages, a tile of keys lies in one page, and its first DELAY values in the page of the tile before.
DEVICE void produce(Work& work, const Arguments& args, const Maps& maps, uint32_t shared) {
    if (QUERIES_FIRST) barrier_wait(shared + ASKED_AT, 0);
    int buffer = 0;
    do {
        const Segment segment = work.segment;
        const Tiles tiles(segment);
        const int* table = args.table + segment.sequence * args.table_stride_batch;
        const auto page_of = [&](int key) {
            if (!PAGED) return segment.sequence;
            return key >= 0 && key < tiles.length ? table[(key >> args.page_bits) * args.table_stride_page] : 0;
        };
        const auto row_of = [&](int key) { return PAGED ? key & (1 << args.page_bits) - 1 : key; };
        const auto copy_keys = [&](const TensorMap* map, uint32_t to, uint32_t full, int page, int key) {
            for (int slab = 0; slab < SLABS; slab++)
                stream_tile(to + slab * SLAB_BYTES, map, full, slab * 64, 0, 0, row_of(key) / OF_WARP + page * maps.groups_apart,
                            segment.kv_head + page * maps.heads_apart);
        };
        const auto copy_values = [&](const TensorMap* map, uint32_t to, uint32_t full, int page, int key) {
            for (int slab = 0; slab < SLABS; slab++)
                stream_tile(to + slab * SLAB_BYTES, map, full, slab * 64, row_of(key), segment.kv_head, page);
        };
        int before = page_of(tiles.first_column - KEYS), page = page_of(tiles.first_column);
#pragma unroll 1
        for (int tile = 0; tile < tiles.count; tile++, buffer += 2) {
            const int column = tiles.column(tile), score = tiles.score(tile), next = page_of(column + KEYS);
            uint32_t full = acquire(shared, buffer), to = shared + buffer % STAGES * TILE_BYTES;
            copy_rows<OF_WARP>(
                full, column, column, min(tiles.stop - PAD + TAIL, tiles.length),
                [&] { copy_keys(&maps.key_tile, to, full, page, column); },
                [&](int row) { copy_keys(&maps.key_group, to + row * 128, full, page, column + row); });
            full = acquire(shared, buffer + 1), to = shared + (buffer + 1) % STAGES * TILE_BYTES;
            const auto copy_part = [&](int row) {
                copy_values(&maps.value_part, to + row * 128, full, PAGED && row < DELAY ? before : page, score + row);
            };
            copy_rows<VALUE_PART>(
                full, score, tiles.start, tiles.stop,
                [&] {
                    for (int row = 0; row < VALUES_BEFORE; row += VALUE_PART) copy_part(row);
                    copy_values(&maps.value_tile, to + VALUES_BEFORE * 128, full, page, score + VALUES_BEFORE);
                },
                copy_part);
            before = page, page = next;
        }
    } while (work.advance());
}
