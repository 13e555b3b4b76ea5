"""How a decode step divides into programs: tiles of keys, and how many programs take them."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field

import torch

from mta_kernels.conv_attention.triton.decode_plan import WARPS_PER_SM, column_steps, decode_config
from mta_kernels.conv_attention.triton.launch import cdiv, next_power_of_2
from mta_kernels.gpu_limits import shared_memory_limit, sm_count
from mta_kernels.operation import ONE_TAP, Operation

MAX_PROGRAMS = 512  # a sequence: every V program reads the results of all logits programs
MAX_PROGRAMS_A_HEAD = 512
TILE_BYTES = 32 * 1024  # of one head's keys or values
OLDER_BYTES = 48 * 1024  # of the older rows that a program loads at a time
BLOCKS = (16, 8, 4, 2, 1)  # of 16 keys, in a tile of probabilities
AHEAD_BYTES = 26 * 1024 * 1024  # of all values, prefetched before they can be used


@dataclass(frozen=True)
class StepLaunch:
    """How many programs of a kernel take keys in turn, or share them; its tiles as constants; its options."""

    programs: int
    tiles: dict[str, int] = field(hash=False)
    warps: int
    stages: int
    registers: int | None  # a thread, at most


@dataclass(frozen=True)
class StepPlan:
    """How a step divides into programs.

    Those of `of_scores` share a KV head's keys and convolve the scores of AT_ONCE of its query heads; those of `early`
    compute the older rows' part of AT_ONCE heads of a sequence; those of `of_logits` and `of_v` take tiles of all heads
    of a sequence. `of_v` are so many for KV_HEADS KV heads each. They prefetch the first values of AHEAD of these: if
    EARLY, before there are logits.
    """

    of_scores: StepLaunch | None
    early: StepLaunch
    of_logits: StepLaunch
    of_v: StepLaunch


@functools.lru_cache(maxsize=4096)
def plan(
    dtype: torch.dtype, head_dim: int, heads: int, kv_heads: int, operation: Operation, batch: int, capacity: int,
    device: torch.device, splits: int = 0,
) -> StepPlan:  # fmt: skip
    """Enough programs to fill the GPU, if there are enough keys; `splits` of each kind except early, unless 0."""
    block_d, block_h = max(16, next_power_of_2(head_dim)), max(16, next_power_of_2(heads))
    row, sms, room = block_d * dtype.itemsize, sm_count(device), shared_memory_limit(device)
    of_scores = None
    if operation.pre_conv is not None:
        taps, group = operation.pre_conv.key_taps, heads // kv_heads
        config = decode_config(
            key_taps=taps, group=group, block_d=block_d, element_size=dtype.itemsize, shared_memory=room
        )
        at_once = WARPS_PER_SM // config.num_warps * sms
        stages = config.num_stages + (config.heads == 1 and row <= 128)
        tiles = {
            "AT_ONCE": config.heads, "PACK": config.pack, "STEPS": column_steps(taps, config.pack),
            "BLOCK_STEPS": config.block_steps(taps), "BLOCK_N": config.block_n,
        }  # fmt: skip
        programs = splits or choose_splits(batch * kv_heads, capacity, config.block_n, at_once)
        of_scores = StepLaunch(programs, tiles, config.num_warps, stages, None)
    _, span = band(operation)
    early = _early(span, operation, dtype.itemsize, heads, batch, capacity, sms, room)
    of_logits = _of_logits(row, block_h, of_scores is not None, batch, capacity, sms, room, splits)
    of_v = _of_values(
        operation, dtype.itemsize, head_dim, heads, kv_heads, batch, capacity, sms, room, splits
    )  # fmt: skip
    return StepPlan(of_scores, early, of_logits, of_v)


def band(operation: Operation) -> tuple[int, int]:
    """Keys that a band of taps begins before a group of 16, in whole groups of 8, and the keys of a band."""
    post = operation.post_conv or ONE_TAP
    before = cdiv(post.pad, 8) * 8
    return before, max(16, next_power_of_2(15 + before - post.pad + post.key_taps))


@functools.lru_cache(maxsize=4096)
def choose_splits(sequences: int, capacity: int, new: int, at_once: int) -> int:
    """Programs a sequence: the most with the least cost, waves times the tiles of `new` keys in a share.

    A wave is the `at_once` programs that the GPU runs at a time.
    """

    def cost(splits: int) -> tuple[int, int]:
        share = cdiv(cdiv(capacity, splits), 16) * 16
        waves = cdiv(sequences * splits, at_once)
        return waves * cdiv(share, new), waves

    most = max(1, min(MAX_PROGRAMS_A_HEAD, cdiv(capacity, min(64, new))))
    return min(range(most, 0, -1), key=cost)


def _of_logits(
    row: int, block_h: int, convolved: bool, batch: int, capacity: int, sms: int, room: int, splits: int
) -> StepLaunch:
    block_n, warps, stages, registers = max(32, 4096 // block_h), 8, 1, 128
    if not convolved:
        block_n = max(32, min(block_n, TILE_BYTES // row))
        while block_n > 64 and batch * cdiv(capacity, block_n) < sms:
            block_n //= 2
        free = room // 2 - 16 * row - 8 * block_h * block_n - 8192
        stages = max((n for n in (2, 3, 4, 6) if (n - 1) * block_n * row <= free), default=2)
        warps, registers = 4, 168
    return StepLaunch(splits or _in_turn(cdiv(capacity, block_n)), {"BLOCK_N": block_n}, warps, stages, registers)


def _early(
    span: int, operation: Operation, itemsize: int, heads: int, batch: int, capacity: int, sms: int, room: int
) -> StepLaunch:
    rows = (operation.post_conv or ONE_TAP).query_taps - 1
    at_once = next((n for n in (4, 2) if 16 * rows * n * span * itemsize <= room // 2), 1)  # bands stay loaded
    blocks = next((n for n in BLOCKS if n * rows * at_once * span * itemsize <= OLDER_BYTES), 1)
    programs = max(1, min(cdiv(capacity, 16 * blocks), sms // (batch * cdiv(heads, at_once))))
    return StepLaunch(programs, {"AT_ONCE": at_once, "BLOCK_M": blocks}, 4, 1, 128)


def values_blocks(operation: Operation, head_dim: int, heads: int, itemsize: int, room: int) -> int:
    """Blocks of 16 keys in a tile of the V programs, which have so many bytes of shared memory; 0 if none fits."""
    row, block_h = max(16, next_power_of_2(head_dim)) * itemsize, max(16, next_power_of_2(heads))
    return next((n for n in BLOCKS if _mixed(operation, n, block_h, itemsize) + _block_v(n, row) * row <= room), 0)


def _mixed(operation: Operation, blocks: int, block_h: int, itemsize: int) -> int:
    """Bytes of shared memory: all heads' bands, a tile of their logits, and its convolved and mixed results."""
    convolved = band(operation)[1] * (16 + blocks) if operation.post_conv else 0
    return block_h * (convolved * itemsize + 16 * blocks * (itemsize + 4))


def _block_v(blocks: int, row: int) -> int:
    return max(16, min(16 * blocks, TILE_BYTES // row))


def _of_values(
    operation: Operation, itemsize: int, head_dim: int, heads: int, kv_heads: int, batch: int, capacity: int, sms: int,
    room: int, splits: int,
) -> StepLaunch:  # fmt: skip
    row, block_h = max(16, next_power_of_2(head_dim)) * itemsize, max(16, next_power_of_2(heads))
    blocks = max(1, values_blocks(operation, head_dim, heads, itemsize, room))
    programs = splits or _in_turn(cdiv(capacity, 16 * blocks))
    a_part = cdiv(kv_heads, min(kv_heads, max(1, 2 * sms // (batch * programs))))
    parts = cdiv(kv_heads, a_part)
    block_v = _block_v(blocks, row)
    ahead = min(a_part, AHEAD_BYTES // (batch * programs * parts * 16 * blocks * row))
    free = min(room // 3 - 8 * 1024, room - _mixed(operation, blocks, block_h, itemsize))
    stages = max((n for n in (2, 3, 4) if (n - 1) * block_v * row <= free), default=2)
    warps = max(8, min(16, block_h * band(operation)[1] // 64))
    tiles = {
        "BLOCK_M": blocks, "KV_HEADS": a_part, "BLOCK_V": block_v, "AHEAD": ahead,
        "EARLY": operation.pre_conv is not None,
    }  # fmt: skip
    return StepLaunch(programs, tiles, warps, stages, 128)


def _in_turn(tiles: int) -> int:
    """Programs that take tiles in turn, in the fewest and most equal rounds."""
    return cdiv(tiles, cdiv(tiles, MAX_PROGRAMS))
