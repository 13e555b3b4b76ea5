// A ring of pipeline stages in shared memory: the producer fills them, the consumer warp groups empty them.
//
// Iteration i uses stage i % Stages, in phase i / Stages of the stage's two mbarriers.
#pragma once
#include <device.cuh>

template <int Stages> struct Pipeline {
    uint32_t full, empty;  // mbarriers, a stage each

    DEVICE explicit Pipeline(uint32_t barriers) : full(barriers), empty(barriers + 8 * Stages) {}

    DEVICE void init(int consumers) const {
        for (int stage = 0; stage < Stages; stage++) {
            barrier_init(full + 8 * stage, 1);
            barrier_init(empty + 8 * stage, consumers);
        }
    }
    static DEVICE int stage(int iteration) { return iteration % Stages; }
    static DEVICE int phase(int iteration) { return iteration / Stages & 1; }

    // The producer's part: wait until the stage is empty. Returns the mbarrier for the bytes that it then copies.
    DEVICE uint32_t acquire(int iteration) const {
        const int at = stage(iteration), parity = phase(iteration);
        barrier_wait(empty + 8 * at, parity ^ 1);
        return full + 8 * at;
    }

    // A consumer's part. One thread of each warp group releases.
    DEVICE bool is_full(int iteration) const { return barrier_done(full + 8 * stage(iteration), phase(iteration)); }
    DEVICE void wait(int iteration) const { barrier_wait(full + 8 * stage(iteration), phase(iteration)); }
    DEVICE void release(int iteration) const { barrier_arrive(empty + 8 * stage(iteration)); }
};
