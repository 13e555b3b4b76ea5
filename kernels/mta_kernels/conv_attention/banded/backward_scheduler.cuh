// The tile scheduler of a backward: row blocks of a head, then the products that add their p and ds to dk and dv.
//
// A stage is a chunk of rows of one head: its row blocks, and `lag` stages later, when they are done, its products. The first
// stages are the last rows of all heads, which see the most keys. A block computes one work tile, in this order. It waits only
// for tiles that other blocks took before it: these run or are done, so there is no deadlock.
//
// Who includes it has PLACES, the numbers of a scratch row that a block of products reads.
#pragma once
#include <counters.cuh>
#include <positions.cuh>

struct Chunks {
    int batch_heads, chunks, row_blocks, all_row_blocks;  // row blocks of a chunk; the last rows' may have fewer
    int lag, slots;                                       // stages g, g + slots, .. share a part of the scratch
    int *tile_counter, *rows_done, *products_done;        // work tiles taken; row blocks and products of a stage that are done
};

struct WorkTile {
    int stage, chunk, part;  // part: row block of the chunk, or block of places, those of ds after those of p
    bool of_rows;
};

DEVICE int chunk_blocks(const Chunks& chunks, int chunk) {
    return min(chunks.row_blocks, chunks.all_row_blocks - chunk * chunks.row_blocks);
}
// Keys that rows of a chunk see, and blocks of places that p or ds, `shift` places on, take.
template <int BlockRows> DEVICE int chunk_keys(const Chunks& chunks, const Positions& at, int chunk) {
    const int end = min((chunk + 1) * chunks.row_blocks * BlockRows, at.query_rows);
    return CAUSAL ? end + at.key_rows - at.query_rows : at.key_rows;
}
DEVICE int place_blocks(int keys, int shift) { return (keys + shift + PLACES - 1) / PLACES; }

// Work tile `number` in that order; `products_of(chunk)` counts a chunk's blocks of products.
template <class ProductsOf> DEVICE WorkTile work_at(const Chunks& chunks, int number, ProductsOf products_of) {
    const int heads = chunks.batch_heads, stages = heads * chunks.chunks;
    auto chunk_of = [&](int stage) { return chunks.chunks - 1 - stage / heads; };
    for (int step = 0; true;) {  // at each: the row blocks of a stage, then the products of the one `lag` before
        const int before = step - chunks.lag;
        const int rows = step < stages ? chunk_blocks(chunks, chunk_of(step)) : 0;
        const int products = before >= 0 ? products_of(chunk_of(before)) : 0;
        const int next_rows = step / heads * heads + heads;
        const int next = before < 0 ? min(next_rows, chunks.lag) : min(next_rows, before / heads * heads + heads + chunks.lag);
        const int each = rows + products;  // the same until step `next`
        if (number < (next - step) * each) {
            step += number / each;
            number %= each;
            if (number < rows) return {step, chunk_of(step), rows - 1 - number, true};
            return {step - chunks.lag, chunk_of(step - chunks.lag), number - rows, false};
        }
        number -= (next - step) * each;
        step = next;
    }
}

// By one thread; `products_of` as for `work_at`.
template <class ProductsOf> DEVICE void wait_for_products(const Chunks& chunks, int stage, ProductsOf products_of) {
    wait_for_count(chunks.products_done + stage, products_of(chunks.chunks - 1 - stage / chunks.batch_heads));
}
// Rows wait until their part of the scratch has been read.
template <class ProductsOf> DEVICE void wait_for_scratch(const Chunks& chunks, const WorkTile& work, ProductsOf products_of) {
    if (work.stage >= chunks.slots) wait_for_products(chunks, work.stage - chunks.slots, products_of);
}
// Products wait for the rows of their chunk, and for the products that add to the same sums before them.
template <class ProductsOf> DEVICE void wait_for_rows(const Chunks& chunks, const WorkTile& work, ProductsOf products_of) {
    wait_for_count(chunks.rows_done + work.stage, chunk_blocks(chunks, work.chunk));
    if (work.stage >= chunks.batch_heads) wait_for_products(chunks, work.stage - chunks.batch_heads, products_of);
}
