// The blocks of the backward that compute products of the rows' p and ds: dv += p^T grad_out, dk += ds^T q and dq = ds k.
//
// The left operand is a part of the scratch, the right one rows of grad_out, q or k. A step copies PRODUCT_DEPTH rows, or
// places, of both. Copies run several steps ahead.
#pragma once
#include "products.cuh"

enum Product { OF_VALUES, OF_KEYS, OF_QUERIES };

using Sums = float[4][2 * PART_STEPS][4];  // of 16 x 8 numbers

DEVICE constexpr int key_of_place(int place) {  // place 32 a + 8 b + 2 c + d is key 32 a + 8 c + 2 b + d, as threads held it
    return place / 32 * 32 + place % 8 / 2 * 8 + place % 32 / 8 * 2 + place % 2;
}

struct ProductTile {
    Product kind;
    int block;       // of places, or of rows for dq
    int begin, end;  // rows of the chunk, or places for dq
};

// What a thread copies, step after step of a product. A step is PRODUCT_DEPTH rows of the scratch and of grad_out or q, or
// for dq PRODUCT_DEPTH places of PLACES rows, and keys. Zeros replace what no row block has stored, and rows from `end` on.
template <Product Kind> struct StepCopies {
    static constexpr bool OF_ROWS = Kind == OF_QUERIES;
    static constexpr int ROWS = OF_ROWS ? PLACES : PRODUCT_DEPTH, CHUNKS = (OF_ROWS ? PRODUCT_DEPTH : PLACES) / 8;
    static constexpr int LEFT_AT_ONCE = THREADS / CHUNKS;
    static_assert(THREADS % CHUNKS == 0 && ROWS % LEFT_AT_ONCE == 0, "a thread's chunks lie in one column");
    static_assert(PRODUCT_DEPTH % ROWS_AT_ONCE == 0, "all threads copy as many rows");

    const Arguments& args;
    const ChunkOfHead& of;
    int first_row, first_place, end;  // of the left operand, whose rows are of the chunk
    const uint16_t* left;             // the thread's first chunk of the next step

    DEVICE StepCopies(const Arguments& args, const ChunkOfHead& of, const ProductTile& tile) : args(args), of(of) {
        first_row = OF_ROWS ? tile.block * PLACES : tile.begin, first_place = OF_ROWS ? tile.begin : tile.block * PLACES;
        end = OF_ROWS ? min(args.chunk_rows, args.at.query_rows - of.first_row()) : tile.end;
        const uint16_t* const scratch = Kind == OF_VALUES ? args.p : args.ds;
        left = scratch + of.in_scratch(args, first_row + threadIdx.x / CHUNKS) + first_place + threadIdx.x % CHUNKS * 8;
    }

    DEVICE void copy_next(uint32_t to) {
        copy_left(to);
        copy_right(to + LEFT_BYTES);
        left += OF_ROWS ? PRODUCT_DEPTH : PRODUCT_DEPTH * (int64_t)args.pitch;
        (OF_ROWS ? first_place : first_row) += PRODUCT_DEPTH;
    }

    DEVICE void copy_left(uint32_t to) const {
        // Whether all places have been stored: row blocks store at least the places of the keys that their rows see.
        const int of_head = of.first_row() + first_row;
        const bool all = first_row + ROWS <= end && first_place >= keys_begin(args.at, of_head + ROWS - 1) &&
                         first_place + CHUNKS * 8 <= keys_end(args.at, of_head) + LAG;
        const int chunk = threadIdx.x % CHUNKS, thread_row = threadIdx.x / CHUNKS;
        const int64_t pass = LEFT_AT_ONCE * (int64_t)args.pitch;
        const uint16_t* source = left;
        if (all) {
#pragma unroll
            for (int i = 0; i < ROWS; i += LEFT_AT_ONCE, source += pass)
                copy_async(to + in_tile<CHUNKS * 8>(i + thread_row, chunk), source, true);
            return;
        }
        const int place = first_place + chunk * 8;
#pragma unroll 1
        for (int row = thread_row; row < ROWS; row += LEFT_AT_ONCE, source += pass) {
            const RowBlock block(args.at, of.first_row_block + (first_row + row) / BLOCK_ROWS);
            const bool inside = first_row + row < end && place >= block.first_place && place < block.end_place;
            copy_async(to + in_tile<CHUNKS * 8>(row, chunk), source, inside);
        }
    }

    DEVICE void copy_right(uint32_t to) const {
        const Rows& right = Kind == OF_VALUES ? args.grad_out : Kind == OF_KEYS ? args.inputs.q : args.inputs.k;
        const uint16_t* const start = row_of(right, of.batch, OF_ROWS ? of.kv_head : of.head, 0);
        const int first = OF_ROWS ? first_place - LAG : of.first_row() + first_row, rows = OF_ROWS ? args.at.key_rows : args.at.query_rows;
#pragma unroll
        for (int i = 0; i < PRODUCT_DEPTH; i += ROWS_AT_ONCE) {
            const int local_row = threadIdx.x / 8 + i, row = first + (OF_ROWS ? key_of_place(local_row) : local_row);
            copy_chunks(to, start + (int64_t)row * (int)right.stride_row, row >= 0 && row < rows, local_row, threadIdx.x % 8);
        }
    }
};

// By a warp: 64 rows of the left operand from `first_row` on and PART_STEPS times 16 columns of the right one.
template <bool OfRows> DEVICE void multiply_step(Sums& sums, uint32_t tiles, int first_row, int part) {
    const unsigned lane = threadIdx.x % 32;
    const uint32_t left = tiles + (OfRows ? in_tile<PRODUCT_DEPTH>(first_row + lane % 16, lane / 16)
                                          : in_tile<PLACES>(lane / 16 * 8 + lane % 8, first_row / 8 + lane / 8 % 2));
    const uint32_t right = tiles + LEFT_BYTES + in_tile<DEPTH>(lane % 16, lane / 16);
#pragma unroll
    for (int step = 0; step < PRODUCT_DEPTH / 16; step++) {
        uint32_t a[4][4];
#pragma unroll
        for (int m = 0; m < 4; m++) {
            if (OfRows) load_matrices(a[m], at_step<PRODUCT_DEPTH>(left, step) + 16 * m * PRODUCT_DEPTH * 2);
            else load_matrices_transposed(a[m], at_step<PLACES>(left, m) + 16 * step * PLACES * 2);
        }
#pragma unroll
        for (int n = 0; n < PART_STEPS; n++) {
            if (part * PART_STEPS + n >= DEPTH_STEPS) continue;
            uint32_t b[4];
            load_matrices_transposed(b, at_step<DEPTH>(right, part * PART_STEPS + n) + 16 * step * DEPTH * 2);
#pragma unroll
            for (int m = 0; m < 4; m++) {
                multiply<ELEMENT>(sums[m][2 * n], a[m], b[0], b[1]);
                multiply<ELEMENT>(sums[m][2 * n + 1], a[m], b[2], b[3]);
            }
        }
    }
}

// Add to dk or dv of the previous chunk, if there is one.
DEVICE void add_sums(const Arguments& args, const ChunkOfHead& of, const ProductTile& tile, const Sums& sums, int keys, bool is_first,
                     int first_row, int part) {
    const int lane = threadIdx.x % 32, shift = tile.kind == OF_VALUES ? LEFT : LAG;
    const float unit = tile.kind == OF_VALUES ? 1.f : args.ds_unit[of.batch_head];
    float* const out = (tile.kind == OF_VALUES ? args.dv : args.dk) + (int64_t)of.batch_head * args.at.key_rows * HEAD_DIM;
#pragma unroll
    for (int m = 0; m < 4; m++)
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const int key = key_of_place(tile.block * PLACES + first_row + 16 * m + 8 * h + lane / 4) - shift;
            if (key < 0 || key >= keys) continue;
            const float of_key = SPANS && tile.kind == OF_KEYS ? unit * document_unit(args, of.batch_head, key) : unit;
#pragma unroll
            for (int n = 0; n < 2 * PART_STEPS; n++) {
                const int column = part * PART_STEPS * 16 + 8 * n + lane % 4 * 2;
                if (column >= HEAD_DIM) continue;
                float2* const to = (float2*)(out + (int64_t)key * HEAD_DIM + column);
                float2 sum = {sums[m][n][2 * h] * of_key, sums[m][n][2 * h + 1] * of_key};
                if (!is_first) {
                    const float2 before = *to;
                    sum.x += before.x, sum.y += before.y;
                }
                *to = sum;
            }
        }
}

DEVICE void write_dq(const Arguments& args, const ChunkOfHead& of, const ProductTile& tile, const Sums& sums, int rows, int first_row,
                     int part) {
    const int lane = threadIdx.x % 32;
    const float unit = args.ds_unit[of.batch_head];
#pragma unroll
    for (int m = 0; m < 4; m++)
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const int row = tile.block * PLACES + first_row + 16 * m + 8 * h + lane / 4;
            if (row >= rows) continue;
            const float of_row = SPANS ? unit * document_unit(args, of.batch_head, of.first_row() + row) : unit;
            uint16_t* const out = args.dq + ((int64_t)of.batch_head * args.at.query_rows + of.first_row() + row) * HEAD_DIM;
#pragma unroll
            for (int n = 0; n < 2 * PART_STEPS; n++) {
                const int column = part * PART_STEPS * 16 + 8 * n + lane % 4 * 2;
                if (column < HEAD_DIM) *(uint32_t*)(out + column) = pack<ELEMENT>(sums[m][n][2 * h] * of_row, sums[m][n][2 * h + 1] * of_row);
            }
        }
}

template <Product Kind>
DEVICE void multiply_steps(const Arguments& args, const ChunkOfHead& of, const ProductTile& tile, Sums& sums, uint32_t shared,
                           int first_row, int part) {
    const int steps = (tile.end - tile.begin + PRODUCT_DEPTH - 1) / PRODUCT_DEPTH;
    StepCopies<Kind> copies(args, of, tile);
    for (int i = 0; i < PRODUCT_STAGES - 1; i++) {
        if (i < steps) copies.copy_next(shared + i * PRODUCT_STAGE);
        copies_commit();
    }
#pragma unroll 1
    for (int i = 0; i < steps; i++) {
        copies_wait<PRODUCT_STAGES - 2>();
        __syncthreads();  // the step has come; the one before is not read any more
        const int next = i + PRODUCT_STAGES - 1;
        if (next < steps) copies.copy_next(shared + next % PRODUCT_STAGES * PRODUCT_STAGE);
        copies_commit();
        multiply_step<Kind == OF_QUERIES>(sums, shared + i % PRODUCT_STAGES * PRODUCT_STAGE, first_row, part);
    }
}

DEVICE void compute_products(const Arguments& args, const WorkTile& work, const ChunkOfHead& of, uint32_t shared) {
    const ProductCounts counts(args, work.chunk);
    const int rows = min(args.chunk_rows, args.at.query_rows - of.first_row());
    const int warp = threadIdx.x / 32, first_row = warp / PARTS * 64, part = PARTS == 1 ? 0 : warp % PARTS;
    clear_rest<HEAD_DIM, DEPTH, THREADS>(shared + LEFT_BYTES, PRODUCT_DEPTH);
    for (int i = 1; i < PRODUCT_STAGES; i++) clear_rest<HEAD_DIM, DEPTH, THREADS>(shared + i * PRODUCT_STAGE + LEFT_BYTES, PRODUCT_DEPTH);
    Sums sums = {};
    ProductTile tile;
    // The longest products of each kind come first.
    const int of_keys = work.part - counts.of_values, of_queries = counts.all() - 1 - work.part;
    if (of_queries < counts.of_queries) {
        tile = {OF_QUERIES, of_queries};
        const int last = min((of_queries + 1) * PLACES, rows) - 1;
        tile.begin = RowBlock(args.at, of.first_row_block + of_queries * PLACES / BLOCK_ROWS).first_place;
        tile.end = RowBlock(args.at, of.first_row_block + last / BLOCK_ROWS).end_place;
        multiply_steps<OF_QUERIES>(args, of, tile, sums, shared, first_row, part);
        write_dq(args, of, tile, sums, rows, first_row, part);
    } else {
        tile = of_keys >= 0 ? ProductTile{OF_KEYS, of_keys} : ProductTile{OF_VALUES, work.part};
        const int first_key = tile.block * PLACES - (of_keys >= 0 ? LAG : LEFT);
        tile.begin = 0, tile.end = rows;
        if (CAUSAL) tile.begin = max(first_key - (args.at.key_rows - args.at.query_rows) - of.first_row(), 0) / PRODUCT_DEPTH * PRODUCT_DEPTH;
        if (SPANS) {
            const int blocks = (args.at.key_rows + ALIGNED - 1) / ALIGNED;
            tile.begin = max(tile.begin, args.seen_by[max(first_key, 0) / ALIGNED] - of.first_row());
            tile.end = min(tile.end, args.seen_by[blocks + min((first_key + PLACES - 1) / ALIGNED, blocks - 1)] - of.first_row());
        }
        if (of_keys >= 0) multiply_steps<OF_KEYS>(args, of, tile, sums, shared, first_row, part);
        else multiply_steps<OF_VALUES>(args, of, tile, sums, shared, first_row, part);
        add_sums(args, of, tile, sums, counts.keys, work.chunk == args.chunks.chunks - 1, first_row, part);
    }
    __syncthreads();
    if (threadIdx.x == 0) products_are_done(args.chunks, (int)load_shared(shared + WORK), products_of(args));
}
