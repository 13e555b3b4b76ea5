"""The constants of the row kernels for a shape, and how their blocks share the shared memory of a GPU."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from mta_kernels.nvrtc.compiler import Source, headers_in
from mta_kernels.nvrtc.structures import ELEMENTS

FOLDER = Path(__file__).parent
CLUSTERS = (1, 2, 4, 8, 16)  # blocks that share a row
PORTABLE = 8  # at most, unless one allows more, which an H100 has
MOST_HEADS = {False: 64, True: 32}  # forward, and backward, whose sums of all pairs of heads must fit into registers
# Stages, blocks an SM and warps that were best of those measured on an H200, best first: forward and backward.
MEASURED = {False: ((2, 3, 4), (1, 3, 7)), True: ((2, 3, 4), (3, 1, 11))}
RESERVED = 1024  # bytes of shared memory that each block costs beside its own
THREADS_AN_SM = 1536  # of sm_86 to sm_120; others have 2048
MOST_BLOCKS = 16  # an SM


@dataclass(frozen=True)
class RowConstants:
    """The constants of a kernel.

    `bulk` has the copy engine bring the rows, `blocks` an SM bounds the registers of a thread.
    """

    dtype: torch.dtype
    heads: int
    backward: bool
    mixed_before: bool
    mixed_after: bool
    bulk: bool
    cluster: int
    warps: int
    blocks: int

    @property
    def threads(self) -> int:
        return 32 * (self.warps + self.bulk)

    @functools.cached_property
    def fixed_bytes(self) -> int:
        """Of shared memory before the stages, as layout.cuh lays it out."""
        padded = -(-self.heads // 16) * 16
        pairs = (self.warps + 2 * self.cluster) * padded * 8
        return -(-(112 + 1024 + 2 * padded * (2 * padded + 16) + pairs) // 128) * 128

    @property
    def kept(self) -> bool:
        """Whether a forward keeps exponentials: over any reference, bfloat16 has the range for them, float16 not."""
        return self.bulk and not self.backward and self.dtype == torch.bfloat16 and self.heads <= 32

    def source(self, architecture: str) -> Source:
        squares = -(-self.heads // 16)
        tiles = 2 if self.backward else 4
        if self.threads * self.blocks > 540:  # registers
            tiles //= 2
        tiles = max(1, tiles // squares)
        constants = {
            "ELEMENT": ELEMENTS[self.dtype], "HEADS": self.heads, "CLUSTER": self.cluster, "WARPS": self.warps,
            "BULK": int(self.bulk), "PRE_MIX": int(self.mixed_before), "POST_MIX": int(self.mixed_after),
            "OPERANDS": 1 + self.backward, "BLOCKS": self.blocks, "TILES": tiles, "FIXED_BYTES": self.fixed_bytes,
            "KEEP": int(self.kept),
        }  # fmt: skip
        path = FOLDER / ("backward.cu" if self.backward else "forward.cu")
        return Source(path, architecture, constants, headers_in(FOLDER))


@dataclass(frozen=True)
class RowPlan:
    """Constants, the columns of a row that a block has room for, and how many rows it has at a time."""

    constants: RowConstants
    segment: int
    stages: int

    @property
    def pitch(self) -> int:
        """Bytes of a head's columns in shared memory: odd units of 16, so that no banks conflict."""
        return 2 * self.segment + 16

    @functools.cached_property
    def shared_memory(self) -> int:
        """Bytes of a block."""
        constants = self.constants
        return constants.fixed_bytes + self.stages * (1 + constants.backward) * constants.heads * self.pitch

    def blocks_an_sm(self, shared_memory: int) -> int:
        """How many run at once where a block may have so much shared memory, and an SM `RESERVED` more."""
        room = (shared_memory + RESERVED) // (self.shared_memory + RESERVED)
        return max(0, min(room, MOST_BLOCKS, THREADS_AN_SM // self.constants.threads))


def plan_on(
    capability: tuple[int, int], shared_memory: int, dtype: torch.dtype, heads: int, keys: int, *, backward: bool,
    mixed: tuple[bool, bool] = (True, True),
) -> RowPlan | None:  # fmt: skip
    """The plan for rows of up to `keys` columns, or None if they do not fit into the shared memory of such a GPU.

    A block may have `shared_memory` bytes. `mixed` says whether there are mixings before and after the softmax.
    """
    for plan in _plans(capability, dtype, heads, keys, backward, mixed):
        if plan.blocks_an_sm(shared_memory) >= plan.constants.blocks:
            return plan
    return None


def _plans(
    capability: tuple[int, int], dtype: torch.dtype, heads: int, keys: int, backward: bool, mixed: tuple[bool, bool]
) -> Iterator[RowPlan]:
    """The best first.

    Rows come while others are computed, several blocks an SM keep its memory busy, and small clusters wait less for
    each other.
    """
    wide = backward and heads > 16  # whose sums take 64 registers of each thread
    clusters = [x for x in CLUSTERS if x == 1 or 9 <= capability[0] < (12 if x <= PORTABLE else 10)]
    if capability[0] >= 9 and heads <= 16:
        for stages, blocks, warps in MEASURED[backward]:
            for cluster in clusters:
                constants = RowConstants(dtype, heads, backward, *mixed, True, cluster, warps, blocks)
                yield RowPlan(constants, segment_of(keys, cluster), stages)
    for blocks in (2, 1) if wide else (3, 2, 1):
        for cluster in clusters:
            segment = segment_of(keys, cluster)
            warps = warps_of(segment, heads, blocks, wide)
            constants = RowConstants(dtype, heads, backward, *mixed, capability[0] >= 9, cluster, warps, blocks)
            yield RowPlan(constants, segment, 1)


def segment_of(keys: int, cluster: int) -> int:
    """Columns of a row that each block of a cluster has, in whole units of 64."""
    return -(-(-(-keys // 8) * 8) // (64 * cluster)) * 64


def warps_of(segment: int, heads: int, blocks: int, wide: bool) -> int:
    """Warps that compute: so many that each has about 128 columns of 16 heads, or more."""
    wanted = segment * -(-heads // 16) // 128
    most = 4 if blocks == 3 else 8
    if wide:  # each quarter of an SM has the registers of two of its warps, the copying one among them
        most = 3 if blocks == 2 else 7
    return next((warps for warps in (8, 7, 4, 3, 2) if warps <= min(most, wanted)), 1)
