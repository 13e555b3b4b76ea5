// One row of the forward in float32 on the CUDA cores, for rows whose scores overflow fp16.
#pragma once
#include <exact.cuh>
#include <forward_work.cuh>

// By one warp. A step is 32 columns of scores, one a lane; its last KEY_TAPS - 1 columns of c belong to the next step.
template <class Arguments>
DEVICE void exact_row(const Arguments& args, const WorkTile& tile, int row, int lane) {
    constexpr int STEP = 32 - (KEY_TAPS - 1), COLUMNS = (VALUE_DIM + 31) / 32;
    const int end = keys_end(args.at, row);
    float reference = MINUS_INFINITY, sum = 0, sums[COLUMNS] = {};
#pragma unroll 1
    for (int first = keys_begin(args.at, row); first < end && sum == sum; first += STEP) {
        float scores[QUERY_TAPS], c = 0;
        exact_scores(args.inputs, args.at, tile.batch, tile.head, row, first - PAD + lane, scores);
#pragma unroll
        for (int tap = 0; tap < QUERY_TAPS; tap++)
#pragma unroll 1
            for (int key_tap = 0; key_tap < KEY_TAPS; key_tap++)
                c += weight_at(args.inputs.weight, tile.head, QUERY_TAPS - 1 - tap, key_tap) *
                     __shfl_sync(~0u, scores[tap], (lane + key_tap) % 32);
        if (lane >= STEP || first + lane >= end) c = MINUS_INFINITY;
        const float largest = fmaxf(reference, warp_max(c)), rescale = exp2_fast((reference - largest) * LOG2_E);
        const float p = exp2_fast((c - largest) * LOG2_E);  // c * LOG2_E may be off by 64
        reference = largest;
        sum = sum * rescale + warp_sum(p);
#pragma unroll
        for (int i = 0; i < COLUMNS; i++) sums[i] *= rescale;
#pragma unroll 1
        for (int key = first; key < min(first + STEP, end); key++) {
            const float of_key = __shfl_sync(~0u, p, key - first);
            const uint16_t* const v = row_of(args.inputs.v, tile.batch, tile.kv_head, key) + tile.part * VALUE_DIM;
#pragma unroll
            for (int i = 0; i < COLUMNS; i++)
                if (lane + 32 * i < VALUE_DIM) sums[i] += of_key * unpack<ELEMENT>(v[lane + 32 * i]);
        }
    }
    const int64_t of_row = out_row(args.at, tile.batch_head, row);
    uint16_t* const out = args.out + of_row * HEAD_DIM + tile.part * VALUE_DIM;
#pragma unroll
    for (int i = 0; i < COLUMNS; i++)
        if (lane + 32 * i < VALUE_DIM) out[lane + 32 * i] = (uint16_t)pack<ELEMENT>(sums[i] / sum, 0.f);
    if (tile.part == 0 && lane == 0) args.logsumexp[of_row] = marked(reference + log2f(sum) * LN_2, true);
}
