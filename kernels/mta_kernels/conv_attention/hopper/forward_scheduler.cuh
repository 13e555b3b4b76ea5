// The tile scheduler of the forward: the next work tile of a persistent block.
#pragma once
#include <forward_layout.cuh>
#include <forward_work.cuh>

// The scheduler's view of one role: the count-th work tile of this block lies in slot count % SLOTS.
struct TileScheduler {
    const Block& block;

    DEVICE uint32_t info(int slot) const { return block.shared + WORK_TILES + slot * 8; }

    // The number of a work tile, or less than 0 after the last.
    DEVICE int read(int slot) const { return (int)load_shared(info(slot)); }
    DEVICE float unit(int slot) const { return __uint_as_float(load_shared(info(slot) + 4)); }
};
