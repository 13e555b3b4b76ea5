"""The constants of the decode kernels for a shape, and how many programs of them a GPU runs at once."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from mta_kernels.gpu_limits import shared_memory_limit, sm_count
from mta_kernels.nvrtc.compiler import Source, headers_in
from mta_kernels.nvrtc.kernel import KernelDescription
from mta_kernels.nvrtc.structures import ELEMENTS
from mta_kernels.operation import Convolution

if TYPE_CHECKING:
    from mta_kernels.conv_attention.cuda_decode.hopper_plan import HopperConstants

FOLDER = Path(__file__).parent
MOST_FEW_HEADS = 4  # of few_heads.cu
WARP_HEADS, MOST_SHARING = 8, 2  # of many_heads.cu: of a warp, and warps of a team
UNIT = 16  # keys: as in work.cuh
FEWEST_KEYS = 64  # a program: FEWEST_UNITS of work.cuh
BYTES_AN_SM = 128 * 1024  # of buffers: enough in flight to saturate the memory of an H200
WARPS_AN_SM = 8  # for which an SM has registers in any case
FEW_IDLE = 16  # one program in so many may have no keys where heads are shared evenly: as in work.cuh
MERGE_THREADS = 256


@dataclass(frozen=True)
class KernelConstants:
    """The constants that all kernels share. `head_blocks` programs have the query heads of a KV head."""

    dtype: torch.dtype
    head_dim: int
    conv: Convolution
    heads: int
    sharing: int
    head_blocks: int
    paged: bool

    kernel_name = "cuda_decode"

    @property
    def depth(self) -> int:
        return -(-self.head_dim // 16) * 16

    def constants(self) -> dict[str, Any]:
        return {
            "ELEMENT": ELEMENTS[self.dtype], "HEAD_DIM": self.head_dim, "QUERY_TAPS": self.conv.query_taps,
            "KEY_TAPS": self.conv.key_taps, "PAD": self.conv.pad, "HEADS": self.heads, "SHARING": self.sharing,
            "HEAD_BLOCKS": self.head_blocks, "PAGED": int(self.paged), "MERGE_THREADS": MERGE_THREADS,
        }  # fmt: skip


@dataclass(frozen=True)
class MergeConstants:
    """The constants of merge.cu after a kernel."""

    behind: KernelDescription

    kernel_name, threads, shared_memory = "cuda_decode_merge", MERGE_THREADS, MERGE_THREADS * 24

    def source(self, architecture: str) -> Source:
        found = self.behind.source(architecture)
        constants = {**found.constants, "SHARED_BYTES": self.shared_memory}
        return replace(found, path=FOLDER / "merge.cu", constants=constants)


@dataclass(frozen=True)
class DecodeConstants(KernelConstants):
    """The constants of few_heads.cu, or of many_heads.cu and merge.cu: `sharing` warps of `heads` heads are a team."""

    aligned: bool
    warps: int
    stages: int

    @property
    def threads(self) -> int:
        return 32 * self.warps

    @property
    def few_heads(self) -> bool:
        return self.heads <= MOST_FEW_HEADS

    @property
    def last_adds_up(self) -> bool:
        return self.few_heads

    @property
    def block(self) -> int:
        """Keys of an eighth of a tile."""
        return 4 if self.few_heads or self.conv.key_taps <= 17 else 8

    @property
    def _padded_row(self) -> int:
        return self.depth * 2 + 16

    @property
    def ring_bytes(self) -> int:
        """The buffers of a program."""
        block = self.block * self._padded_row if self.few_heads else self.block * self.depth * 2 + 16
        return self.warps // self.sharing * self.stages * 2 * 8 * block

    @functools.cached_property
    def shared_memory(self) -> int:
        """Bytes a program takes, as fold.cuh or queries.cuh lay them out."""
        return self.ring_bytes + (self._beside_few_heads if self.few_heads else self._beside_many_heads)

    @property
    def _beside_few_heads(self) -> int:
        query_taps, key_taps, keys = self.conv.query_taps, self.conv.key_taps, 8 * self.block
        newest, row_tiles = query_taps - 1, -(-self.heads * key_taps // 8)
        scratch = max(row_tiles * 8 * (keys + 5) * 4, self.heads * (self.depth + 4) * 4) + keys * 16
        window = (self.heads * query_taps + newest) * self._padded_row
        preparation = window + self.heads * query_taps * (key_taps + newest) * 4
        beside = -(-row_tiles // 2) * 16 * self._padded_row + -(-max(self.warps * scratch, preparation) // 16) * 16
        beside += (self.heads * key_taps * newest + 1) // 2 * 8 + self.warps * self.heads * 8
        return -(-beside // 16) * 16 + 2 * self.warps * self.heads * key_taps * 4 + 4

    @property
    def _beside_many_heads(self) -> int:
        query_taps, key_taps = self.conv.query_taps, self.conv.key_taps
        queries = self.sharing * -(-query_taps // 2) * 16 * self._padded_row
        scratch = self.warps * self.heads * (self.depth + 4) * 4
        taps = self.sharing * query_taps * -(-key_taps // 4) * 8 * 16
        return taps + max(queries, scratch) + self.warps * (self.heads * 8 + 2 * -(-(key_taps - 1) // 4) * 8 * 16)

    def source(self, architecture: str) -> Source:
        constants = self.constants() | {
            "FEW_HEADS": int(self.few_heads), "ALIGNED": int(self.aligned), "BLOCK": self.block, "WARPS": self.warps,
            "STAGES": self.stages, "SHARED_BYTES": self.shared_memory,
        }  # fmt: skip
        file = "few_heads.cu" if self.few_heads else "many_heads.cu"
        return Source(FOLDER / file, architecture, constants, headers_in(FOLDER))


@dataclass(frozen=True)
class DecodePlan:
    """Constants, and how many programs run at once, `head_blocks` times each."""

    constants: DecodeConstants | HopperConstants
    programs: int

    def programs_for(self, batch_kv_heads: int, capacity: int) -> int:
        """Programs that can have work, where a KV head has at most so many keys."""
        return min(self.programs, max(1, batch_kv_heads * -(-capacity // FEWEST_KEYS)))

    def splits_for(self, batch_kv_heads: int, length: int) -> int:
        """The programs that share a KV head's keys if all heads have so many, as work.cuh decides; rounded up."""
        programs = self.programs_for(batch_kv_heads, length)
        each = programs // batch_kv_heads
        if each * batch_kv_heads * FEW_IDLE >= programs * (FEW_IDLE - 1):
            return min(each, max(1, -(-length // UNIT) * UNIT // FEWEST_KEYS))
        return -(-programs // batch_kv_heads)


@functools.cache
def choose_plan(
    dtype: torch.dtype, head_dim: int, conv: Convolution, group: int, paged: bool, aligned: bool, device: torch.device
) -> DecodePlan:
    """The plan that reads the cache least often, and among these the most warps and stages that fit.

    It is for `group` query heads a KV head. Raises ValueError if nothing fits into the GPU's shared memory.
    """
    limit = shared_memory_limit(device)
    for head_blocks in range(-(-group // (WARP_HEADS * MOST_SHARING)), group + 1):
        together = -(-group // head_blocks)
        few = together <= MOST_FEW_HEADS
        heads = 1 << (together - 1).bit_length() if few else WARP_HEADS
        sharing = -(-together // heads)
        for teams, stages in _few_heads_shapes(head_dim) if few else _many_heads_shapes(head_dim, sharing):
            constants = DecodeConstants(
                dtype, head_dim, conv, heads, sharing, head_blocks, paged, aligned, teams * sharing, stages
            )
            if constants.shared_memory > limit:
                continue
            resident = min((limit + 1024) // (constants.shared_memory + 1024), max(1, WARPS_AN_SM // constants.warps))
            an_sm = max(1, min(resident, round(BYTES_AN_SM / constants.ring_bytes)))
            return DecodePlan(constants, max(1, an_sm * sm_count(device) // head_blocks))
    raise ValueError(
        f"{conv.query_taps}x{conv.key_taps} taps and head_dim {head_dim} need more than the {limit} bytes of "
        "shared memory of this GPU; backend='reference' needs none"
    )


def _few_heads_shapes(head_dim: int) -> Iterator[tuple[int, int]]:
    """Warps and stages, the best first: see decision 59."""
    if head_dim <= 64:
        yield from ((11, 1), (8, 2), (6, 2))
    if head_dim <= 128:
        yield 6, 1
    yield from ((4, 2), (4, 1), (3, 1), (2, 1), (1, 1))


def _many_heads_shapes(head_dim: int, sharing: int) -> Iterator[tuple[int, int]]:
    """Teams and stages, the best first: see decision 76. More than 8 warps have 168 registers a thread."""
    if head_dim <= 64:
        yield from ((12 // sharing - (sharing == 1), 2), (8 // sharing, 2))
    if head_dim <= 128:
        yield from ((6, 2), (5, 2)) if sharing == 1 else ((4, 2),)
    yield from ((teams, stages) for stages in (2, 1) for teams in range(4 // sharing, 0, -1))


def has_whole_chunks(x: Tensor) -> bool:
    """Whether rows of 16-bit numbers are contiguous, begin and end at multiples of 16 bytes, and have small strides.

    The kernels take strides of such rows in 32 bits.
    """
    batch, heads, row, number = x.stride()
    aligned = not (batch | heads | row | x.shape[3]) % 8 and not x.data_ptr() % 16
    return number == 1 and aligned and row < 1 << 30
