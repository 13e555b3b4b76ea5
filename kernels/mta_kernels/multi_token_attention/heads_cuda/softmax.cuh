// The probabilities of a row's logits, by their logsumexp. The kernel that includes this defines `Arguments`.
#pragma once
#include "mixing.cuh"

// A row's numbers for this lane's two heads.
struct OfRow {
    float numbers[2] = {};
    DEVICE OfRow() {}
    DEVICE OfRow(const float* source, int batch, int rows, int row) {  // [B, HEADS, rows]
#pragma unroll
        for (int i = 0; i < 2; i++)
            numbers[i] = source[(batch * HEADS + min(lane_index() / 4 + 8 * i, HEADS - 1)) * rows + row];
    }
};

// The probabilities of a row's logits.
struct Softmax {
    OfRow logsumexp, residual;
    DEVICE Softmax(const Arguments& args, int batch, int row) {
        const int query = min(max(args.first_row + row, 0), args.query_rows - 1);  // other rows see no keys
        logsumexp = OfRow(args.logsumexp, batch, args.query_rows, query);
    }
    // For this lane's head `half` of two.
    DEVICE float probability(float logit, int half) const {
        const float difference = logit - logsumexp.numbers[half] - residual.numbers[half];
        return exp2_fast((difference > 0 ? 0 : difference) * LOG2_E);  // NaN stays
    }
    // Keys from `first` on, zeros at keys that the row does not see; with `Whole` it sees all keys of the tile.
    template <bool Whole> DEVICE void probabilities(Numbers& logits, const Seen& seen, int first) const {
#pragma unroll
        for (int i = 0; i < 8; i++) {
            const int half = i % 4 / 2, key = first + i / 4 * 8 + lane_index() % 4 * 2 + i % 2;
            const float p = probability(logits[i / 4][i % 4], half);
            logits[i / 4][i % 4] = Whole || seen.all(key, 1) ? p : 0;
        }
    }
};
