// A CPU's twin of mta_kernels/conv_attention/hopper/device.cuh: the same functions, so that a kernel runs without a GPU.
//
// Every CUDA thread is a fiber of one CPU thread, and fibers take turns in a random order (seeded). What a GPU does
// asynchronously happens at a random moment that the kernel's waits allow: copies between issue and the end of their
// barrier's phase, products between commit and wait. A missing wait or barrier thus shows as a wrong result for some
// seed, and a missing arrival as a deadlock, which is reported. Blocks begin in order, each as one before it ends; as many
// run at once as `launch` is told. Proxy fences and the timing of a real GPU are not modelled.
#pragma once
#include <setjmp.h>
#include <ucontext.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <vector>

#define __device__
#define __global__
#define __forceinline__ inline
#define __grid_constant__
#define DEVICE inline
#define MAXIMUM_THREADS(threads)

using std::max;
using std::min;

struct uint4 {
    uint32_t x, y, z, w;
};
struct alignas(8) float2 {
    float x, y;
};
struct Index {
    int x, y, z;
};

struct alignas(64) TensorMap {  // a box of 64 numbers of 16 bits by 64 rows
    const char* base;
    int64_t extent[4], stride[4];  // numbers, and bytes; x is the innermost
    int64_t row_step;                // of the 64 rows, every so many-th
    char unused[128 - 80];
};
static_assert(sizeof(TensorMap) == 128, "as CUtensorMap");

namespace emulator {

constexpr int STACK_BYTES = 64 * 1024, MOST_THREADS = 2048;
constexpr uint32_t SHARED_START = 1024;

struct Fiber {
    ucontext_t start;
    jmp_buf resume;
    bool started = false;
    int thread;
    bool done = false;
    std::vector<std::function<void()>> issued;              // products not committed yet
    std::deque<std::vector<std::function<void()>>> groups;  // committed, not executed
    int pending = 0;                                        // committed, not waited for
};
struct Rendezvous {
    int arrived = 0;
    long generation = 0;
};
struct Barrier {  // an mbarrier
    int expected = 0, arrivals = 0;
    long bytes = 0, phases = 0;
};

struct Block {
    Index index;
    int place;              // of its stacks
    std::vector<int> order;  // of its threads
    int slow = 0;            // the warpgroup that hardly runs
    bool idle = false;       // none of its threads could go on
    std::vector<Fiber> fibers;
    std::vector<char> shared;
    std::map<std::pair<int, uint32_t>, Rendezvous> rendezvous;
    std::map<uint32_t, Barrier> barriers;
    std::vector<std::function<void()>> copies;
    uint32_t exchange[64][32], fragments[64][32][4];
};

inline Block* block;
inline Fiber* self;
inline jmp_buf scheduler;
inline Index block_index, block_size;
inline std::mt19937 random_bits;
inline long progress;
inline std::string failure;

// Fibers switch by longjmp, which unlike swapcontext makes no system call.
inline void yield() {
    if (!_setjmp(self->resume)) _longjmp(scheduler, 1);
}
inline void resume(Fiber& fiber) {
    self = &fiber;
    if (_setjmp(scheduler)) return;
    if (fiber.started) _longjmp(fiber.resume, 1);
    fiber.started = true;
    setcontext(&fiber.start);
}
template <class Condition> void wait_until(Condition condition) {
    while (!condition()) yield();
    progress++;
}
inline void meet(int kind, uint32_t id, int threads) {
    Rendezvous& point = block->rendezvous[{kind, id}];
    const long generation = point.generation;
    progress++;
    if (++point.arrived == threads) {
        point.arrived = 0;
        point.generation++;
    } else {
        wait_until([&] { return point.generation != generation; });
    }
}
inline void arrive(int kind, uint32_t id, int threads) {  // without waiting for the others
    Rendezvous& point = block->rendezvous[{kind, id}];
    progress++;
    if (++point.arrived == threads) point.arrived = 0, point.generation++;
}
inline void complete(Barrier& barrier) {
    if (barrier.arrivals == barrier.expected && barrier.bytes == 0) barrier.arrivals = 0, barrier.phases++;
    progress++;
}
inline char* shared_at(uint32_t address, int bytes) {
    static char elsewhere[8];
    if (address < SHARED_START || address + bytes > SHARED_START + block->shared.size()) {
        failure = "shared address " + std::to_string(address) + " is outside the block's memory";
        return elsewhere;
    }
    return block->shared.data() + address - SHARED_START;
}
inline bool coin() { return random_bits() & 1; }

inline std::function<void()>* body;
inline void run_fiber() {
    (*body)();
    self->done = true;
    progress++;
    yield();
}

// Run one kernel, `at_once` blocks at a time; returns "" or what went wrong.
inline const char* launch(int grid_x, int grid_y, int threads, int shared_bytes, uint32_t seed,
                          std::function<void()> kernel, int at_once = 1) {
    static const std::unique_ptr<char[]> stacks(new char[(size_t)MOST_THREADS * STACK_BYTES]);
    failure.clear();
    random_bits.seed(seed);
    const bool late_copies = seed % 2;  // only once no thread of the block can go on without one
    const bool uneven = seed / 2 % 2;   // some warpgroup, and some block, hardly runs while another can
    body = &kernel;
    block_size = {threads, 1, 1};
    std::vector<std::unique_ptr<Block>> running;
    std::vector<int> places;
    for (int i = 0; i < at_once; i++) places.push_back(i);
    auto begin = [&](Index index) {
        running.push_back(std::make_unique<Block>());
        Block& one = *running.back();
        one.index = index, one.place = places.back();
        places.pop_back();
        one.shared.assign(shared_bytes, (char)0xFF);  // NaN in every format
        one.fibers.resize(threads);
        for (int i = 0; i < threads; i++) {
            Fiber& fiber = one.fibers[i];
            fiber.thread = i;
            getcontext(&fiber.start);
            fiber.start.uc_stack.ss_sp = stacks.get() + (size_t)(one.place * threads + i) * STACK_BYTES;
            fiber.start.uc_stack.ss_size = STACK_BYTES;
            fiber.start.uc_link = nullptr;
            makecontext(&fiber.start, run_fiber, 0);
            one.order.push_back(i);
        }
    };
    auto take_turns = [&](Block& one) {  // whether all of its threads are done
        block = &one, block_index = one.index;
        const long before = progress;
        if (random_bits() % 32 == 0) std::shuffle(one.order.begin(), one.order.end(), random_bits);
        bool all_done = true;
        if (uneven && random_bits() % 1024 == 0) one.slow = random_bits() % (threads / 128 + 1);
        for (int i : one.order) {
            if (one.fibers[i].done) continue;
            all_done = false;
            if (uneven && i / 128 == one.slow && !one.idle && random_bits() % 64) continue;
            resume(one.fibers[i]);
        }
        while (!one.copies.empty() && ((coin() && !late_copies) || progress == before)) {
            const size_t which = random_bits() % one.copies.size();
            auto copy = one.copies[which];
            one.copies.erase(one.copies.begin() + which);
            copy();
        }
        one.idle = progress == before;
        return all_done;
    };
    const int blocks = grid_x * grid_y;
    int begun = 0, idle = 0;
    size_t slow = 0;
    while (begun < blocks || !running.empty()) {
        while (begun < blocks && (int)running.size() < at_once) begin({begun % grid_x, begun / grid_x, 0}), begun++;
        const long before = progress;
        if (uneven && at_once > 1 && random_bits() % 256 == 0) slow = random_bits() % (at_once + 1);
        for (size_t i = 0; i < running.size(); i++) {
            if (uneven && at_once > 1 && i == slow && idle == 0 && random_bits() % 64) continue;
            if (!take_turns(*running[i])) continue;
            if (!running[i]->copies.empty()) failure = "a block ended before its copies";
            places.push_back(running[i]->place);
            running.erase(running.begin() + i--);
            progress++;
        }
        idle = progress == before ? idle + 1 : 0;
        if (idle > 3) {
            const Index& first = running[0]->index;
            failure = "deadlock in block " + std::to_string(first.x) + ", " + std::to_string(first.y);
        }
        if (!failure.empty()) break;
    }
    return failure.c_str();
}

}  // namespace emulator

#define threadIdx (Index{emulator::self->thread, 0, 0})
#define blockIdx (emulator::block_index)
#define blockDim (emulator::block_size)

inline void __syncthreads() { emulator::meet(0, 0, emulator::block_size.x); }

template <class T> T exchange(uint32_t mask, T value, int from) {
    const int warp = emulator::self->thread / 32, lane = emulator::self->thread % 32;
    std::memcpy(&emulator::block->exchange[warp][lane], &value, 4);
    const int threads = __builtin_popcount(mask);
    emulator::meet(1 + warp, mask, threads);
    T found;
    std::memcpy(&found, &emulator::block->exchange[warp][from], 4);
    emulator::meet(1 + warp, mask, threads);
    return found;
}
template <class T> T __shfl_sync(uint32_t mask, T value, int from) { return exchange(mask, value, from); }
template <class T> T __shfl_xor_sync(uint32_t mask, T value, int other) {
    return exchange(mask, value, (emulator::self->thread % 32) ^ other);
}
inline int __any_sync(uint32_t mask, int predicate) {
    int any = predicate != 0;
    for (int lane = 1; lane < 32; lane *= 2) any |= __shfl_xor_sync(mask, any, lane);
    return any;
}
inline uint32_t __float_as_uint(float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    return bits;
}
inline float __uint_as_float(uint32_t bits) {
    float x;
    std::memcpy(&x, &bits, 4);
    return x;
}

struct Half {};
struct Bfloat16 {};

template <class Element> float unpack(uint16_t bits);
template <> inline float unpack<Half>(uint16_t bits) {
    _Float16 value;
    std::memcpy(&value, &bits, 2);
    return (float)value;
}
template <> inline float unpack<Bfloat16>(uint16_t bits) { return __uint_as_float((uint32_t)bits << 16); }

template <class Element> uint16_t round_to(float x);
template <> inline uint16_t round_to<Half>(float x) {
    const _Float16 value = (_Float16)x;
    uint16_t bits;
    std::memcpy(&bits, &value, 2);
    return bits;
}
template <> inline uint16_t round_to<Bfloat16>(float x) {
    const uint32_t bits = __float_as_uint(x);
    return std::isnan(x) ? 0x7FFF : (bits + 0x7FFF + (bits >> 16 & 1)) >> 16;
}
template <class Element> uint32_t pack(float low, float high) {
    return (uint32_t)round_to<Element>(high) << 16 | round_to<Element>(low);
}

inline float exp2_fast(float x) {
    const float y = std::exp2(x);
    return y < 1.17549435e-38f ? 0 : y;  // ftz
}

inline uint32_t shared_memory() { return emulator::SHARED_START; }
inline void store_shared(uint32_t address, uint32_t value) { std::memcpy(emulator::shared_at(address, 4), &value, 4); }
inline uint32_t load_shared(uint32_t address) {
    uint32_t value;
    std::memcpy(&value, emulator::shared_at(address, 4), 4);
    return value;
}
inline void store_shared(uint32_t address, uint4 values) { std::memcpy(emulator::shared_at(address, 16), &values, 16); }
inline uint4 load_shared_16(uint32_t address) {
    uint4 values;
    std::memcpy(&values, emulator::shared_at(address, 16), 16);
    return values;
}
namespace emulator {
// What each of a warp's lanes gives, seen by all of them.
inline std::array<uint32_t, 32> together(uint32_t value) {
    const int warp = self->thread / 32;
    block->exchange[warp][self->thread % 32] = value;
    meet(200 + warp, 0, 32);
    std::array<uint32_t, 32> values;
    std::copy(block->exchange[warp], block->exchange[warp] + 32, values.begin());
    meet(200 + warp, 0, 32);
    return values;
}
}  // namespace emulator
inline void store_matrices(uint32_t address, const uint32_t (&values)[4]) {
    const auto rows = emulator::together(address);
    const int lane = emulator::self->thread % 32;
    for (int m = 0; m < 4; m++) std::memcpy(emulator::shared_at(rows[8 * m + lane / 4] + lane % 4 * 4, 4), &values[m], 4);
}
inline void load_matrices(uint32_t (&values)[4], uint32_t address) {
    const auto rows = emulator::together(address);
    const int lane = emulator::self->thread % 32;
    for (int m = 0; m < 4; m++) std::memcpy(&values[m], emulator::shared_at(rows[8 * m + lane / 4] + lane % 4 * 4, 4), 4);
}
inline uint32_t transposed(uint32_t pair) {
    const auto pairs = emulator::together(pair);
    const int lane = emulator::self->thread % 32, row = lane / 4, column = lane % 4 * 2;  // of the result
    const auto number = [&](int from) { return pairs[from * 4 + row / 2] >> row % 2 * 16 & 0xFFFF; };
    return number(column + 1) << 16 | number(column);
}
template <int OfFirst, int OfSecond> uint32_t halves(uint32_t first, uint32_t second) {
    return (second >> 16 * OfSecond & 0xFFFF) << 16 | (first >> 16 * OfFirst & 0xFFFF);
}
inline void fence_async_proxy() {}
inline void fence_async_proxy_everywhere() {}

inline void wait_for_turn(int warpgroup) { emulator::meet(102, warpgroup, 256); }
inline void pass_turn(int warpgroup) { emulator::arrive(102, warpgroup, 256); }
inline void warpgroup_barrier(int id) { emulator::meet(100, id, 128); }
template <int Threads> void part_barrier() { emulator::meet(104, 0, Threads); }
inline int take_next(int* taken) { return (*taken)++; }
inline void count_up(int* counter) { ++*counter; }
inline void wait_for_count(const int* counter, int count) {
    emulator::wait_until([=] { return *counter >= count; });
}
template <int Registers> void give_registers() {}
template <int Registers> void take_registers() {}

inline void barrier_init(uint32_t barrier, int arrivals) { emulator::block->barriers[barrier] = {arrivals}; }
inline void barrier_init_done() {}
inline void barrier_arrive(uint32_t barrier) {
    emulator::Barrier& state = emulator::block->barriers.at(barrier);
    state.arrivals++;
    emulator::complete(state);
}
inline void barrier_expect(uint32_t barrier, int bytes) {
    emulator::block->barriers.at(barrier).bytes += bytes;
    barrier_arrive(barrier);
}
inline void barrier_wait(uint32_t barrier, int parity) {
    emulator::Barrier& state = emulator::block->barriers.at(barrier);
    emulator::wait_until([&] { return (state.phases & 1) != parity; });
}
inline void barrier_wait_asleep(uint32_t barrier, int parity) { barrier_wait(barrier, parity); }

inline uint32_t swizzled(uint32_t address) { return address ^ (address >> 7 & 7) << 4; }

inline void copy_tile(uint32_t destination, const TensorMap* map, uint32_t barrier, int x, int y, int z, int w) {
    emulator::block->copies.push_back([=] {
        for (int row = 0; row < 64 / map->row_step; row++)
            for (int column = 0; column < 64; column++) {
                const int64_t at[4] = {x + column, y + row * map->row_step, z, w};
                uint16_t number = 0;
                bool inside = true;
                int64_t offset = 0;
                for (int i = 0; i < 4; i++) inside &= at[i] >= 0 && at[i] < map->extent[i], offset += at[i] * map->stride[i];
                if (inside) std::memcpy(&number, map->base + offset, 2);
                std::memcpy(emulator::shared_at(swizzled(destination + row * 128 + column * 2), 2), &number, 2);
            }
        emulator::Barrier& state = emulator::block->barriers.at(barrier);
        state.bytes -= 64 / map->row_step * 128;
        emulator::complete(state);
    });
    emulator::progress++;
}

inline void copy_bytes(uint32_t destination, const void* source, int bytes, uint32_t barrier) {
    emulator::block->copies.push_back([=] {
        std::memcpy(emulator::shared_at(destination, bytes), source, bytes);
        emulator::Barrier& state = emulator::block->barriers.at(barrier);
        state.bytes -= bytes;
        emulator::complete(state);
    });
    emulator::progress++;
}

#define MINUS_INFINITY __uint_as_float(0xFF800000u)

constexpr uint64_t NO_SWIZZLE = 0, SWIZZLE_128 = 1;
inline uint64_t operand(uint32_t address, uint32_t leading_bytes, uint32_t stride_bytes, uint64_t swizzle) {
    return (uint64_t)((address & 0x3FFFF) >> 4) | (uint64_t)(leading_bytes >> 4) << 16 |
           (uint64_t)(stride_bytes >> 4) << 32 | swizzle << 62;
}
inline uint64_t moved(uint64_t operand, int bytes) { return operand + (bytes >> 4); }
constexpr uint64_t bytes_on(int bytes) { return (uint64_t)(int64_t)(bytes >> 4); }

namespace emulator {

inline uint16_t number_at(uint32_t address, uint64_t operand) {
    uint16_t bits;
    std::memcpy(&bits, shared_at(operand >> 62 ? swizzled(address) : address, 2), 2);
    return bits;
}
inline uint32_t start_of(uint64_t operand) { return (operand & 0x3FFF) << 4; }
inline uint32_t leading(uint64_t operand) { return (operand >> 16 & 0x3FFF) << 4; }
inline uint32_t stride(uint64_t operand) { return (operand >> 32 & 0x3FFF) << 4; }

// Number `k` of row (of A) or column (of B) `i`, where k runs along memory.
inline uint16_t k_major(uint64_t operand, int i, int k) {
    const uint32_t along = operand >> 62 ? k * 2 : k / 8 * leading(operand) + k % 8 * 2;
    const uint32_t pitch = operand >> 62 ? 128 : 16;
    return number_at(start_of(operand) + i / 8 * stride(operand) + i % 8 * pitch + along, operand);
}
// The same of B where its columns run along memory (128-byte swizzle).
inline uint16_t column_major(uint64_t operand, int column, int k) {
    return number_at(start_of(operand) + column / 64 * leading(operand) + k / 8 * stride(operand) + k % 8 * 128 +
                         column % 64 * 2, operand);
}

// Number `k` of row (of A) or column (of B) `i`, where i runs along memory, without a swizzle in 8 x 8 tiles.
inline uint16_t i_major(uint64_t operand, int i, int k) {
    if (operand >> 62) return column_major(operand, i, k);
    return number_at(start_of(operand) + i / 8 * stride(operand) + k / 8 * leading(operand) + k % 8 * 16 + i % 8 * 2, operand);
}

}  // namespace emulator

inline void products_begin() {}
inline void products_commit() {
    emulator::Fiber& fiber = *emulator::self;
    fiber.groups.push_back(std::move(fiber.issued));
    fiber.issued.clear();
    if (emulator::coin()) {
        for (auto& group : fiber.groups)
            for (auto& product : group) product();
        for (auto& group : fiber.groups) group.clear();
    }
}
template <int Pending> void products_wait() {
    emulator::Fiber& fiber = *emulator::self;
    while ((int)fiber.groups.size() > Pending) {
        for (auto& product : fiber.groups.front()) product();
        fiber.groups.pop_front();
    }
    emulator::meet(101, fiber.thread / 128, 128);  // a group completes for the whole warpgroup
}

template <int Accumulators, class Element> struct Product {
    static int column(int thread, int i) { return i / 4 * 8 + thread % 4 * 2 + i % 2; }

    static void run(float (&accumulator)[Accumulators], uint64_t a, uint64_t b, bool accumulate) {
        float* into = accumulator;
        const int thread = emulator::self->thread % 128;
        emulator::self->issued.push_back([=] {
            float rows[2][16];
            for (int h = 0; h < 2; h++)
                for (int k = 0; k < 16; k++)
                    rows[h][k] = unpack<Element>(emulator::k_major(a, thread / 32 * 16 + thread % 32 / 4 + 8 * h, k));
            for (int i = 0; i < Accumulators; i++) {
                float sum = accumulate ? into[i] : 0;
                for (int k = 0; k < 16; k++)
                    sum += rows[i / 2 % 2][k] * unpack<Element>(emulator::k_major(b, column(thread, i), k));
                into[i] = sum;
            }
        });
    }
    static void run_transposed(float (&accumulator)[Accumulators], uint64_t a, uint64_t b) {
        float* into = accumulator;
        const int thread = emulator::self->thread % 128;
        emulator::self->issued.push_back([=] {
            for (int i = 0; i < Accumulators; i++) {
                const int row = thread / 32 * 16 + thread % 32 / 4 + i / 2 % 2 * 8;
                float sum = into[i];
                for (int k = 0; k < 16; k++)
                    sum += unpack<Element>(emulator::i_major(a, row, k)) *
                           unpack<Element>(emulator::i_major(b, column(thread, i), k));
                into[i] = sum;
            }
        });
    }
    static void run_registers(float (&accumulator)[Accumulators], const uint32_t* a, uint64_t b) {
        issue_held(accumulator, held_rows(a), b, true, emulator::column_major);
    }
    static void run_fragments(float (&accumulator)[Accumulators], const uint32_t (&a)[4], uint64_t b, bool accumulate) {
        issue_held(accumulator, held_rows(a), b, accumulate, emulator::k_major);
    }
    // A sparse, 32 deep: a thread's numbers are those of `held_rows`, two of each four columns. Lane 4 i of four that have a row
    // says where those of columns 0 to 15 are, the next one those of the others; in the lower half of `pattern` of row i,
    // in the upper of row i + 8.
    static void run_sparse(float (&accumulator)[Accumulators], const uint32_t (&a)[4], uint32_t pattern, uint64_t b,
                           bool accumulate) {
        const auto stored = held_rows(a);
        const auto patterns = emulator::together(pattern);
        const int first = emulator::self->thread % 32 / 4 * 4;
        std::vector<float> rows(64);
        for (int h = 0; h < 2; h++)
            for (int k = 0; k < 16; k++) {
                const int place = patterns[first + k / 8] >> (16 * h + k % 8 * 2) & 3;
                if (k % 2 && place <= (int)(patterns[first + k / 8] >> (16 * h + k % 8 * 2 - 2) & 3))
                    emulator::failure = "places of a sparse row are out of order";
                rows[h * 32 + k / 2 * 4 + place] = stored[h * 16 + k];
            }
        issue_held(accumulator, rows, b, accumulate, emulator::k_major);
    }

  private:
    // A in registers: a thread holds columns 2 (lane % 4) + e + 8 j of its two rows in a[h + 2 j]; the rest is with its
    // neighbours. Registers may not change until the wait, so reading them now is what any kernel must allow.
    static std::vector<float> held_rows(const uint32_t* a) {
        const int lane = emulator::self->thread % 32;
        auto* fragments = emulator::block->fragments[emulator::self->thread / 32];
        std::copy(a, a + 4, fragments[lane]);
        emulator::meet(200 + emulator::self->thread / 32, 0, 32);
        std::vector<float> rows(32);
        for (int from = 0; from < 4; from++)
            for (int r = 0; r < 4; r++) {
                const uint32_t pair = fragments[lane / 4 * 4 + from][r];
                float* two = &rows[r % 2 * 16 + r / 2 * 8 + from * 2];
                two[0] = unpack<Element>((uint16_t)pair), two[1] = unpack<Element>((uint16_t)(pair >> 16));
            }
        emulator::meet(200 + emulator::self->thread / 32, 0, 32);
        return rows;
    }
    template <class Number>
    static void issue_held(float* into, std::vector<float> rows, uint64_t b, bool accumulate, Number number) {
        const int thread = emulator::self->thread % 128;
        emulator::self->issued.push_back([=] {
            const int depth = rows.size() / 2;
            for (int i = 0; i < Accumulators; i++) {
                float sum = accumulate ? into[i] : 0;
                for (int k = 0; k < depth; k++)
                    sum += rows[i / 2 % 2 * depth + k] * unpack<Element>(number(b, column(thread, i), k));
                into[i] = sum;
            }
        });
    }
};
