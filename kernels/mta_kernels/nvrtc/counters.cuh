// Counters in global memory, by which the blocks of a launch take work and wait for each other's.
//
// The emulator of the tests has these functions in tests/emulator/device.cuh. Names of instructions follow the PTX ISA, 8.5.
#pragma once
#include <common.cuh>

DEVICE int fetch_next(int* taken) { return atomicAdd(taken, 1); }  // a number that no other block gets

// What a block wrote before a barrier of its threads is seen by one that waits for the count.
DEVICE void count_up(int* counter) { asm volatile("red.release.gpu.global.add.s32 [%0], 1;" ::"l"(counter) : "memory"); }
DEVICE void wait_for_count(const int* counter, int count) {
    int found;
    while (true) {
        asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(found) : "l"(counter) : "memory");
        if (found >= count) return;
        asm volatile("nanosleep.u32 200;");
    }
}
