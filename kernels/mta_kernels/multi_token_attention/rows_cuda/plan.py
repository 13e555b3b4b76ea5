"""The constants of the row kernels for a shape, and how their blocks share the shared memory of a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from mta_kernels.nvrtc.compiler import Source, headers_in

FOLDER = Path(__file__).parent
INSTRUCTIONS = FOLDER.parents[1] / "attention"
HEADERS = ("rows_instructions.cuh", "layout.cuh", "copies.cuh", "mixing.cuh", "sums.cuh", "rows.cuh")
ELEMENTS = {torch.float16: "Half", torch.bfloat16: "Bfloat16"}
CLUSTERS = (1, 2, 4, 8)  # blocks that share a row: 8 are portable
MOST_HEADS = {False: 64, True: 32}  # forward, and backward, whose sums of all pairs of heads must fit into registers
RESERVED = 1024  # bytes of shared memory that each block costs beside its own
THREADS_AN_SM = 1536  # of sm_86 to sm_120; others have 2048
REGISTERS_AN_SM = 65536
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

    @property
    def fixed_bytes(self) -> int:
        """Of shared memory before the stages, as layout.cuh lays it out."""
        padded = -(-self.heads // 16) * 16
        pairs = (self.warps + 2 * self.cluster) * padded * 8
        return -(-(112 + 1024 + 2 * padded * (2 * padded + 16) + pairs) // 128) * 128

    def source(self, architecture: str) -> Source:
        squares = -(-self.heads // 16)
        tiles = max(1, (2 if self.backward else 4) // squares)
        constants = {
            "ELEMENT": ELEMENTS[self.dtype], "HEADS": self.heads, "CLUSTER": self.cluster, "WARPS": self.warps,
            "BULK": int(self.bulk), "PRE_MIX": int(self.mixed_before), "POST_MIX": int(self.mixed_after),
            "OPERANDS": 1 + self.backward, "BLOCKS": self.blocks, "TILES": tiles, "FIXED_BYTES": self.fixed_bytes,
        }  # fmt: skip
        headers = headers_in(FOLDER, HEADERS) | headers_in(INSTRUCTIONS, ("elements.cuh", "mma.cuh"))
        return Source(FOLDER / ("backward.cu" if self.backward else "forward.cu"), architecture, constants, headers)


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

    @property
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
    """The best first: several blocks an SM keep its memory busy, and small clusters wait less for each other."""
    wide = backward and heads > 16  # whose sums take 64 registers of each thread
    for blocks in (2, 1) if wide else (3, 2, 1):
        for cluster in CLUSTERS if 9 <= capability[0] < 12 else (1,):
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
