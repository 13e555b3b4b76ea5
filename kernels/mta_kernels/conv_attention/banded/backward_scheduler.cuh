// The tile scheduler of a backward: row blocks of a head, then the products that add their p and ds to dk and dv.
//
// A stage is a chunk of rows of one head: its row blocks, and when they are done, its products. The first stages are the last
// rows of all heads, which see the most keys. There are two queues, of row blocks and of products, both in the order of stages. A
// block takes a row block if one is available, or else products.
//
// At first the row blocks of `slots` stages are available, as many as the scratch has room for. When a k-th stage, whichever it
// is, has finished its row blocks, the products of stage k become available. When a k-th stage has finished its products, the row
// blocks of stage slots + k do. So a block that took a tile may still wait for the stage that it needs. There is no deadlock:
//
// - A block waits only for tiles that were taken before its own. Row blocks of stage slots + k are available once k + 1 stages
//   have finished their products. Products are taken in order, so all products of stage k, whose place in the scratch the row
//   blocks need, have been taken. Products need the row blocks of their stage, and an earlier stage's products: the same holds.
// - A block may take its next tile while it computes the current one, which it took before. So of all unfinished tiles, the one
//   taken first waits for nothing.
// - If no row block is available, all row blocks of open stages have been taken. When they are done, as many stages of products
//   become available, and when these are done, further row blocks.
//
// The including file defines PLACES, the numbers of a scratch row that a block of products reads.
#pragma once
#include <counters.cuh>
#include <positions.cuh>

struct Scheduler {  // zeros when the launch begins, and so are the numbers of each stage that follow it
    Queue rows, products;
    int row_stages_done, product_stages_done;
};

struct Chunks {
    int batch_heads, chunks, row_blocks, all_row_blocks;  // row blocks of a chunk; the last rows' may have fewer
    int slots, stages;                                    // stages g, g + slots, .. share a part of the scratch
    int work_tiles, open_at_first;                        // of both kinds; row blocks of the first `slots` stages
    Scheduler* scheduler;                                 // then the finished row blocks of each stage, and then products

    DEVICE int* rows_done(int stage) const { return (int*)(scheduler + 1) + stage; }
    DEVICE int* products_done(int stage) const { return rows_done(stages + stage); }
    DEVICE int chunk_of(int stage) const { return chunks - 1 - stage / batch_heads; }
    DEVICE int blocks_of(int chunk) const { return min(row_blocks, all_row_blocks - chunk * row_blocks); }
};

struct WorkTile {
    int stage, chunk, part;  // part: row block of the chunk, or block of places, p's before ds's
    bool of_rows;

    DEVICE bool exists() const { return stage >= 0; }
};

// Keys that rows of a chunk see, and blocks of places that p or ds need, `shift` places after the keys.
template <int BlockRows> DEVICE int chunk_keys(const Chunks& chunks, const Positions& at, int chunk) {
    const int end = min((chunk + 1) * chunks.row_blocks * BlockRows, at.query_rows);
    return CAUSAL ? end + at.key_rows - at.query_rows : at.key_rows;
}
DEVICE int place_blocks(int keys, int shift) { return (keys + shift + PLACES - 1) / PLACES; }

DEVICE WorkTile row_tile(const Chunks& chunks, int number) {  // the longest of a stage first
    int blocks = chunks.blocks_of(chunks.chunks - 1), stage = 0;
    if (number >= chunks.batch_heads * blocks) {
        number -= chunks.batch_heads * blocks;
        blocks = chunks.row_blocks, stage = chunks.batch_heads;
    }
    stage += number / blocks;
    return {stage, chunks.chunk_of(stage), blocks - 1 - number % blocks, true};
}
// `products_of(chunk)`, here and below, counts a chunk's blocks of products.
template <class ProductsOf> DEVICE WorkTile product_tile(const Chunks& chunks, int number, ProductsOf products_of) {
    for (int chunk = chunks.chunks - 1; true; chunk--) {
        const int each = products_of(chunk), stage = number / each;
        if (stage < chunks.batch_heads) return {(chunks.chunks - 1 - chunk) * chunks.batch_heads + stage, chunk, number % each, false};
        number -= chunks.batch_heads * each;
    }
}

// By one thread: a work tile that no other block gets, or one that does not exist when all have been taken.
template <class ProductsOf> DEVICE WorkTile take_work(const Chunks& chunks, ProductsOf products_of) {
    Queue &rows = chunks.scheduler->rows, &products = chunks.scheduler->products;
    while (true) {
        int number = take_open(rows, chunks.open_at_first);
        if (number >= 0) return row_tile(chunks, number);
        number = take_open(products, 0);
        if (number >= 0) return product_tile(chunks, number, products_of);
        if (!wait_for_open(rows, chunks.open_at_first, products, chunks.work_tiles)) return {-1};
    }
}

// What a taken tile may still have to wait for, by one thread.
template <class ProductsOf> DEVICE void wait_for_products(const Chunks& chunks, int stage, ProductsOf products_of) {
    wait_for_count(chunks.products_done(stage), products_of(chunks.chunk_of(stage)));
}
// Rows wait until their part of the scratch has been read.
template <class ProductsOf> DEVICE void wait_for_scratch(const Chunks& chunks, const WorkTile& work, ProductsOf products_of) {
    if (work.stage >= chunks.slots) wait_for_products(chunks, work.stage - chunks.slots, products_of);
}
// Products wait for the rows of their chunk, and for the products that add to the same sums before them.
template <class ProductsOf> DEVICE void wait_for_rows(const Chunks& chunks, const WorkTile& work, ProductsOf products_of) {
    wait_for_count(chunks.rows_done(work.stage), chunks.blocks_of(work.chunk));
    if (work.stage >= chunks.batch_heads) wait_for_products(chunks, work.stage - chunks.batch_heads, products_of);
}

// By one thread after a barrier: a work tile is done. The last tile of a stage opens a stage of the other queue.
template <class ProductsOf> DEVICE void rows_are_done(const Chunks& chunks, int stage, ProductsOf products_of) {
    if (arrive(chunks.rows_done(stage)) + 1 < chunks.blocks_of(chunks.chunk_of(stage))) return;
    const int opened = fetch_next(&chunks.scheduler->row_stages_done);
    open_more(chunks.scheduler->products, products_of(chunks.chunk_of(opened)));
}
template <class ProductsOf> DEVICE void products_are_done(const Chunks& chunks, int stage, ProductsOf products_of) {
    if (arrive(chunks.products_done(stage)) + 1 < products_of(chunks.chunk_of(stage))) return;
    const int opened = fetch_next(&chunks.scheduler->product_stages_done) + chunks.slots;
    if (opened < chunks.stages) open_more(chunks.scheduler->rows, chunks.blocks_of(chunks.chunk_of(opened)));
}
