// What forward and backward share: the geometry of a tile.
// Constants come from the compiler's command line; see forward.cu.
#pragma once
#include <device.cuh>
#include <positions.cuh>
#include <wgmma.cuh>

constexpr int ROWS = 64, KEYS = 64;
constexpr int CARRIED = 16;
constexpr int LEFT_BACK = (PAD + 7) / 8 * 8;            // columns of ds left of a block of dc
static_assert(QUERY_TAPS >= 1 && QUERY_TAPS <= 8, "eight rows above a score tile hold zeros");
static_assert(LEFT <= CARRIED && PAD <= CARRIED - LEFT, "16 columns of scores touch 32 of c");
static_assert(LEFT_BACK <= CARRIED && KEY_TAPS - 1 - PAD <= CARRIED - LEFT_BACK, "and the other way");

constexpr int SLAB = 64 * 128;  // bytes of 64 rows of 64 numbers, as the copy engine lays them with a 128-byte swizzle
constexpr int DEPTH_STEPS = (HEAD_DIM + 15) / 16;
constexpr int SLABS = (HEAD_DIM + 63) / 64;
constexpr int TAP = 16 * 32 * 2;  // bytes of one T
