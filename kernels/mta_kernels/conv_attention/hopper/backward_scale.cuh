// Powers of two that bring gradients into the range of fp16 and of ELEMENT.
#pragma once
#include <backward_layout.cuh>

// |grad_out v^T - delta| <= 2 |grad_out| |v|: the power of two that brings the bound of rows and keys to GradLimit.
DEVICE float grad_factor_of(const Arguments& args, const RowBlock& rows, int lane, int row, int end_row, int key, int end_key) {
    auto largest = [&](const float* norms, int rows, int first, int end) {
        const int each = (rows + NORM_PARTS - 1) / NORM_PARTS;  // of a part, as in prepare.cu
        return warp_max(lane >= first / each && lane <= (end - 1) / each ? norms[lane] : 0.f);
    };
    const int kv_batch_head = rows.batch * (args.at.heads / args.at.group) + rows.kv_head;
    auto largest_of_rows = [&](int head) {
        return largest(args.grad_norms + head * NORM_PARTS, args.at.query_rows - ROWS_BEFORE, row - ROWS_BEFORE,
                       end_row - ROWS_BEFORE);
    };
    const float grad_norm = largest_of_rows(rows.batch_head);
    float value_norm = largest(args.value_norms + kv_batch_head * NORM_PARTS, args.at.key_rows - KEYS_BEFORE - KEYS_AFTER,
                               key - KEYS_BEFORE, end_key - KEYS_BEFORE);
    if constexpr (MARGINS) value_norm = fmaxf(value_norm, largest_of_rows(args.chunks.batch_heads + rows.batch_head));
    const float bound = 0.5f * (log2f(grad_norm) + log2f(value_norm)) + 1;
    return exp2f(fminf(fmaxf(floorf(GradLimit<ELEMENT>::log2 - bound), -100.f), 100.f));
}

// For dc, in fp16, from what the block's rows see, so that a huge token costs others little. For ds, which all blocks of a head
// add up, from the whole head.
struct GradScales {
    float of_block, to_ds, ds_unit;

    DEVICE GradScales(const Arguments& args, const RowBlock& rows, int lane) {
        const int end_of_c = min(rows.first_row + WARPGROUPS * ROWS - HALO, args.at.query_rows);
        of_block = grad_factor_of(args, rows, lane, rows.first_row, end_of_c, keys_begin(args.at, rows.first_row),
                                  keys_end(args.at, end_of_c - 1));
        const float of_head = grad_factor_of(args, rows, lane, 0, args.at.query_rows, 0, args.at.key_rows);
        to_ds = of_head / of_block;
        ds_unit = args.scale == 0 ? 0.f : args.weight_scale[rows.head] * LN_2 / of_head;
    }
};
