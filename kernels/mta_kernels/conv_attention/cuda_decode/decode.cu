// Conv attention of one new query a sequence, from the KV cache, for sm_80 and later: one read of K and V.
//
// With one query the query taps fold into it (factor = scale * log2(e); all scores are in powers of two):
//   folded[b] = factor * sum over a of weight[a, b] q_window[a]      a few vectors a head, made once
//   r[b, y]   = folded[b] . k[y]                                    tensor cores
//   c[j]      = sum over b of r[b, j - PAD + b]                     along the diagonals of r
//   out       = sum over j of 2^(c[j] - max) v[j] / sum over j of 2^(c[j] - max)
// The newest QUERY_TAPS - 1 keys are not seen by all queries of the window. Their columns of r are computed apart, from
// the queries that see them, and put over those of the tensor cores: no other key knows of the mask.
//
// A program takes a run of the keys (work.cuh), each of its warps a part of them, as a stream of its own: tiles of KEYS
// keys come by cp.async into STAGES buffers. A tile has the columns y of r, and the values of the scores that these
// complete, which end KEY_TAPS - 1 - PAD keys earlier; what a column adds to later scores is carried on in registers.
// All query heads of a KV head share the read: up to eight at a time (HEADS), so often as it takes (PASSES); where they
// do not fit, HEAD_BLOCKS programs read the same keys side by side. Both products have keys or dimensions as rows, and
// taps or heads as columns, of which tensor cores take eight at a time:
//   r^T [keys x taps] = k folded^T,   out^T [dimensions x heads] = v^T p^T
// At the end warps add up in shared memory, and programs that share a head through global memory: each writes its part,
// and the last to come adds them up, and sets the count of those that came to zero for the next call.
//
// K and V are read once, at the speed of memory, if a warp's tile takes no longer to multiply than to come: at 4.3 TB/s
// and 132 SMs of four warps each 3500 cycles at HEAD_DIM 128, or of eight at 64. It issues about 640 and 470 instructions
// with one head (1200 with eight at 128), one after the other for most of its way. What comes on top is fixed: reading
// the lengths and dividing the keys before the first copy, and the sum over programs after the last.
//
// Constants come from the compiler's command line: ELEMENT Half or Bfloat16; HEAD_DIM up to 256; HEADS, PASSES;
// HEAD_BLOCKS; QUERY_TAPS, KEY_TAPS, PAD; PAGED; ALIGNED, whether rows are in chunks of 16 bytes (else loads are of one
// number, and slow); WARPS, STAGES; SHARED_BYTES, as plan.py counts them, which chooses all these.
#include "fold.cuh"
#include "merge.cuh"

// r of one tile and pass to shared memory, [rows x keys] at R_PITCH.
template <class Queries> DEVICE void multiply_keys(int lane, uint32_t keys, uint32_t r, Queries queries) {
    const uint32_t key_row = keys + (lane % 16) * PITCH + lane / 16 * 16;
    const uint32_t r_at = r + lane % 4 * 2 * R_PITCH + lane / 4 * 4;
#pragma unroll
    for (int first = 0; first < ROW_PAIRS; first += PAIRS_AT_ONCE) {
        float sums[PAIRS_AT_ONCE][2][2][4] = {};
#pragma unroll
        for (int step = 0; step < DEPTH / 16; step++) {
            uint32_t a[2][4];
            load_matrices(a[0], key_row + step * 32);
            load_matrices(a[1], key_row + step * 32 + 16 * PITCH);
#pragma unroll
            for (int pair = 0; pair < PAIRS_AT_ONCE && first + pair < ROW_PAIRS; pair++) {
                uint32_t b[4];
                queries(b, first + pair, step);
#pragma unroll
                for (int i = 0; i < 2; i++) {
                    multiply<ELEMENT>(sums[pair][0][i], a[i], b[0], b[1]);
                    if (2 * (first + pair) + 1 < ROW_TILES) multiply<ELEMENT>(sums[pair][1][i], a[i], b[2], b[3]);
                }
            }
        }
#pragma unroll
        for (int pair = 0; pair < PAIRS_AT_ONCE && first + pair < ROW_PAIRS; pair++)
#pragma unroll
            for (int n = 0; n < 2 && 2 * (first + pair) + n < ROW_TILES; n++)
#pragma unroll
                for (int i = 0; i < 8; i++) {
                    const int row = (2 * (first + pair) + n) * 8 + i % 2;
                    store_shared(r_at + row * R_PITCH + i / 2 * 32, sums[pair][n][i / 4][i % 4]);
                }
    }
}

// What a warp has of one segment. A lane has the scores of one head, so its running maximum and sum too; `carried` is
// what the columns so far add to the next tile's first scores. Of `out` it has dimensions lane / 4, and 8 more, of
// every 16, and heads 2 (lane % 4) and the next.
struct Sums {
    float out[PASSES][DEPTH / 16][4];
    float carried[PASSES][CARRIES + 1], maximum[PASSES], sum[PASSES];

    DEVICE void clear() {
#pragma unroll
        for (int pass = 0; pass < PASSES; pass++) {
            maximum[pass] = MINUS_INFINITY, sum[pass] = 0;
#pragma unroll
            for (int i = 0; i < CARRIES; i++) carried[pass][i] = 0;
#pragma unroll
            for (int i = 0; i < DEPTH / 4; i++) out[pass][i / 4][i % 4] = 0;
        }
    }
};

// The scores of this lane's head that the columns of r complete, x = lane % LANES + LANES i of KEYS.
DEVICE void add_diagonals(int lane, uint32_t r, float (&carried)[CARRIES + 1], float (&scores)[KEYS_A_LANE]) {
    const int head = min(lane / LANES, HEADS - 1);  // lanes too many repeat the last head
#pragma unroll
    for (int i = 0; i < KEYS_A_LANE; i++) {
        float now = i < CARRIES ? carried[i] : 0, next = 0;
#pragma unroll
        for (int tap = 0; tap < KEY_TAPS; tap++) {
            const int column = lane % LANES + LANES * i - (KEY_TAPS - 1) + tap;
            const float value = load_shared_float(r + (head * KEY_TAPS + tap) * R_PITCH + (column & KEYS - 1) * 4);
            if (i >= CARRIES || column >= 0) now += value;
            else next += value;
        }
        if (i < CARRIES) carried[i] = next;
        scores[i] = now;
    }
}

// The online softmax of one pass: probabilities to shared memory, [heads x keys] at P_PITCH; `out` rescaled if it must.
DEVICE void online_softmax(int lane, const float (&scores)[KEYS_A_LANE], uint32_t probabilities, float& running_maximum,
                           float& sum, float (&out)[DEPTH / 16][4]) {
    const int head = min(lane / LANES, HEADS - 1);
    float maximum = running_maximum;
#pragma unroll
    for (int i = 0; i < KEYS_A_LANE; i++) maximum = fmaxf(maximum, scores[i]);
#pragma unroll
    for (int other = 1; other < LANES; other *= 2) maximum = fmaxf(maximum, __shfl_xor_sync(~0u, maximum, other));
    const float rescale = exp2_fast(running_maximum - finite(maximum));
    running_maximum = maximum;
    sum *= rescale;
#pragma unroll
    for (int i = 0; i < KEYS_A_LANE; i++) {
        const float p = exp2_fast(scores[i] - finite(maximum));
        sum += p;
        store_shared(probabilities + head * P_PITCH + (lane % LANES + LANES * i) * 2, from_float<ELEMENT>(p).bits);
    }
    if (__any_sync(~0u, rescale != 1)) {
        const float first = __shfl_sync(~0u, rescale, lane % 4 * 2 * LANES % 32);
        const float second = __shfl_sync(~0u, rescale, (lane % 4 * 2 + 1) * LANES % 32);
#pragma unroll
        for (int i = 0; i < DEPTH / 4; i++) out[i / 4][i % 4] *= i % 2 ? second : first;
    }
}

// out^T += v^T p^T of one tile and pass.
DEVICE void add_values(int lane, uint32_t values, uint32_t probabilities, float (&out)[DEPTH / 16][4]) {
    const uint32_t value_row = values + (lane / 16 * 8 + lane % 8) * PITCH + lane / 8 % 2 * 16;
    uint32_t p[4];
    load_matrices(p, probabilities + lane % 8 * P_PITCH + lane / 8 * 16);
#pragma unroll
    for (int step = 0; step < DEPTH / 16; step++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            uint32_t a[4];
            load_matrices_transposed(a, value_row + half * 16 * PITCH + step * 32);
            multiply<ELEMENT>(out[step], a, p[2 * half], p[2 * half + 1]);
        }
}

// The newest keys' columns of r over those of the tensor cores.
DEVICE void put_newest(int lane, uint32_t r, uint32_t newest, int length, int first_column) {
    for (int i = lane; i < ROWS * NEWEST; i += 32) {
        const int column = length - 1 - i % COLUMNS - first_column;
        if (column >= 0 && column < KEYS)
            store_shared(r + i / COLUMNS * R_PITCH + column * 4, load_shared_float(newest + i * 4));
    }
}

// A segment's keys, by all warps.
DEVICE void attend(const Arguments& args, Stream& stream, uint32_t shared, Sums& sums) {
    const int warp = thread_index() / 32, lane = thread_index() % 32;
    const uint32_t ring = shared + warp * RING, r = shared + SCRATCH_AT + warp * SCRATCH;
    const uint32_t probabilities = r + PROBABILITIES;
    const uint32_t query_row = shared + FOLDED_AT + (lane / 16 * 8 + lane % 8) * PITCH + lane / 8 % 2 * 16;
    uint32_t queries[IN_REGISTERS ? PASSES : 1][IN_REGISTERS ? ROW_PAIRS : 1][IN_REGISTERS ? DEPTH / 16 : 1][4];
    if (IN_REGISTERS) {
#pragma unroll
        for (int i = 0; i < PASSES * ROW_PAIRS * (DEPTH / 16); i++) {
            const int step = i % (DEPTH / 16), pair = i / (DEPTH / 16) % ROW_PAIRS, pass = i / (DEPTH / 16) / ROW_PAIRS;
            load_matrices(queries[pass][pair][step], query_row + pass * FOLDED + pair * 16 * PITCH + step * 32);
        }
    }
    sums.clear();
#pragma unroll 1
    for (int tile = 0; tile < stream.tiles; tile++) {
        stream.load(args, lane, ring, tile + STAGES - 1);
        copies_wait<STAGES - 1>();
        __syncwarp();
        const uint32_t stage = ring + tile % STAGES * STAGE;
        const int first_column = stream.first_column(tile), first_score = stream.first_score(tile);
#pragma unroll
        for (int pass = 0; pass < PASSES; pass++) {
            multiply_keys(lane, stage, r, [&](uint32_t(&b)[4], int pair, int step) {
                const auto& held = queries[IN_REGISTERS ? pass : 0][IN_REGISTERS ? pair : 0][IN_REGISTERS ? step : 0];
                if (IN_REGISTERS) b[0] = held[0], b[1] = held[1], b[2] = held[2], b[3] = held[3];
                else load_matrices(b, query_row + pass * FOLDED + pair * 16 * PITCH + step * 32);
            });
            if (first_column + KEYS > stream.cache.length - NEWEST) {
                __syncwarp();
                put_newest(lane, r, shared + NEWEST_AT + pass * ROWS * NEWEST * 4, stream.cache.length, first_column);
            }
            __syncwarp();
            float scores[KEYS_A_LANE];
            add_diagonals(lane, r, sums.carried[pass], scores);
#pragma unroll
            for (int i = 0; i < KEYS_A_LANE; i++) {
                const int key = first_score + lane % LANES + LANES * i;
                if (key < stream.start || key >= stream.stop) scores[i] = MINUS_INFINITY;
            }
            online_softmax(lane, scores, probabilities, sums.maximum[pass], sums.sum[pass], sums.out[pass]);
            __syncwarp();
            add_values(lane, stage + TILE, probabilities, sums.out[pass]);
        }
        __syncwarp();
    }
}

// Adds up the warps' sums of a segment, and the programs' if this is the last of those that share the head.
DEVICE void finish(const Arguments& args, const Segment& segment, uint32_t shared, Sums& sums) {
    const int warp = thread_index() / 32, lane = thread_index() % 32;
    const uint32_t scratch = shared + SCRATCH_AT + warp * SCRATCH;
    const int program = blockIdx.x / HEAD_BLOCKS, first_head = blockIdx.x % HEAD_BLOCKS * ALL_HEADS;
    const int first_program = segment.first_program, programs = segment.programs;
    const int kv_head = segment.sequence * args.lengths.kv_heads + segment.kv_head;
    const int heads = args.group - first_head;
    uint16_t* out = args.out + ((int64_t)kv_head * args.group + first_head) * HEAD_DIM;
    const int64_t part = (2 * (int64_t)blockIdx.x + (program == first_program)) * ALL_HEADS;
#pragma unroll
    for (int pass = 0; pass < PASSES; pass++) {
        float sum = sums.sum[pass];
#pragma unroll
        for (int other = 1; other < LANES; other *= 2) sum += __shfl_xor_sync(~0u, sum, other);
        if (lane % LANES == 0 && lane / LANES < HEADS)
            set_statistic(shared, warp, lane / LANES, sums.maximum[pass], sum);
#pragma unroll
        for (int i = 0; i < DEPTH / 4; i++) {
            const int number = i / 4 * 16 + i / 2 % 2 * 8 + lane / 4, head = lane % 4 * 2 + i % 2;
            if (head < HEADS) store_shared(scratch + (head * DEPTH + number) * 4, sums.out[pass][i / 4][i % 4]);
        }
        const int64_t first = part + pass * HEADS;
        add_warps(shared, heads - pass * HEADS, out + pass * HEADS * HEAD_DIM,
                  programs == 1 ? nullptr : args.parts + first * DEPTH, args.statistics + first);
    }
    int* arrived = args.arrived + kv_head * HEAD_BLOCKS + blockIdx.x % HEAD_BLOCKS;
    if (programs == 1 || !last_to_come(shared, arrived, programs)) return;
#pragma unroll 1
    for (int pass = 0; pass < PASSES; pass++) {
        add_programs(args, shared, pass, first_program, programs);
        add_warps(shared, heads - pass * HEADS, out + pass * HEADS * HEAD_DIM, nullptr, nullptr);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    cuda_decode(const __grid_constant__ Arguments args) {
    const uint32_t shared = shared_memory();
    const int first_head = blockIdx.x % HEAD_BLOCKS * ALL_HEADS;
    Work work;
    if (!work.begin(args.lengths, blockIdx.x / HEAD_BLOCKS, args.programs, args.splits)) return;
    Segment done;
    Sums sums;
    Stream stream;
    for (bool first = true, more = true;; first = false) {
        // A head's first keys are on their way while the head before it is finished.
        Segment segment = work.segment;
        Window window;
        if (more) {
            Cache cache;
            cache.open(args, segment);
            window.load(args, segment, cache, first_head);
            stream.begin(args, segment, cache, shared);
        }
        if (!first) finish(args, done, shared, sums);
        if (!more) return;
#pragma unroll
        for (int pass = 0; pass < PASSES; pass++) {
            if (pass) window.load(args, segment, stream.cache, first_head + pass * HEADS);
            window.store(args, segment, stream.cache, first_head + pass * HEADS, shared + SCRATCH_AT);
            __syncthreads();
            fold(args, segment, shared + SCRATCH_AT, shared + FOLDED_AT + pass * FOLDED,
                 shared + NEWEST_AT + pass * ROWS * NEWEST * 4);
            __syncthreads();
        }
        work.count_sharers(segment);
        attend(args, stream, shared, sums);
        done = segment;
        more = work.advance();
    }
}
