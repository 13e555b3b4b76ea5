// Counters in global memory, by which the blocks of a launch take work and wait for each other; and launches that overlap.
//
// The emulator of the tests has these functions in tests/emulator/device.cuh. Names of instructions follow the PTX ISA, 8.5.
#pragma once
#include <common.cuh>

DEVICE int fetch_next(int* taken) { return atomicAdd(taken, 1); }  // a number that no other block gets
DEVICE int count_now(const int* counter) {
    int found;
    asm volatile("ld.relaxed.gpu.global.s32 %0, [%1];" : "=r"(found) : "l"(counter) : "memory");
    return found;
}

// Numbers from 0 on, which blocks take in order. `open`: how many can still be taken; `at_first` are added to it.
struct Queue {
    int taken, open;
};
DEVICE int take_open(Queue& queue, int at_first) {  // a number that no other block gets, or -1
    if (count_now(&queue.open) + at_first <= 0) return -1;
    if (atomicAdd(&queue.open, -1) + at_first > 0) return atomicAdd(&queue.taken, 1);
    atomicAdd(&queue.open, 1);  // another block was faster
    return -1;
}
DEVICE void open_more(Queue& queue, int numbers) { atomicAdd(&queue.open, numbers); }
// Waits until there may be something to take. False if `all` have been taken.
DEVICE bool wait_for_open(const Queue& one, int at_first, const Queue& other, int all) {
    while (count_now(&one.open) + at_first <= 0 && count_now(&other.open) <= 0) {
        if (count_now(&one.taken) + count_now(&other.taken) == all) return false;
        asm volatile("nanosleep.u32 500;");
    }
    return true;
}

// What a block wrote before a barrier of its threads is visible to a thread that waits for the count.
DEVICE void wait_for_count(const int* counter, int count) {
    int found;
    while (true) {
        asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(found) : "l"(counter) : "memory");
        if (found >= count) return;
        asm volatile("nanosleep.u32 200;");
    }
}
// By one thread of each block, after a barrier: how many blocks came before. After another barrier their writes are visible.
DEVICE int arrive(int* counter) {
    int before;
    asm volatile("atom.acq_rel.gpu.global.add.s32 %0, [%1], 1;" : "=r"(before) : "l"(counter) : "memory");
    return before;
}

// Programmatic dependent launch, from Hopper on: a launch that `follows` another begins when all blocks of the one
// before have called `let_next_start` or ended. `wait_for_launch_before` makes the writes of that one visible.
DEVICE void let_next_start() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
DEVICE void wait_for_launch_before() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
