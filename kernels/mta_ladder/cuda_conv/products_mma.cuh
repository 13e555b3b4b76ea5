// The three products of tiles on the tensor cores, for numbers of 16 bits; included by tiles.cuh.
//
// Results are 64 rows by WIDTH columns in the registers of four warps, 16 rows each: number i of a thread is at
// (row_of<WIDTH>(i), column_of<WIDTH>(i)), as mma.sync lays it out. Scores are float32 in shared memory and are rounded
// to 16 bits when they are an operand.
#pragma once

template <int WIDTH> DEVICE int row_of(int i) { return threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4 + i / 2 % 2 * 8; }
template <int WIDTH> DEVICE int column_of(int i) { return i / 4 * 8 + threadIdx.x % 4 * 2 + i % 2; }

DEVICE void store_tile(float* tile, const float (&sum)[TILE / 2]) {
#pragma unroll
    for (int i = 0; i < TILE / 2; i += 2)
        *(float2*)(tile + row_of<TILE>(i) * PITCH + column_of<TILE>(i)) = {sum[i], sum[i + 1]};
}

// sum[r][c] += sum over d of a[r][d] * b[c][d]
DEVICE void multiply_rows(float (&sum)[TILE / 2], const uint16_t* a, const uint16_t* b) {
    const int pair = threadIdx.x % 4 * 2;
    const uint16_t* a_row = a + row_of<TILE>(0) * ROW_PITCH + pair;
    const uint16_t* b_row = b + threadIdx.x % 32 / 4 * ROW_PITCH + pair;
#pragma unroll
    for (int step = 0; step < CHUNK; step += 16) {
        uint32_t of_a[4];
#pragma unroll
        for (int i = 0; i < 4; i++) of_a[i] = *(const uint32_t*)(a_row + i % 2 * 8 * ROW_PITCH + step + i / 2 * 8);
#pragma unroll
        for (int block = 0; block < TILE / 8; block++) {
            const uint16_t* from = b_row + block * 8 * ROW_PITCH + step;
            const uint32_t of_b[2] = {*(const uint32_t*)from, *(const uint32_t*)(from + 8)};
            multiply<ELEMENT>(sum + 4 * block, of_a, of_b[0], of_b[1]);
        }
    }
}

// The products of operand a, 16 columns of it, with rows `step` to `step + 16` of x.
DEVICE void multiply_step(float (&sum)[CHUNK / 2], const uint32_t (&a)[4], const uint16_t* x, int step) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int block = 0; block < CHUNK / 16; block++) {
        uint32_t of_x[4];
        load_columns(of_x, x + (step + lane % 16) * ROW_PITCH + block * 16 + lane / 16 * 8);
        multiply<ELEMENT>(sum + 8 * block, a, of_x[0], of_x[1]);
        multiply<ELEMENT>(sum + 8 * block + 4, a, of_x[2], of_x[3]);
    }
}

// sum[r][d] += sum over c < COLUMNS of scores[r][c] * x[c][d]; scores are zero from COLUMNS on
template <int COLUMNS> DEVICE void multiply(float (&sum)[CHUNK / 2], const float* scores, const uint16_t* x) {
    const float* row = scores + row_of<CHUNK>(0) * PITCH + threadIdx.x % 4 * 2;
#pragma unroll
    for (int step = 0; step < COLUMNS; step += 16) {
        uint32_t a[4];
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const float2 pair = *(const float2*)(row + i % 2 * 8 * PITCH + step + i / 2 * 8);
            a[i] = pack<ELEMENT>(pair.x, pair.y);
        }
        multiply_step(sum, a, x, step);
    }
}

// sum[c][d] += sum over r < ROWS of scores[r][c] * x[r][d]
template <int ROWS> DEVICE void multiply_transposed(float (&sum)[CHUNK / 2], const float* scores, const uint16_t* x) {
    const int pair = threadIdx.x % 4 * 2;
    const float* column = scores + row_of<CHUNK>(0);
#pragma unroll
    for (int step = 0; step < ROWS; step += 16) {
        uint32_t a[4];
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const int row = step + i / 2 * 8 + pair;
            const float* at = column + row * PITCH + i % 2 * 8;
            a[i] = pack<ELEMENT>(row < ROWS ? at[0] : 0, row + 1 < ROWS ? at[PITCH] : 0);
        }
        multiply_step(sum, a, x, step);
    }
}
