// Which rows of which head a block of the forward computes.
//
// The including file defines KEYS, BLOCK_ROWS, VALUE_PARTS. Arguments have `at`, `row_blocks`, `work_tiles`, `heads_in_l2`.
#pragma once
#include <positions.cuh>

// BLOCK_ROWS rows of a head, and the tiles of keys that they see. The last block ends with the last row, so the partial block
// is the first, which sees the fewest keys: its rows may begin before row 0.
struct WorkTile {
    int part, batch_head, head, batch, kv_head;
    int first_row, end_row, first_tile, end_tile = 0;

    WorkTile() = default;
    template <class Arguments> DEVICE WorkTile(const Arguments& args, int number) {
        const int first_head = number / (args.row_blocks * args.heads_in_l2) * args.heads_in_l2;
        const int heads_now = min(args.heads_in_l2, args.work_tiles / args.row_blocks - first_head);
        number -= first_head * args.row_blocks;
        const int of_head = first_head + number % heads_now;
        part = of_head % VALUE_PARTS, batch_head = of_head / VALUE_PARTS;
        head = batch_head % args.at.heads, batch = batch_head / args.at.heads, kv_head = head / args.at.group;
        end_row = args.at.query_rows - number / heads_now * BLOCK_ROWS;
        first_row = end_row - BLOCK_ROWS;
        first_tile = keys_begin(args.at, first_row) / KEYS;
        end_tile = max((keys_end(args.at, end_row - 1) + LEFT + KEYS - 1) / KEYS, first_tile + 1);
    }
    DEVICE bool exists() const { return end_tile > 0; }  // else it is past the last
};
