// See machine.hpp.
#include "machine.hpp"

#include <ucontext.h>

#include <algorithm>
#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "numbers.cuh"

namespace emulator {

int thread;
Index block_index, block_size;

namespace {

constexpr int STACK_BYTES = 64 * 1024;

struct Work {  // a task, or a product and its a, if that is in registers
    Task task;
    Product product;
    float rows[2][16];
};
struct Group {
    std::vector<Work> work;
    bool multiplies;
};
using Place = void*[5];  // of __builtin_setjmp
struct Fiber {
    bool started = false, done = false;        // what the scheduler looks at lies together
    const long* generation = nullptr;          // of what it waits for, not resumed as long as that is `met`
    long met;
    bool (*may_go_on)(const void*) = nullptr;  // must be true of `condition` before it is resumed
    const void* condition;
    Place resume;
    std::vector<Work> issued;  // not committed yet
    std::deque<Group> groups;  // committed, and not waited for
    ucontext_t start;
};
struct Rendezvous {
    int arrived = 0, line = 0;
    long generation = 0;
    bool any = false, any_before = false;  // of those that arrived, and of the generation before
};
struct Barrier {  // an mbarrier
    int expected = 0, arrivals = 0;
    long bytes = 0, phases = 0;
};
struct Block {
    Index index;
    int place;                     // of its stacks
    std::vector<int> order;        // of its threads
    int slow = 0, slow_end = 128;  // threads that hardly run, from and to before: a warp, or a warpgroup
    bool idle = false;             // none of its threads could go on
    std::vector<Fiber> fibers;
    std::vector<char> shared;
    std::map<std::pair<int, uint32_t>, Rendezvous> rendezvous;
    std::pair<std::pair<int, uint32_t>, Rendezvous*> recent[256] = {};  // of these: a cache, for lookups are frequent
    std::map<uint32_t, Barrier> barriers;
    std::vector<Task> copies;
    uint32_t exchanged[64][32], fragments[64][32][4];
};
struct TensorMap {  // of numbers of 16 bits
    const char* base;
    int64_t extent[5], stride[5];  // numbers, and bytes; x is the innermost
    int box[5];                    // numbers; a swizzle as wide as a row of it
};

Block* block;
Fiber* self;
Place scheduler;
std::mt19937 bits;
long progress;
std::string failure;
const Task* body;
std::vector<std::unique_ptr<Block>> running;
std::map<int, Rendezvous> clusters;

// Fibers switch by the compiler's longjmp, which makes no system call and saves no more than it must.
[[gnu::noinline, noreturn]] void go_to(Place& place) { __builtin_longjmp(place, 1); }
[[gnu::noinline]] void resume(Fiber& fiber, int number) {
    self = &fiber, thread = number;
    if (__builtin_setjmp(scheduler)) return;
    if (fiber.started) go_to(fiber.resume);
    fiber.started = true;
    setcontext(&fiber.start);
}
[[gnu::noinline]] void give_way() {
    if (!__builtin_setjmp(self->resume)) go_to(scheduler);
}
void run_fiber() {
    body->run(body->captured);
    self->done = true;
    progress++;
    give_way();
}
// The scheduler asks a waiting fiber's condition, which is cheaper than to resume it in vain.
template <class Condition> void wait_until(const Condition& condition) {
    if (!condition()) {
        self->condition = &condition;
        self->may_go_on = [](const void* of) { return (*(const Condition*)of)(); };
        give_way();
        self->may_go_on = nullptr;
    }
    progress++;
}
bool has_completed(const Barrier& barrier, int parity) { return (barrier.phases & 1) != parity; }  // a phase of it
void complete(Barrier& barrier) {
    if (barrier.arrivals == barrier.expected && barrier.bytes == 0) barrier.arrivals = 0, barrier.phases++;
    progress++;
}
void execute(const Work& work);
void execute(std::vector<Work>& group) {
    for (const Work& work : group) execute(work);
    group.clear();
}

}  // namespace

const char* launch_on_machine(int grid_x, int grid_y, int threads, int shared_bytes, uint32_t seed, const Task& kernel, int at_once) {
    static const std::unique_ptr<char[]> stacks(new char[(size_t)MOST_THREADS * STACK_BYTES]);
    failure.clear();
    bits.seed(seed);
    const bool late_copies = seed % 2;  // only once no thread of the block can go on without one
    const bool uneven = seed / 2 % 2;   // some warp or warpgroup, and some block, hardly runs while another can
    body = &kernel;
    block_size = {threads, 1, 1};
    running.clear(), clusters.clear();
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
            ucontext_t& start = one.fibers[i].start;
            getcontext(&start);
            start.uc_stack.ss_sp = stacks.get() + (size_t)(one.place * threads + i) * STACK_BYTES;
            start.uc_stack.ss_size = STACK_BYTES;
            start.uc_link = nullptr;
            makecontext(&start, run_fiber, 0);
            one.order.push_back(i);
        }
    };
    auto take_turns = [&](Block& one) {  // whether all of its threads are done
        block = &one, block_index = one.index;
        const long before = progress;
        if (bits() % 32 == 0) std::shuffle(one.order.begin(), one.order.end(), bits);
        bool all_done = true;
        if (uneven && bits() % 1024 == 0) {
            const int together = bits() % 2 ? 32 : 128;
            one.slow = bits() % (threads / together + 1) * together, one.slow_end = one.slow + together;
        }
        for (int i : one.order) {
            Fiber& fiber = one.fibers[i];
            if (fiber.done) continue;
            all_done = false;
            if (uneven && i >= one.slow && i < one.slow_end && !one.idle && bits() % 64) continue;
            if (fiber.generation && *fiber.generation == fiber.met) continue;
            if (!fiber.may_go_on || fiber.may_go_on(fiber.condition)) resume(fiber, i);
        }
        while (!one.copies.empty() && ((coin() && !late_copies) || progress == before)) {
            const size_t which = bits() % one.copies.size();
            const Task copy = one.copies[which];
            one.copies.erase(one.copies.begin() + which);
            copy.run(copy.captured);
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
        if (uneven && at_once > 1 && bits() % 256 == 0) slow = bits() % (at_once + 1);
        for (size_t i = 0; i < running.size(); i++) {
            if (uneven && at_once > 1 && i == slow && idle == 0 && bits() % 64) continue;
            if (!take_turns(*running[i])) continue;
            if (!running[i]->copies.empty()) fail("a block ended before its copies");
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

void fail(const char* why) { failure = why; }
bool coin() { return bits() & 1; }
uint32_t random_bits() { return bits(); }
void yield() {
    progress++;
    give_way();
}

namespace {

void gather(Rendezvous& point, int threads, int line = 0) {
    const long generation = point.generation;
    if (point.arrived > 0 && point.line != line)
        failure = "threads wait for each other at lines " + std::to_string(point.line) + " and " + std::to_string(line);
    point.line = line;
    progress++;
    if (++point.arrived == threads) {
        point.arrived = 0;
        point.generation++;
        point.any_before = point.any, point.any = false;
    } else {
        self->generation = &point.generation, self->met = generation;
        give_way();
        self->generation = nullptr;
        progress++;
    }
}
Rendezvous& rendezvous(int kind, uint32_t id) {
    const std::pair<int, uint32_t> key = {kind, id};
    auto& [known, point] = block->recent[(kind * 9 + id) % 256];
    if (!point || known != key) known = key, point = &block->rendezvous[key];
    return *point;
}

}  // namespace

void meet(int kind, uint32_t id, int threads, int line) { gather(rendezvous(kind, id), threads, line); }
bool meet_any(int kind, uint32_t id, int threads, bool mine) {
    Rendezvous& point = rendezvous(kind, id);
    point.any |= mine;
    gather(point, threads);
    return point.any_before;  // of this generation: no thread can complete the next one before all have left
}
void meet_cluster(int size) { gather(clusters[block->index.x / size], size * block_size.x); }
void arrive(int kind, uint32_t id, int threads) {
    Rendezvous& point = rendezvous(kind, id);
    progress++;
    if (++point.arrived == threads) point.arrived = 0, point.generation++;
}

int warp_of_all() { return block->place * (block_size.x / 32) + thread / 32; }
char* shared_memory() { return block->shared.data(); }
char* shared_at(uint32_t address, int bytes) {
    static char elsewhere[16];
    if (address % std::min(bytes, 16)) failure = "shared address " + std::to_string(address) + " is not aligned to " + std::to_string(bytes);
    if (address < SHARED_START || address + bytes > SHARED_START + block->shared.size()) {
        failure = "shared address " + std::to_string(address) + " is outside the block's memory";
        return elsewhere;
    }
    return block->shared.data() + address - SHARED_START;
}

uint32_t exchange(uint32_t mask, uint32_t mine, int from) {
    const int warp = thread / 32, threads = __builtin_popcount(mask);
    Rendezvous& point = rendezvous(1 + warp, mask);
    block->exchanged[warp][thread % 32] = mine;
    gather(point, threads);
    const uint32_t found = block->exchanged[warp][from];
    gather(point, threads);
    return found;
}

namespace {

template <class Move> void move_matrices(uint32_t address, Move move) {  // each lane names a row, and holds a part of each
    const int warp = thread / 32, lane = thread % 32;
    block->exchanged[warp][lane] = address;
    meet(200 + warp, 0, 32);
    for (int m = 0; m < 4; m++) move(shared_at(block->exchanged[warp][8 * m + lane / 4] + lane % 4 * 4, 4), m);
    meet(200 + warp, 0, 32);
}

}  // namespace

void store_matrices(uint32_t address, const uint32_t (&values)[4]) {
    move_matrices(address, [&](char* at, int m) { std::memcpy(at, &values[m], 4); });
}
void load_matrices(uint32_t (&values)[4], uint32_t address) {
    move_matrices(address, [&](char* at, int m) { std::memcpy(&values[m], at, 4); });
}

void issue(const Task& task) { self->issued.push_back({task}); }
void commit() {
    const bool multiplies = !self->issued.empty() && !self->issued[0].task.run;
    self->groups.push_back({std::move(self->issued), multiplies});
    self->issued.clear();
    if (coin())
        for (Group& group : self->groups) execute(group.work);
}
bool complete(int pending) {
    bool multiplied = false;
    for (; (int)self->groups.size() > pending; self->groups.pop_front()) {
        multiplied |= self->groups.front().multiplies;
        execute(self->groups.front().work);
    }
    return multiplied;
}
void do_issued() { execute(self->issued); }

void barrier_init(uint32_t barrier, int arrivals) { block->barriers[barrier] = {arrivals}; }
void barrier_arrive(uint32_t barrier) {
    Barrier& state = block->barriers.at(barrier);
    state.arrivals++;
    complete(state);
}
void barrier_expect(uint32_t barrier, int bytes) {
    block->barriers.at(barrier).bytes += bytes;
    barrier_arrive(barrier);
}
bool barrier_done(uint32_t barrier, int parity) { return has_completed(block->barriers.at(barrier), parity); }
void barrier_wait(uint32_t barrier, int parity) {
    const Barrier& state = block->barriers.at(barrier);
    const long first = state.phases;
    wait_until([&] {
        if (state.phases > first + 1) fail("a thread missed the phase of an mbarrier that it waits for");
        return has_completed(state, parity);
    });
}
void wait_for_count(const int* counter, int count) {
    wait_until([=] { return *counter >= count; });
}
void wait_for_open(const int* one, int at_first, const int* other, int all) {
    wait_until([=] { return one[1] + at_first > 0 || other[1] > 0 || one[0] + other[0] == all; });
}

namespace {

uint32_t swizzled(uint32_t address, int row_bytes = 128) { return address ^ (address >> 7 & (row_bytes / 16 - 1)) << 4; }

void copied(uint32_t barrier, int bytes) {
    Barrier& state = block->barriers.at(barrier);
    state.bytes -= bytes;
    complete(state);
}

}  // namespace

void copy_tile(uint32_t destination, const void* of, uint32_t barrier, int x, int y, int z, int w, int v) {
    const TensorMap* map = (const TensorMap*)of;
    block->copies.push_back(Task::of([=] {
        const int first[5] = {x, y, z, w, v}, *box = map->box, numbers = box[0] * box[1] * box[2] * box[3] * box[4];
        if (destination % 128) failure = "a box is not aligned";
        for (int i = 0; i < numbers; i++) {
            const char* source = map->base;
            bool inside = true;
            for (int d = 0, rest = i; d < 5; rest /= box[d++]) {
                const int64_t at = first[d] + rest % box[d];
                inside = inside && at >= 0 && at < map->extent[d];
                source += at * map->stride[d];
            }
            uint16_t number = 0;
            if (inside) std::memcpy(&number, source, 2);
            std::memcpy(shared_at(swizzled(destination + i * 2, box[0] * 2), 2), &number, 2);
        }
        copied(barrier, numbers * 2);
    }));
    progress++;
}
void copy_bytes(uint32_t destination, const void* source, int bytes, uint32_t barrier) {
    if (destination % 16 || (uintptr_t)source % 16 || bytes % 16) fail("a copy is not aligned");
    block->copies.push_back(Task::of([=] {
        std::memcpy(shared_at(destination, bytes), source, bytes);
        copied(barrier, bytes);
    }));
    progress++;
}
namespace {

Block* in_cluster(int size, int rank) {
    for (const auto& other : running)
        if (other->index.x == block->index.x / size * size + rank) return &*other;
    fail("a block of the cluster does not run");
    return block;
}
template <class Function> void done_in(Block* other, const Function& function) {
    Block* const own = std::exchange(block, other);
    function();
    block = own;
}

}  // namespace

void send(int size, int rank, uint32_t address, const void* from, int bytes, uint32_t barrier) {
    struct {
        char bytes[16];
    } sent;
    std::memcpy(&sent, from, bytes);
    in_cluster(size, rank)->copies.push_back(Task::of([=] {
        std::memcpy(shared_at(address, bytes), &sent, bytes);
        copied(barrier, bytes);
    }));
    progress++;
}
void copy_tile_to_blocks(int size, uint16_t blocks, uint32_t destination, const void* map, uint32_t barrier, int x, int y, int z,
                         int w) {
    for (int rank = 0; rank < size; rank++)
        if (blocks >> rank & 1) done_in(in_cluster(size, rank), [=] { copy_tile(destination, map, barrier, x, y, z, w); });
}
void copy_to_block(int size, int rank, uint32_t destination, uint32_t source, int bytes, uint32_t barrier) {
    Block* const other = in_cluster(size, rank);
    block->copies.push_back(Task::of([=] {
        const char* from = shared_at(source, bytes);
        done_in(other, [=] {
            std::memcpy(shared_at(destination, bytes), from, bytes);
            copied(barrier, bytes);
        });
    }));
    progress++;
}
void barrier_arrive(uint32_t barrier, int size, int rank) {
    done_in(in_cluster(size, rank), [=] { barrier_arrive(barrier); });
}
void barrier_expect(uint32_t barrier, int bytes, int size, int rank) {
    done_in(in_cluster(size, rank), [=] { barrier_expect(barrier, bytes); });
}

namespace {

// An operand's descriptor, as PTX defines it; its last two bits are 1 with a swizzle of 128 bytes, 2 with one of 64.
uint32_t start_of(uint64_t operand) { return (operand & 0x3FFF) << 4; }
uint32_t leading(uint64_t operand) { return (operand >> 16 & 0x3FFF) << 4; }
int swizzle_bytes(uint64_t operand) { return operand >> 62 ? 256 >> (operand >> 62) : 16; }  // 16: none
uint32_t stride(uint64_t operand) { return (operand >> 32 & 0x3FFF) << 4; }

// `Count` numbers of an operand that lie in one piece of 16 bytes, which a swizzle moves as a whole.
template <class Element, int Count> void read(uint32_t address, uint64_t operand, float* numbers) {
    uint16_t bits[Count];
    std::memcpy(bits, shared_at(swizzled(address, swizzle_bytes(operand)), sizeof bits), sizeof bits);
    for (int i = 0; i < Count; i++) numbers[i] = unpack<Element>(bits[i]);
}

// A is 64 rows of 16 numbers k, B is 16 numbers k of each column; `i` is a row or a column.
template <class Element> struct KAlongMemory {
    static void line(uint64_t operand, int i, float* numbers) {  // all k of one i
        const uint32_t pitch = swizzle_bytes(operand), along = operand >> 62 ? 16 : leading(operand);
        const uint32_t first = start_of(operand) + i / 8 * stride(operand) + i % 8 * pitch;
        read<Element, 8>(first, operand, numbers);
        read<Element, 8>(first + along, operand, numbers + 8);
    }
    static void two_lines(uint64_t operand, int i, float (&numbers)[2][16]) {
        line(operand, i, numbers[0]);
        line(operand, i + 1, numbers[1]);
    }
};
template <class Element> struct IAlongMemory {
    static uint32_t address(uint64_t operand, int i, int k) {
        if (const int row = swizzle_bytes(operand); operand >> 62)
            return start_of(operand) + i / (row / 2) * leading(operand) + k / 8 * stride(operand) + k % 8 * row + i % (row / 2) * 2;
        return start_of(operand) + i / 8 * stride(operand) + k / 8 * leading(operand) + k % 8 * 16 + i % 8 * 2;
    }
    static void line(uint64_t operand, int i, float* numbers) {
        for (int k = 0; k < 16; k++) read<Element, 1>(address(operand, i, k), operand, numbers + k);
    }
    static void two_lines(uint64_t operand, int i, float (&numbers)[2][16]) {
        float two[2];
        for (int k = 0; k < 16; k++) {
            read<Element, 2>(address(operand, i, k), operand, two);
            numbers[0][k] = two[0], numbers[1][k] = two[1];
        }
    }
};

// A in registers: a thread holds columns 2 (lane % 4) + e + 8 j of its two rows in a[h + 2 j]; the rest is with its
// neighbours. Registers may not change until the wait, so reading them when the product is issued is what any kernel must
// allow.
template <class Element> void hold_rows(const uint32_t* mine, float (&rows)[2][16]) {
    const int lane = thread % 32, warp = thread / 32;
    auto* fragments = block->fragments[warp];
    std::copy(mine, mine + 4, fragments[lane]);
    meet(200 + warp, 0, 32);
    for (int from = 0; from < 4; from++)
        for (int r = 0; r < 4; r++) {
            const uint32_t pair = fragments[lane / 4 * 4 + from][r];
            float* two = &rows[r % 2][r / 2 * 8 + from * 2];
            two[0] = unpack<Element>((uint16_t)pair), two[1] = unpack<Element>((uint16_t)(pair >> 16));
        }
    meet(200 + warp, 0, 32);
}

// A thread holds rows lane / 4 and 8 below it of its warp's 16, and columns 2 (lane % 4) and the next of every eight.
template <class Element, class LayoutOfA, class LayoutOfB> void multiply(const Work& work) {
    const Product& product = work.product;
    float rows[2][16], columns[2][16];
    if (product.fragments)
        std::memcpy(rows, work.rows, sizeof rows);
    else
        for (int h = 0; h < 2; h++) LayoutOfA::line(product.a, thread % 128 / 32 * 16 + thread % 32 / 4 + 8 * h, rows[h]);
    for (int i = 0; i < product.accumulators; i += 4) {
        LayoutOfB::two_lines(product.b, i * 2 + thread % 4 * 2, columns);
        float sums[4];
        for (int j = 0; j < 4; j++) sums[j] = product.accumulate ? product.into[i + j] : 0;
        for (int k = 0; k < 16; k++)
            for (int j = 0; j < 4; j++) sums[j] += rows[j / 2][k] * columns[j % 2][k];
        for (int j = 0; j < 4; j++) product.into[i + j] = sums[j];
    }
}
template <class Element> void multiply(const Work& work) {
    using K = KAlongMemory<Element>;
    using I = IAlongMemory<Element>;
    if (work.product.a_by_rows)
        work.product.b_by_columns ? multiply<Element, I, I>(work) : multiply<Element, I, K>(work);
    else
        work.product.b_by_columns ? multiply<Element, K, I>(work) : multiply<Element, K, K>(work);
}
void execute(const Work& work) {
    if (work.task.run)
        work.task.run(work.task.captured);
    else if (work.product.of_bfloat16)
        multiply<Bfloat16>(work);
    else
        multiply<Half>(work);
}

}  // namespace

namespace {

uint16_t shared_number(uint32_t address) {
    uint16_t bits;
    std::memcpy(&bits, shared_at(address, 2), 2);
    return bits;
}
template <class Element> void multiply_numbers(const Brought (&warp)[32]) {
    float a[16][16], b[8][16];  // b by columns
    const auto number = [](uint32_t pair, int e) { return unpack<Element>((uint16_t)(pair >> 16 * e)); };
    for (int lane = 0; lane < 32; lane++)
        for (int e = 0; e < 2; e++) {
            for (int i = 0; i < 4; i++)
                a[lane / 4 + i % 2 * 8][i / 2 * 8 + lane % 4 * 2 + e] = number(warp[lane].a[i], e);
            for (int i = 0; i < 2; i++) b[lane / 4][i * 8 + lane % 4 * 2 + e] = number(warp[lane].b[i], e);
        }
    for (int lane = 0; lane < 32; lane++)
        for (int i = 0; i < 4; i++) {
            const float *left = a[lane / 4 + i / 2 * 8], *right = b[lane % 4 * 2 + i % 2];
            float& sum = ((float*)warp[lane].result)[i];
            for (int k = 0; k < 16; k++) sum += left[k] * right[k];
        }
}

}  // namespace

void check_banks(const Brought (&warp)[32], int matrix) {
    for (int row = 0; row < 8; row++) {
        const uint32_t address = warp[8 * matrix + row].address;
        if (address % 16) fail("a row of a matrix is not aligned");
        for (int before = 0; before < row; before++) {
            const uint32_t other = warp[8 * matrix + before].address;
            if (other != address && other / 16 % 8 == address / 16 % 8) fail("rows of a matrix lie in the same banks");
        }
    }
}
void load_matrices(const Brought (&warp)[32], bool transposed) {
    for (int i = 0; i < 4; i++) {
        check_banks(warp, i);
        for (int lane = 0; lane < 32; lane++) {
            uint16_t pair[2];
            for (int e = 0; e < 2; e++) {
                const int row = transposed ? lane % 4 * 2 + e : lane / 4, column = transposed ? lane / 4 : lane % 4 * 2 + e;
                pair[e] = shared_number(warp[8 * i + row].address + column * 2);
            }
            ((uint32_t*)warp[lane].result)[i] = (uint32_t)pair[1] << 16 | pair[0];
        }
    }
}
void multiply(const Brought (&warp)[32], bool of_bfloat16) {
    of_bfloat16 ? multiply_numbers<Bfloat16>(warp) : multiply_numbers<Half>(warp);
}

void issue(const Product& product) {
    Work work = {{}, product, {}};
    if (product.fragments)
        product.of_bfloat16 ? hold_rows<Bfloat16>(product.fragments, work.rows) : hold_rows<Half>(product.fragments, work.rows);
    self->issued.push_back(work);
}

}  // namespace emulator

// What -fsanitize=alignment calls. The access is not made, for it may end the process.
struct SourceLine {
    const char* file;
    uint32_t line;
};
extern "C" void __ubsan_handle_type_mismatch_v1(const SourceLine* of, const void*) {
    const std::string path = of->file;
    emulator::failure = "misaligned address in " + path.substr(path.rfind('/') + 1) + ", line " + std::to_string(of->line);
    while (true) emulator::give_way();
}
