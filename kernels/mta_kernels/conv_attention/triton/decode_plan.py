"""How decode is cut up: the tiles of a program, and how many programs share the keys of a KV head."""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass

from mta_kernels.conv_attention.arguments import MAX_SPLITS
from mta_kernels.conv_attention.triton.launch import next_power_of_2

WARPS_PER_SM = 8  # of programs with as many registers as these
ROUNDED_UP = 2048  # bytes of shared memory


@dataclass(frozen=True)
class DecodeConfig:
    """Tile sizes of the decode kernel.

    A program reads tiles of `block_n` keys, `pack` of them to a column of products, for `heads` query heads;
    `num_stages - 1` tiles are in shared memory or in flight.
    """

    block_n: int
    pack: int
    heads: int
    num_warps: int
    num_stages: int

    def block_steps(self, key_taps: int) -> int:
        """Rows of products a head and a key of a column, padded to fill the tensor core."""
        return max(next_power_of_2(column_steps(key_taps, self.pack)), 16 // (self.pack * self.heads))

    def programs_per_sm(self, *, key_taps: int, block_d: int, element_size: int, shared_memory: int) -> int:
        """How many an SM holds at a time, if a program may have `shared_memory` bytes; each takes 1 KiB more."""
        needed = self.shared_memory(key_taps, block_d, element_size) - ROUNDED_UP + 1024
        return max(1, min(WARPS_PER_SM // self.num_warps, (shared_memory + 1024) // needed))

    def shared_memory(self, key_taps: int, block_d: int, element_size: int) -> int:
        """Bytes of shared memory that a program needs, rounded up a little."""
        rows = self.heads * self.pack * self.block_steps(key_taps)
        windows = self.heads * 16
        folding = (rows * windows + windows * block_d + rows * block_d * self.pack) * element_size
        queries = rows * self.pack * block_d * element_size
        tiles = max(1, 2 * (self.num_stages - 1)) * self.block_n * block_d * element_size
        products = 4 * rows * self.block_n // self.pack  # change their layout there
        return max(folding, queries + tiles + products) + ROUNDED_UP


def column_steps(key_taps: int, pack: int) -> int:
    """Columns of `pack` keys that the windows of `pack` neighbouring scores touch."""
    return (pack + key_taps - 2) // pack + 1


def bulk_pays(head_dim: int, group: int, element_size: int, compute_capability: tuple[int, int]) -> bool:
    """Whether steps on caches that the copy engine can read are faster if it does.

    From Hopper on, with 16-bit numbers, unless query heads have a KV head each and rows are 128 bytes or less. On an
    H200 the copy engine costs up to 3 % there, and saves up to a fifth elsewhere.
    """
    readable = compute_capability >= (9, 0) and element_size == 2 and head_dim % 8 == 0
    return readable and (head_dim > 64 or group > 1)


@functools.cache
def decode_config(
    *, key_taps: int, group: int, block_d: int, element_size: int, shared_memory: int, small: bool = False
) -> DecodeConfig:
    """Tile sizes that fit in `shared_memory` bytes a program.

    `small` is for fewer heads and warps a program where query heads share a KV head or `block_d` is above 128, too.
    """
    large = _large_programs(key_taps, group, block_d, element_size, shared_memory)
    configs = []
    # Small programs, measured on an H200: many of them hide each other's latency.
    if large.heads == 1 and element_size == 2 and block_d <= 128:
        configs = [DecodeConfig(64, 2, 1, 2, 3), DecodeConfig(64, 1, 1, 2, 3)]
    elif small:
        heads = max(1, large.heads // 2)
        configs = [dataclasses.replace(large, heads=heads, num_warps=large.num_warps // 2, num_stages=2)]
    return next(x for x in [*configs, large] if x.shared_memory(key_taps, block_d, element_size) <= shared_memory)


def _large_programs(key_taps: int, group: int, block_d: int, element_size: int, shared_memory: int) -> DecodeConfig:
    """About 32 KiB of keys and values a tile; as many tiles in flight, up to three, as leave room for two programs."""
    block_n = max(32, min(128, 16 * 1024 // (block_d * element_size)))
    budgets = [(shared_memory // 2 - 1024, (4, 3)), (shared_memory, (4, 3, 2, 1))]
    heads = min(next_power_of_2(group), 128 // max(16, next_power_of_2(key_taps)))
    while heads:
        pack = 1
        for candidate in (2, 4) if heads == 1 else (2,):
            rows = heads * candidate * next_power_of_2(column_steps(key_taps, candidate))
            # Rows that the tensor core would multiply anyway, enough columns for four warps, room in the registers.
            free = rows <= heads * max(16, next_power_of_2(key_taps)) and block_n // candidate >= 32
            if free and rows * candidate * block_d * element_size <= 8192 * max(1, min(4, rows // 16)):
                pack = candidate
        for budget, depths in budgets:
            for num_stages in depths:
                config = DecodeConfig(block_n, pack, heads, 8 if heads * key_taps > 64 else 4, num_stages)
                if config.shared_memory(key_taps, block_d, element_size) <= budget:
                    return config
        heads //= 2
    raise ValueError(
        f"the smallest tiles for {key_taps} key taps and head_dim up to {block_d} need more than "
        f"the {shared_memory} bytes of shared memory of this GPU; backend='reference' needs none"
    )


@functools.lru_cache(maxsize=4096)
def choose_splits(sequences: int, max_length: int, group: int, sm_count: int, heads: int, programs_per_sm: int) -> int:
    """How many programs share the keys of a KV head, from 1 to 128, 64 keys each or more: see decision 20.

    There are `sequences` KV heads in the batch, each with `group` query heads; a program is for `heads` of them, and an
    SM holds `programs_per_sm` at a time. Without grouped heads, the fewest splits that give 5 programs per 3 SMs,
    if so many fit. If one split gives 3 programs per SM already, 1. Otherwise the splits with the least
    `(keys a program + 128) (1 + 0.3 (n - 1)) waves`, where n programs at a time run on the fullest SM.
    """
    limit = min(MAX_SPLITS, max(1, max_length // 64))
    if group == 1 and programs_per_sm > 1:
        fewest = min(-(-5 * sm_count // (3 * sequences)), 2 * sm_count // sequences - 1)
        if 5 * sequences * fewest >= 8 * sm_count:
            return min(fewest, limit)
        if 3 <= -(-sequences // sm_count) <= programs_per_sm:
            return 1
    programs_a_split = sequences * -(-group // heads)

    def cost(splits: int) -> float:
        most = -(-programs_a_split * splits // sm_count)
        waves = -(-most // programs_per_sm)
        return (max_length / splits + 128) * (1 + 0.3 * (min(most, programs_per_sm) - 1)) * waves

    return min(range(1, limit + 1), key=cost)


def newest_last(sequences: int, splits: int, group: int, sm_count: int) -> bool:
    """Whether the programs of the newest keys come after all shares, not each KV head's before its shares.

    True unless there are about five programs for three SMs: see decision 19.
    """
    few = sequences * (splits + 1) <= 2 * sm_count
    return not (group == 1 and few and 5 * sequences * splits >= 7 * sm_count)
