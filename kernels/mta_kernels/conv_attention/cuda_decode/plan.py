"""The constants of decode.cu for a shape, and how many programs of it a GPU takes."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from mta_kernels.gpu_limits import shared_memory_limit, sm_count
from mta_kernels.nvrtc.compiler import Source, headers_in
from mta_kernels.nvrtc.structures import ELEMENTS
from mta_kernels.operation import Convolution

FOLDER = Path(__file__).parent
HEADERS = ("sm80_decode.cuh", "work.cuh", "layout.cuh", "stream.cuh", "fold.cuh", "merge.cuh")
KEYS = 32  # of a warp's tile
UNIT = 16  # keys: as in work.cuh
FEWEST_KEYS = 64  # a program: FEWEST_UNITS of work.cuh
BYTES_AN_SM = 128 * 1024  # of buffers: enough on their way to keep the memory of an H200 busy
WARPS_AN_SM = 8  # that have registers whatever a program takes
MOST_OUT_COLUMNS = 256  # of eight heads each, times depth: above it registers spill
FEW_IDLE = 16  # one program in so many may have no keys where heads are shared evenly: as in work.cuh


@dataclass(frozen=True)
class DecodeConstants:
    """The constants of decode.cu.

    A program has `passes` times `heads` (1, 2 or 4) query heads of a KV head; `head_blocks` programs have all of them.
    """

    dtype: torch.dtype
    head_dim: int
    conv: Convolution
    heads: int
    passes: int
    paged: bool
    aligned: bool
    warps: int
    stages: int
    head_blocks: int

    @property
    def depth(self) -> int:
        return -(-self.head_dim // 16) * 16

    @property
    def row_bytes(self) -> int:
        """Of a row in shared memory."""
        return self.depth * 2 + 16

    @property
    def ring_bytes(self) -> int:
        """The buffers of a program."""
        return self.warps * self.stages * 2 * KEYS * self.row_bytes

    @functools.cached_property
    def shared_memory(self) -> int:
        """Bytes a program takes, as layout.cuh lays them out."""
        query_taps, key_taps = self.conv.query_taps, self.conv.key_taps
        newest, all_heads = query_taps - 1, self.heads * self.passes
        row_tiles = -(-self.heads * key_taps // 8)
        folded = -(-row_tiles // 2) * 16 * self.row_bytes
        out = min(8, all_heads) * (self.depth + 4) * 4
        scratch = max(row_tiles * 8 * (KEYS + 5) * 4, out) + -(-all_heads // 8) * KEYS * 16
        window = (all_heads * query_taps + newest) * self.row_bytes
        preparation = window + all_heads * query_taps * (key_taps + newest) * 4
        shared = self.ring_bytes + self.passes * folded
        shared += -(-max(self.warps * scratch, preparation) // 16) * 16
        shared += (all_heads * key_taps * newest + 1) // 2 * 8
        shared += self.warps * all_heads * 8
        if self.passes == 1:
            shared = -(-shared // 16) * 16 + 2 * self.warps * all_heads * key_taps * 4
        return shared + 4

    def source(self, architecture: str) -> Source:
        constants = {
            "ELEMENT": ELEMENTS[self.dtype], "HEAD_DIM": self.head_dim, "QUERY_TAPS": self.conv.query_taps,
            "KEY_TAPS": self.conv.key_taps, "PAD": self.conv.pad, "HEADS": self.heads, "PASSES": self.passes,
            "PAGED": int(self.paged), "ALIGNED": int(self.aligned), "WARPS": self.warps, "STAGES": self.stages,
            "HEAD_BLOCKS": self.head_blocks, "SHARED_BYTES": self.shared_memory,
        }  # fmt: skip
        headers = headers_in(FOLDER, HEADERS)
        return Source(FOLDER / "decode.cu", architecture, constants, headers)


@dataclass(frozen=True)
class DecodePlan:
    """Constants, and how many programs run at once, `head_blocks` times each."""

    constants: DecodeConstants
    programs: int

    def programs_for(self, batch_kv_heads: int, capacity: int) -> int:
        """Programs that there can be work for, where a KV head has at most so many keys."""
        return min(self.programs, max(1, batch_kv_heads * -(-capacity // FEWEST_KEYS)))

    def splits_for(self, batch_kv_heads: int, length: int) -> int:
        """The programs that share a KV head's keys where all have so many, as work.cuh decides; rounded up."""
        programs = self.programs_for(batch_kv_heads, length)
        each = programs // batch_kv_heads
        if each * batch_kv_heads * FEW_IDLE >= programs * (FEW_IDLE - 1):
            return min(each, max(1, -(-length // UNIT) * UNIT // FEWEST_KEYS))
        return -(-programs // batch_kv_heads)


@functools.cache
def choose_plan(
    dtype: torch.dtype, head_dim: int, conv: Convolution, group: int, paged: bool, aligned: bool, device: torch.device
) -> DecodePlan:
    """`plan_on` a device, of `group` query heads a KV head."""
    limit, multiprocessors = shared_memory_limit(device), sm_count(device)
    return plan_on(limit, multiprocessors, dtype, head_dim, conv, group, paged, aligned)


def plan_on(
    limit: int, multiprocessors: int, dtype: torch.dtype, head_dim: int, conv: Convolution, group: int, paged: bool,
    aligned: bool,
) -> DecodePlan:  # fmt: skip
    """The plan that reads the cache least often, and of these the one with the most warps and stages that fit.

    The GPU has so many multiprocessors, and `limit` bytes of shared memory for a program. Raises ValueError if nothing
    fits there.
    """
    for head_blocks in range(1, group + 1):
        together = -(-group // head_blocks)
        heads = min(4, 1 << (together - 1).bit_length())
        passes = -(-together // heads)
        for warps, stages in _shapes(head_dim, passes, paged):
            constants = DecodeConstants(
                dtype, head_dim, conv, heads, passes, paged, aligned, warps, stages, head_blocks
            )
            if constants.shared_memory > limit or -(-together // 8) * constants.depth > MOST_OUT_COLUMNS:
                continue
            resident = min((limit + 1024) // (constants.shared_memory + 1024), WARPS_AN_SM // warps)
            an_sm = max(1, min(resident, round(BYTES_AN_SM / constants.ring_bytes)))
            return DecodePlan(constants, max(1, an_sm * multiprocessors // head_blocks))
    raise ValueError(
        f"{conv.query_taps}x{conv.key_taps} taps and head_dim {head_dim} need more than the {limit} bytes of "
        "shared memory of this GPU; backend='reference' needs none"
    )


def _shapes(head_dim: int, passes: int, paged: bool) -> Iterator[tuple[int, int]]:
    """Warps and stages, the best first: see decision 59."""
    if head_dim <= 64:
        if passes == 1 and not paged:  # else registers spill
            yield 11, 1
        yield from ((8, 2), (6, 2))
    if head_dim <= 128:
        if passes > 1:
            yield 8, 1
        yield 6, 1
    yield from ((4, 2), (4, 1), (3, 1), (2, 1), (1, 1))


def has_whole_chunks(x: Tensor) -> bool:
    """Whether rows of numbers of two bytes are contiguous, begin and end at multiples of 16 bytes, and are near enough.

    Strides of such rows are taken in 32 bits.
    """
    batch, heads, row, number = x.stride()
    aligned = not (batch | heads | row | x.shape[3]) % 8 and not x.data_ptr() % 16
    return number == 1 and aligned and row < 1 << 30
