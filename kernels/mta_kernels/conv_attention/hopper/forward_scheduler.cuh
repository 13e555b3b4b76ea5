// The tile scheduler of the forward: the next work tile of a persistent block.
#pragma once
#include <forward_layout.cuh>
#include <forward_work.cuh>

// The scheduler's view of one role: the count-th work tile of this block lies in slot count % SLOTS.
struct TileScheduler {
    static constexpr int WORDS = sizeof(WorkTile) / 4;
    static_assert(WORDS * 4 + 4 <= WORK_TILE, "a slot holds a work tile and a factor");
    const Block& block;

    DEVICE uint32_t info(int slot) const { return block.shared + WORK_TILES + slot * WORK_TILE; }

    // The work tile of a slot. After the last comes one that does not exist.
    DEVICE void write(int slot, const WorkTile& work) const {
#pragma unroll
        for (int i = 0; i < WORDS; i++) store_shared(info(slot) + 4 * i, ((const uint32_t*)&work)[i]);
    }
    DEVICE WorkTile read(int slot) const {
        WorkTile work;
#pragma unroll
        for (int i = 0; i < WORDS; i++) ((uint32_t*)&work)[i] = load_shared(info(slot) + 4 * i);
        return work;
    }

    // The factor of its c, written before its queries are full.
    DEVICE void write_unit(int slot, float unit) const { store_shared(info(slot) + 4 * WORDS, __float_as_uint(unit)); }
    DEVICE float unit(int slot) const { return __uint_as_float(load_shared(info(slot) + 4 * WORDS)); }
};
