// Conv attention in float32 on the CUDA cores: for rows whose scores overflow fp16, to which the kernels round scores.
//
// Slow and plain. It reads only what a row sees, so that a row depends on no later token and no other document.
// Constants besides the ones of positions.cuh: ELEMENT, HEAD_DIM.
#pragma once
#include <positions.cuh>

struct Rows {  // [B, heads, rows, HEAD_DIM]; strides in numbers, rows contiguous and aligned to 16 bytes
    const uint16_t* start;
    int64_t stride_batch, stride_head, stride_row;
};

struct Weight {  // [Hq, QUERY_TAPS, KEY_TAPS]; float32 if is_float, else ELEMENT; strides in numbers
    const void* start;
    int64_t stride_head, stride_query, stride_key;
    int is_float;
};

struct Inputs {
    Rows q, k, v;
    Weight weight;
    float scale;
};

DEVICE const uint16_t* row_of(const Rows& x, int batch, int head, int row) {
    return x.start + batch * x.stride_batch + head * x.stride_head + row * x.stride_row;
}

DEVICE float weight_at(const Weight& weight, int head, int tap, int key_tap) {
    const int64_t at = head * weight.stride_head + tap * weight.stride_query + key_tap * weight.stride_key;
    return weight.is_float ? ((const float*)weight.start)[at] : unpack<ELEMENT>(((const uint16_t*)weight.start)[at]);
}

DEVICE float dot_of_eight(uint4 a, uint4 b) {
    const uint32_t pairs[2][4] = {{a.x, a.y, a.z, a.w}, {b.x, b.y, b.z, b.w}};
    float sum = 0;
#pragma unroll
    for (int i = 0; i < 4; i++) {
        sum += unpack<ELEMENT>((uint16_t)pairs[0][i]) * unpack<ELEMENT>((uint16_t)pairs[1][i]);
        sum += unpack<ELEMENT>((uint16_t)(pairs[0][i] >> 16)) * unpack<ELEMENT>((uint16_t)(pairs[1][i] >> 16));
    }
    return sum;
}

// scores[t]: scale * q[row - t] k[key], zero if that row does not see the key; returns which of them do, a bit each.
DEVICE uint32_t exact_scores(const Inputs& inputs, const Positions& at, int batch, int head, int row, int key,
                             float (&scores)[QUERY_TAPS]) {
    uint32_t sees = 0;
#pragma unroll
    for (int tap = 0; tap < QUERY_TAPS; tap++) {
        scores[tap] = 0;
        if (row >= tap && key >= keys_begin(at, row - tap) && key < keys_end(at, row - tap)) sees |= 1u << tap;
    }
    if (!sees) return 0;
    const uint16_t *const q = row_of(inputs.q, batch, head, row), *const k = row_of(inputs.k, batch, head / at.group, key);
#pragma unroll 1
    for (int column = 0; column < HEAD_DIM; column += 8) {
        const uint4 of_key = *(const uint4*)(k + column);
#pragma unroll
        for (int tap = 0; tap < QUERY_TAPS; tap++)
            if (sees >> tap & 1)
                scores[tap] += dot_of_eight(*(const uint4*)(q + column - tap * inputs.q.stride_row), of_key) * inputs.scale;
    }
    return sees;
}
