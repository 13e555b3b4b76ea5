// Where a program's part of out goes.
#pragma once
#include "layout.cuh"

// Four numbers of a head of a segment, which are weighted by 2^(score - maximum), as their `sum` is: to `out` if the program
// has all of the head's keys, else to its part in global memory.
DEVICE void write_part(const Arguments& args, const Segment& segment, int head, int number, float maximum, float sum,
                       const float (&value)[4]) {
    if (segment.programs > 1) {
        const bool is_first = blockIdx.x / HEAD_BLOCKS == segment.first_program;
        const int64_t part = (2 * (int64_t)blockIdx.x + is_first) * ALL_HEADS + head;
        *(float4*)(args.parts + part * DEPTH + number) = {value[0], value[1], value[2], value[3]};
        if (number == 0) args.statistics[part] = {maximum, sum};
        return;
    }
    const int64_t kv_head = (int64_t)segment.sequence * args.lengths.kv_heads + segment.kv_head;
    const int of_group = blockIdx.x % HEAD_BLOCKS * ALL_HEADS + head;
    if (of_group >= args.group) return;
    uint16_t* out = args.out + (kv_head * args.group + of_group) * HEAD_DIM;
    const float inverse = sum == 0 ? 0 : reciprocal_fast(sum);  // zeros for a sequence without tokens
#pragma unroll
    for (int j = 0; j < 4; j++)
        if (number + j < HEAD_DIM) out[number + j] = from_float<ELEMENT>(value[j] * inverse).bits;
}
