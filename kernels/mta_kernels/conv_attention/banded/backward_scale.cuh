// Powers of two that bring gradients into the range of fp16 and of ELEMENT.
#pragma once
#include <positions.cuh>

constexpr int NORM_PARTS = 32;  // maxima of squared norms of rows, a head

// With SPANS each document has a power of two of its own (`document_factors` of packing.py). `grad_norms` then holds it
// for each row: [B * Hq, N].
template <class Arguments> DEVICE float document_factor(const Arguments& args, int batch_head, int row) {
    return args.grad_norms[(int64_t)batch_head * args.at.query_rows + clamp_row(args.at, row)];
}

// One over `document_factor`. A division would be a call, around which registers spill.
template <class Arguments> DEVICE float document_unit(const Arguments& args, int batch_head, int row) {
    return __uint_as_float(0x7F000000u - __float_as_uint(document_factor(args, batch_head, row)));
}

// The least factor of some rows, by a warp: the weight's gradient sums dc of all their documents.
template <class Arguments>
DEVICE float least_factor(const Arguments& args, int batch_head, int first_row, int end_row, int lane) {
    float least = document_factor(args, batch_head, first_row);
    for (int row = first_row + lane; row < end_row; row += 32) least = fminf(least, document_factor(args, batch_head, row));
    return -warp_max(-least);
}

// Two numbers in fp16.
DEVICE uint32_t scale_halves(uint32_t halves, float low, float high) {
    return pack<Half>(unpack<Half>((uint16_t)halves) * low, unpack<Half>((uint16_t)(halves >> 16)) * high);
}

// dc is rounded to fp16. ds, the sum of up to 136 dc times weights below 1, is stored to scratch in ELEMENT.
template <class Element> struct GradLimit;
template <> struct GradLimit<Half> { static constexpr float log2 = 8; };
template <> struct GradLimit<Bfloat16> { static constexpr float log2 = 14; };

// |grad_out v^T - delta| <= 2 |grad_out| |v|: the power of two that brings the bound of rows and keys to GradLimit.
template <class Arguments, class RowBlock>
DEVICE float grad_factor_of(const Arguments& args, const RowBlock& rows, int lane, int row, int end_row, int key, int end_key) {
    auto largest = [&](const float* norms, int rows, int first, int end) {
        const int each = (rows + NORM_PARTS - 1) / NORM_PARTS;  // of a part, as in prepare_gradients.cuh
        return warp_max(lane >= first / each && lane <= (end - 1) / each ? norms[lane] : 0.f);
    };
    const int kv_batch_head = rows.batch * (args.at.heads / args.at.group) + rows.kv_head;
    const float grad_norm = largest(args.grad_norms + rows.batch_head * NORM_PARTS, args.at.query_rows, row, end_row);
    const float value_norm = largest(args.value_norms + kv_batch_head * NORM_PARTS, args.at.key_rows, key, end_key);
    const float bound = 0.5f * (log2f(grad_norm) + log2f(value_norm)) + 1;
    return exp2f(fminf(fmaxf(floorf(GradLimit<ELEMENT>::log2 - bound), -100.f), 100.f));
}

// The scale of dc, in fp16, is of what the block's rows see, so that a huge token costs others little. All blocks of a head add
// up ds: its scale is of the whole head. With SPANS both are the scale of a row's document.
struct GradScales {
    float of_block, to_ds, ds_unit;

    // `unit`: the factor of c; `end_of_c`: the end of the rows whose dc the block computes.
    template <class Arguments, class RowBlock>
    DEVICE GradScales(const Arguments& args, const RowBlock& rows, int lane, float unit, int end_of_c) {
        if constexpr (SPANS) {
            of_block = to_ds = 1, ds_unit = args.scale == 0 ? 0.f : unit * LN_2;
        } else {
            of_block = grad_factor_of(args, rows, lane, rows.first_row, end_of_c, keys_begin(args.at, rows.first_row),
                                      keys_end(args.at, end_of_c - 1));
            const float of_head = grad_factor_of(args, rows, lane, 0, args.at.query_rows, 0, args.at.key_rows);
            to_ds = of_head / of_block;
            ds_unit = args.scale == 0 ? 0.f : unit * LN_2 / of_head;
        }
    }
};
