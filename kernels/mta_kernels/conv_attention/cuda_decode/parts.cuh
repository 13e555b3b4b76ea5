// Where a program's part of out goes.
#pragma once
#include "layout.cuh"

// Four numbers of a head's output, which are weighted as their `sum`; zeros for a sequence without tokens.
DEVICE void write_out(uint16_t* out, int number, float sum, const float (&value)[4]) {
    const float inverse = sum == 0 ? 0 : reciprocal_fast(sum);
#pragma unroll
    for (int i = 0; i < 4; i++)
        if (number + i < HEAD_DIM) out[number + i] = from_float<ELEMENT>(value[i] * inverse).bits;
}

// Four numbers of a head of a segment; they and their `sum` are weighted by 2^(score - maximum). To `out` if the program has
// all of the head's keys, else to its part in global memory.
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
    write_out(args.out + (kv_head * args.group + of_group) * HEAD_DIM, number, sum, value);
}

// Whether this program is the last to finish of those that share a segment's head: all have written their parts. The threads
// that `meet` synchronises share the flag.
template <class Meet> DEVICE bool last_to_come(const Arguments& args, const Segment& segment, uint32_t flag, const Meet& meet) {
    if (thread_index() == 0) {
        const int kv_head = segment.sequence * args.lengths.kv_heads + segment.kv_head;
        int* arrived = args.arrived + kv_head * HEAD_BLOCKS + blockIdx.x % HEAD_BLOCKS;
        const bool last = arrive(arrived) == segment.programs - 1;
        if (last) *arrived = 0;
        store_shared(flag, (uint32_t)last);
    }
    meet();
    return load_shared(flag);
}

// A maximum and a sum, and weighted values: four numbers of a head.
struct Part {
    float maximum = MINUS_INFINITY, sum = 0, values[4] = {};

    DEVICE void add(float2 statistic, float4 other) {
        const float larger = fmaxf(maximum, statistic.x), subtracted = larger == MINUS_INFINITY ? 0 : larger;
        const float scale = exp2_fast(maximum - subtracted), of_other = exp2_fast(statistic.x - subtracted);
        const float others[4] = {other.x, other.y, other.z, other.w};
        maximum = larger, sum = sum * scale + statistic.y * of_other;
#pragma unroll
        for (int i = 0; i < 4; i++) values[i] = values[i] * scale + others[i] * of_other;
    }
    // The parts of every STEP'th program that shares a head of `head_block`, from `begin` on, AT_ONCE of them in flight.
    template <int AT_ONCE, int STEP>
    DEVICE void add_programs(const Arguments& args, int first_program, int programs, int head_block, int head, int vector, int begin) {
#pragma unroll 1
        for (int first = begin; first < programs; first += AT_ONCE * STEP) {
            float2 statistics[AT_ONCE];
            float4 numbers[AT_ONCE];
#pragma unroll
            for (int i = 0; i < AT_ONCE; i++) {
                const int other = first + i * STEP;
                const int64_t block = (int64_t)(first_program + other) * HEAD_BLOCKS + head_block;
                const int64_t at = (2 * block + (other == 0)) * ALL_HEADS + head;
                const bool inside = other < programs;
                statistics[i] = inside ? __ldcg(args.statistics + at) : float2{MINUS_INFINITY, 0};
                numbers[i] = {0, 0, 0, 0};
                if (inside) numbers[i] = __ldcg((const float4*)(args.parts + at * DEPTH) + vector);
            }
#pragma unroll
            for (int i = 0; i < AT_ONCE; i++) add(statistics[i], numbers[i]);
        }
    }
};

// Adds up the parts of the programs that share a segment's head, to `out`, by all of THREADS of the last program.
DEVICE void add_parts(const Arguments& args, const Segment& segment) {
    Segment whole = segment;
    whole.programs = 1;
#pragma unroll 1
    for (int i = thread_index(); i < ALL_HEADS * DEPTH / 4; i += THREADS) {
        const int head = i / (DEPTH / 4), number = i % (DEPTH / 4) * 4;
        Part part;
        part.add_programs<3, 1>(args, segment.first_program, segment.programs, blockIdx.x % HEAD_BLOCKS, head, number / 4, 0);
        write_part(args, whole, head, number, part.maximum, part.sum, part.values);
    }
}
