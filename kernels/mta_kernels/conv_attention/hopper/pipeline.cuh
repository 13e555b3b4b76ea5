// A ring of pipeline stages in shared memory: the producer fills them, the consumer warp groups empty them.
//
// Iteration i uses stage i % Stages, in phase i / Stages of the stage's two mbarriers.
#pragma once
#include <device.cuh>

template <int Stages> struct Pipeline {
    uint32_t full, empty;  // mbarriers, a stage each

    DEVICE explicit Pipeline(uint32_t barriers) : full(barriers), empty(barriers + 8 * Stages) {}

    DEVICE void init(int consumers, int producers = 1) const {
        for (int stage = 0; stage < Stages; stage++) {
            barrier_init(full + 8 * stage, producers);
            barrier_init(empty + 8 * stage, consumers);
        }
    }
    static DEVICE int stage(int iteration) { return iteration % Stages; }
    static DEVICE int phase(int iteration) { return iteration / Stages & 1; }

    DEVICE uint32_t full_at(int iteration) const { return full + 8 * stage(iteration); }
    DEVICE uint32_t empty_at(int iteration) const { return empty + 8 * stage(iteration); }

    // The producer's part: wait until the stage is empty. Returns the mbarrier for the bytes that it then copies.
    DEVICE uint32_t acquire(int iteration) const {
        barrier_wait(empty_at(iteration), phase(iteration) ^ 1);
        return full_at(iteration);
    }

    // A consumer's part. One thread of each warp group releases.
    DEVICE bool is_full(int iteration) const { return barrier_done(full_at(iteration), phase(iteration)); }
    DEVICE void wait(int iteration) const { barrier_wait(full_at(iteration), phase(iteration)); }
    DEVICE void release(int iteration) const { barrier_arrive(empty_at(iteration)); }
};
