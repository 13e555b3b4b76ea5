// The three products of tiles by FMAs, for float32; included by tiles.cuh.
//
// Results are 64 rows by WIDTH columns in the registers of 8 x 16 threads, each with every 8th row and every 16th column:
// number i of a thread is at (row_of<WIDTH>(i), column_of<WIDTH>(i)).
#pragma once

template <int WIDTH> DEVICE int row_of(int i) { return threadIdx.x / 16 + i / (WIDTH / 16) * 8; }
template <int WIDTH> DEVICE int column_of(int i) { return threadIdx.x % 16 + i % (WIDTH / 16) * 16; }

DEVICE void store_tile(float* tile, const float (&sum)[TILE / 2]) {
#pragma unroll
    for (int i = 0; i < TILE / 2; i++) tile[row_of<TILE>(i) * PITCH + column_of<TILE>(i)] = sum[i];
}

// sum[r][c] += sum over d of a[r][d] * b[c][d]
DEVICE void multiply_rows(float (&sum)[TILE / 2], const float* a, const float* b) {
#pragma unroll 4
    for (int step = 0; step < CHUNK; step += 4) {
        float4 of_b[4];
#pragma unroll
        for (int j = 0; j < 4; j++) of_b[j] = *(const float4*)(b + column_of<TILE>(j) * ROW_PITCH + step);
#pragma unroll
        for (int i = 0; i < TILE / 2; i += 4) {
            const float4 of_a = *(const float4*)(a + row_of<TILE>(i) * ROW_PITCH + step);
#pragma unroll
            for (int j = 0; j < 4; j++) {
                sum[i + j] = fmaf(of_a.x, of_b[j].x, sum[i + j]);
                sum[i + j] = fmaf(of_a.y, of_b[j].y, sum[i + j]);
                sum[i + j] = fmaf(of_a.z, of_b[j].z, sum[i + j]);
                sum[i + j] = fmaf(of_a.w, of_b[j].w, sum[i + j]);
            }
        }
    }
}

// sum[r][d] += sum over c < COLUMNS of scores[r][c] * x[c][d]; scores are zero from COLUMNS on
template <int COLUMNS> DEVICE void multiply(float (&sum)[CHUNK / 2], const float* scores, const float* x) {
    constexpr int EACH = CHUNK / 16;  // columns of x a thread
#pragma unroll 2
    for (int step = 0; step < COLUMNS; step += 4) {
        float of_x[4][EACH];
#pragma unroll
        for (int c = 0; c < 4; c++)
#pragma unroll
            for (int j = 0; j < EACH; j++) of_x[c][j] = x[(step + c) * ROW_PITCH + column_of<CHUNK>(j)];
#pragma unroll
        for (int i = 0; i < CHUNK / 2; i += EACH) {
            const float4 row = *(const float4*)(scores + row_of<CHUNK>(i) * PITCH + step);
#pragma unroll
            for (int j = 0; j < EACH; j++) {
                sum[i + j] = fmaf(row.x, of_x[0][j], sum[i + j]);
                sum[i + j] = fmaf(row.y, of_x[1][j], sum[i + j]);
                sum[i + j] = fmaf(row.z, of_x[2][j], sum[i + j]);
                sum[i + j] = fmaf(row.w, of_x[3][j], sum[i + j]);
            }
        }
    }
}

// sum[c][d] += sum over r < ROWS of scores[r][c] * x[r][d]
template <int ROWS> DEVICE void multiply_transposed(float (&sum)[CHUNK / 2], const float* scores, const float* x) {
    constexpr int EACH = CHUNK / 16;
#pragma unroll 4
    for (int step = 0; step < ROWS; step++) {
        float of_x[EACH];
#pragma unroll
        for (int j = 0; j < EACH; j++) of_x[j] = x[step * ROW_PITCH + column_of<CHUNK>(j)];
#pragma unroll
        for (int i = 0; i < CHUNK / 2; i += EACH) {
            const float column = scores[step * PITCH + row_of<CHUNK>(i)];
#pragma unroll
            for (int j = 0; j < EACH; j++) sum[i + j] = fmaf(column, of_x[j], sum[i + j]);
        }
    }
}
