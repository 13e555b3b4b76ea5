// A GPU for one kernel at a time, on a CPU: what the headers here make CUDA's functions of. machine.cpp is built once.
//
// Every CUDA thread is a fiber of one CPU thread, and fibers take turns in a random order (seeded). What a GPU does
// asynchronously happens at a random moment that the kernel's waits allow: copies between issue and the end of their
// barrier's phase, products between commit and wait. A missing wait or barrier thus shows as a wrong result for some
// seed, and a missing arrival as a deadlock, which is reported. Blocks begin in order, each as one before it ends; `launch`
// receives how many run at once. A misaligned access is reported. Proxy fences and the timing of a real GPU are not
// modelled.
#pragma once
#include <numbers.cuh>

struct Index {
    int x, y, z;
};

namespace emulator {

constexpr int MOST_THREADS = 4096;  // of all blocks that run at once
constexpr uint32_t SHARED_START = 1024;

extern int thread;  // of its block, which runs now
extern Index block_index, block_size;

// What is to be done at another time.
struct Task {
    void (*run)(const void*);
    alignas(16) char captured[64];

    template <class Function> static Task of(const Function& function) {
        static_assert(__is_trivially_copyable(Function) && sizeof(Function) <= sizeof(captured));
        Task task = {[](const void* captured) { (*(const Function*)captured)(); }, {}};
        memcpy(task.captured, &function, sizeof(Function));
        return task;
    }
};

const char* launch_on_machine(int grid_x, int grid_y, int threads, int shared_bytes, uint32_t seed, const Task& kernel, int at_once);
// Run one kernel, `at_once` blocks at a time; returns "" or what went wrong.
template <class Kernel>
const char* launch(int grid_x, int grid_y, int threads, int shared_bytes, uint32_t seed, const Kernel& kernel, int at_once = 1) {
    return launch_on_machine(grid_x, grid_y, threads, shared_bytes, seed, Task::of([&kernel] { kernel(); }), at_once);
}
void fail(const char* why);
bool coin();
uint32_t random_bits();
void yield();                                // let other threads run, and go on
bool meet_any(int kind, uint32_t id, int threads, bool mine);  // whether it holds for any of them
void meet(int kind, uint32_t id, int threads, int line = 0);  // `line` of the source, the same for all
void arrive(int kind, uint32_t id, int threads);  // without waiting for the others
int warp_of_all();  // this thread's warp, among the warps of all running blocks
char* shared_memory();
char* shared_at(uint32_t address, int bytes);
uint32_t exchange(uint32_t mask, uint32_t bits, int from);
void store_matrices(uint32_t address, const uint32_t (&values)[4]);
void load_matrices(uint32_t (&values)[4], uint32_t address);

// Work of a thread in groups: issued, committed, then at some time executed, at the latest by a wait.
void issue(const Task& task);
void commit();
bool complete(int pending);  // until at most so many groups are left; whether one that completed has products
void do_issued();

// mbarriers, and copies that count on them
void barrier_init(uint32_t barrier, int arrivals);
void barrier_arrive(uint32_t barrier);
void barrier_expect(uint32_t barrier, int bytes);
bool barrier_done(uint32_t barrier, int parity);
void barrier_wait(uint32_t barrier, int parity);
void copy_tile(uint32_t destination, const void* map, uint32_t barrier, int x, int y, int z, int w, int v = 0);
void copy_bytes(uint32_t destination, const void* source, int bytes, uint32_t barrier);
void wait_for_count(const int* counter, int count);
void wait_for_open(const int* one, int at_first, const int* other, int all);  // two queues of counters.cuh

// Clusters: blocks that follow one another, `size` together, which must all run at once.
void meet_cluster(int size);
void barrier_arrive(uint32_t barrier, int size, int rank);
void barrier_expect(uint32_t barrier, int bytes, int size, int rank);
void send(int size, int rank, uint32_t address, const void* from, int bytes, uint32_t barrier);  // up to 16
void copy_tile_to_blocks(int size, uint16_t blocks, uint32_t destination, const void* map, uint32_t barrier, int x, int y, int z,
                         int w);
void copy_to_block(int size, int rank, uint32_t destination, uint32_t source, int bytes, uint32_t barrier);

// What the threads of a warp bring to an instruction that they execute together, which is done for all of them.
struct Brought {
    uint32_t a[4], b[2];
    uint32_t address;
    void* result;
};
void check_banks(const Brought (&warp)[32], int matrix);  // of eight rows, whose addresses eight threads give
void load_matrices(const Brought (&warp)[32], bool transposed);
void multiply(const Brought (&warp)[32], bool of_bfloat16);  // 16 x 16 by 16 x 8, added to the result

// A product of a warpgroup, as one of its threads issues it: `accumulators` numbers of its two rows and of some columns of b.
struct Product {
    bool of_bfloat16, a_by_rows, b_by_columns;  // the last two: whether these, not k, run along memory
    bool accumulate;
    int accumulators;
    float* into;
    const uint32_t* fragments;  // of a, if it is in registers
    uint64_t a, b;
};
void issue(const Product& product);

}  // namespace emulator

#define threadIdx (Index{emulator::thread, 0, 0})
#define blockIdx (emulator::block_index)
#define blockDim (emulator::block_size)
