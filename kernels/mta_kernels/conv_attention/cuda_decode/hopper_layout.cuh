// Shared memory of hopper_heads.cu, its tiles, and its arguments for the caches. hopper_plan.py chooses its constants.
#pragma once
#include <device.cuh>
#include <wgmma.cuh>
#include "stream.cuh"

constexpr int CONSUMERS = WARPS / 4, ROUND = CONSUMERS / SHARING;  // warp groups, and tiles that they take at once
constexpr int SLABS = (HEAD_DIM + 63) / 64, M_TILES = KEYS / 64, RUN = 2 * M_TILES;
constexpr int OF_WARP = 8 * RUN;                                    // keys of a warp: neighbours
constexpr int CLASS_HEADS = HEADS / 4, CLASS_COLUMNS = (CLASS_HEADS * KEY_TAPS + 1) / 2 * 2, COLUMNS = 4 * CLASS_COLUMNS;
// Scores that wait for more columns. In pages, tiles of values begin at a multiple of eight keys, as copies do.
constexpr int BEHIND = PAD + (PAGED ? (TAIL - PAD + 7) / 8 * 8 : TAIL - PAD), DELAY = BEHIND - PAD;
constexpr int SPREAD = (BEHIND + RUN - 1) / RUN;  // runs after a run that it adds to
constexpr int SPAN = NEWEST > 0 ? NEWEST + TAIL - PAD : 0;          // last scores that the newest keys add to
static_assert(HEADS % 4 == 0 && HEADS <= 8 && SPREAD <= 8 && COLUMNS <= 256 && QUERY_TAPS <= 8 && KEY_TAPS <= 16);

constexpr int SLAB_BYTES = KEYS * 128, TILE_BYTES = SLABS * SLAB_BYTES;
constexpr int FOLDED_SLAB = COLUMNS * 128, FOLDED = SLABS * FOLDED_SLAB;
constexpr int FOLDED_AT = STAGES * TILE_BYTES;
constexpr int PROBABILITIES = KEYS * 16, PROBABILITIES_AT = FOLDED_AT + larger(SHARING * FOLDED, CONSUMERS * HEADS * OUT_PITCH);
constexpr int CARRIED = HEADS * SPREAD * RUN * 4;  // of a warp: what its columns add to later scores
constexpr int CARRIED_SLOTS = 5;                   // of a warp group: one of each warp, and another of the last
constexpr int CARRIED_AT = PROBABILITIES_AT + CONSUMERS * PROBABILITIES;
constexpr int NEWEST_AT = CARRIED_AT + CONSUMERS * CARRIED_SLOTS * CARRIED;  // [ALL_HEADS, SPAN]
constexpr int UNITS_AT = NEWEST_AT + ALL_HEADS * SPAN * 4, MAXIMA_AT = UNITS_AT + ALL_HEADS * 4;
constexpr int SUMS_AT = MAXIMA_AT + WARPS * HEADS * 4;
// Mbarriers of full buffers: each belongs to one team, which so knows its phase.
constexpr int FULLS = (STAGES + 2 * ROUND - 1) / (2 * ROUND) * (2 * ROUND);
constexpr int BARRIERS_AT = (SUMS_AT + WARPS * HEADS * 4 + 7) / 8 * 8;
constexpr int FULL_AT = BARRIERS_AT, EMPTY_AT = FULL_AT + FULLS * 8, HANDED_AT = EMPTY_AT + STAGES * 8;
constexpr int ASKED_AT = HANDED_AT + CONSUMERS * 8;
constexpr bool QUERIES_FIRST = SHARING > 1;  // the first keys wait until queries are in flight: faster with many heads
static_assert(ASKED_AT + 8 <= SHARED_BYTES, "as in hopper_plan.py");

constexpr int OF_ALL = 8;  // the barrier of all consumers; a warp group's barrier is 1 or later

// Rows of the small copies of values; and a tile's values that lie in the page before.
constexpr int VALUE_PART = PAGED ? 8 : OF_WARP, VALUES_BEFORE = PAGED ? DELAY : 0;
// Units of a tile where tiles begin at pages and a score needs keys on both sides; else 1.
constexpr unsigned TILE_UNITS = PAGED && PAD > 0 && DELAY > 0 ? KEYS / UNIT : 1;
static_assert(PAD <= UNIT, "shares begin a unit behind a page");

// The tiles of a segment: tile t has the columns y from `column(t)` on, and the values and scores j from `score(t)` on.
struct Tiles {
    int start, stop, length, first_column, count;
    bool reads_newest;

    DEVICE explicit Tiles(const Segment& of) : start(of.start), stop(of.stop), length(of.length) {
        first_column = PAGED ? max(start - PAD & -KEYS, 0) : start - PAD & -OF_WARP;
        count = start < stop ? (stop + DELAY - first_column + KEYS - 1) / KEYS : 0;
        reads_newest = NEWEST > 0 && start < stop && stop > length - SPAN;
    }
    DEVICE int column(int tile) const { return first_column + tile * KEYS; }
    DEVICE int score(int tile) const { return column(tile) - DELAY; }
};

DEVICE int consumer_index() { return __shfl_sync(~0u, thread_index() / 128, 0); }

DEVICE uint32_t full_barrier(uint32_t shared, int buffer) { return shared + FULL_AT + buffer % FULLS * 8; }
// The producer waits for an empty one.
DEVICE uint32_t acquire(uint32_t shared, int buffer) {
    barrier_wait(shared + EMPTY_AT + buffer % STAGES * 8, buffer / STAGES & 1 ^ 1);
    return full_barrier(shared, buffer);
}

// The caches as the copy engine sees them. Keys are [heads, groups, phase, lane / 4, number], so they arrive in the order of
// the product's rows. A sequence, or page, begins this many groups, or heads, after the one before it.
struct Maps {
    TensorMap key_tile, key_group, value_tile, value_part;
    int groups_apart, heads_apart;
};
