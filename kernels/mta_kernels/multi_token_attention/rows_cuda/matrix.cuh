// A mixing of heads as the host passes it.
#pragma once
#include <elements.cuh>

struct Matrix {  // [heads, heads], float32 or of the scores' type; the identity if there is none
    const void* start;
    int64_t stride_row, stride_column;
    int is_float;
};

// Its number there; zero outside.
template <int Heads, class Element> DEVICE float number_at(const Matrix& matrix, int row, int column) {
    if (row >= Heads || column >= Heads) return 0;
    if (!matrix.start) return row == column;
    const int64_t at = row * matrix.stride_row + column * matrix.stride_column;
    return matrix.is_float ? ((const float*)matrix.start)[at] : to_float(((const Element*)matrix.start)[at]);
}
