"""The constants of hopper_heads.cu for a shape, and the copy engine's maps of the caches of keys and values."""

from __future__ import annotations

import ctypes
import functools
from ctypes import c_int
from dataclasses import dataclass, replace
from typing import NamedTuple, TypeGuard

import torch
from torch import Tensor

from mta_kernels.call_memory import keep
from mta_kernels.conv_attention.cuda_decode.plan import FOLDER, DecodePlan, KernelConstants
from mta_kernels.conv_attention.hopper.source import FOLDER as HOPPER
from mta_kernels.conv_attention.hopper.source import wgmma_header
from mta_kernels.conv_attention.hopper.tensor_maps import TensorMap, encode, has_describable_strides, outer_strides
from mta_kernels.gpu_limits import capability, shared_memory_limit, sm_count
from mta_kernels.nvrtc.compiler import Source, headers_in
from mta_kernels.nvrtc.structures import ELEMENTS, fields
from mta_kernels.operation import Convolution

HEAD_DIMS, QUERY_TAPS, KEY_TAPS = range(64, 129, 8), 8, 16  # taps at most
NARROW, FEWEST_OF_TWO = 64, 2048  # two query heads a KV head need so many keys a program up to this head dim
FEWEST_KEYS = 256  # of a program whose warp groups share tiles: many_heads.cu is faster with fewer
HEADS, MOST_SHARING = 8, 2  # of a consumer warp group, and warp groups that share a tile
KEYS, RUN = 128, 4  # of a tile, and of a thread
GROUP = 8 * RUN  # keys of a warp, the fewest that a copy takes
VALUES = 8  # the fewest that a copy takes in pages
SLAB = 64  # numbers of a row that one copy takes
MOST_STAGES = 12
# Registers of a consumer's threads and of the producer's, by the number of consumer warp groups.
REGISTERS = {1: (240, 40), 2: (232, 40), 3: (152, 56), 4: (112, 32)}
NARROW_REGISTERS = REGISTERS | {4: (104, 64)}  # up to NARROW: else the producer of pages spills some
PROMOTION = 128  # bytes of an L2 fetch from memory: faster than 256
MAX_MAPS = 1024


@dataclass(frozen=True)
class HopperConstants(KernelConstants):
    """The constants of hopper_heads.cu and merge.cu.

    `teams` of `sharing` consumer warp groups, of `heads` query heads each, take tiles in turn, from a ring of `stages`
    buffers. If `last_adds_up`, the last of the programs that share a KV head adds up their parts; else merge.cu does.
    """

    teams: int
    stages: int = 0
    last_adds_up: bool = False

    @functools.cached_property
    def without_merge(self) -> HopperConstants:
        """The same, with `last_adds_up`."""
        return replace(self, last_adds_up=True)

    @property
    def consumers(self) -> int:
        return self.teams * self.sharing

    @property
    def threads(self) -> int:
        return 128 * (self.consumers + 1)

    @property
    def delay(self) -> int:
        """Keys by which a tile's scores and values lag behind its columns."""
        behind = self.conv.key_taps - 1 - self.conv.pad
        return -(-behind // VALUES) * VALUES if self.paged else behind

    @property
    def columns(self) -> int:
        """Folded queries of a warp group, with those that pad a product."""
        return -(-self.heads * self.conv.key_taps // 8) * 8

    @property
    def _slabs(self) -> int:
        return -(-self.head_dim // SLAB)

    @property
    def stage_bytes(self) -> int:
        """Bytes of a buffer and its two mbarriers."""
        return self._slabs * KEYS * SLAB * 2 + 16

    @property
    def shared_memory(self) -> int:
        """Bytes a program takes, as hopper_layout.cuh lays them out."""
        query_taps, key_taps, pad = self.conv.query_taps, self.conv.key_taps, self.conv.pad
        all_heads, newest, warps = self.heads * self.sharing, query_taps - 1, 4 * self.consumers
        folded = self.sharing * self._slabs * self.columns * SLAB * 2
        sums = self.consumers * self.heads * (self.depth + 4) * 4
        carried = 5 * self.consumers * self.heads * -(-(pad + self.delay) // RUN) * RUN * 4
        span = newest + key_taps - 1 - pad if newest else 0
        statistics = all_heads * (span + 1) * 4 + 2 * warps * self.heads * 4
        barriers = 8 + 2 * self.teams * 8 + self.consumers * 8 + 8
        beside = max(folded, sums) + self.consumers * KEYS * 16 + carried + statistics + barriers
        return self.stages * self.stage_bytes + beside

    def source(self, architecture: str = "sm_90a") -> Source:
        """The source, compiled for sm_90a whatever the architecture."""
        registers = NARROW_REGISTERS if self.head_dim <= NARROW else REGISTERS
        consumer_registers, producer_registers = registers[self.consumers]
        element = ELEMENTS[self.dtype]
        constants = self.constants() | {
            "FEW_HEADS": 0, "ALIGNED": 1, "BLOCK": KEYS // 8, "WARPS": 4 * self.consumers, "STAGES": self.stages,
            "CONSUMER_REGISTERS": consumer_registers, "PRODUCER_REGISTERS": producer_registers,
            "LAST_ADDS_UP": int(self.last_adds_up), "SHARED_BYTES": self.shared_memory,
        }  # fmt: skip
        headers = headers_in(HOPPER, FOLDER) | {"wgmma.cuh": wgmma_header((self.columns, element), (8, element))}
        return Source(FOLDER / "hopper_heads.cu", "sm_90a", constants, headers)


@functools.cache
def choose_hopper_plan(
    dtype: torch.dtype, head_dim: int, conv: Convolution, group: int, paged: bool, device: torch.device
) -> DecodePlan | None:
    """The plan for `group` query heads a KV head, or None if the kernel does not take them, or the GPU is no Hopper."""
    if capability(device) != (9, 0):
        return None
    if group < 2 or head_dim not in HEAD_DIMS or conv.query_taps > QUERY_TAPS or conv.key_taps > KEY_TAPS:
        return None
    head_blocks = -(-group // (HEADS * MOST_SHARING))
    together = -(-group // head_blocks)
    heads = 4 if together <= 4 else HEADS
    sharing = -(-together // heads)
    teams = 3 if sharing == 1 else 2
    empty = HopperConstants(dtype, head_dim, conv, heads, sharing, head_blocks, paged, teams)
    stages = min((shared_memory_limit(device) - empty.shared_memory) // empty.stage_bytes, MOST_STAGES)
    if stages < 4:
        return None
    return DecodePlan(replace(empty, stages=stages), max(1, sm_count(device) // head_blocks))


def pays(plan: DecodePlan | None, group: int, keys: int) -> TypeGuard[DecodePlan]:
    """Whether there is a plan, and it is faster than the other kernels' plans for so many keys of all KV heads."""
    if plan is None:
        return False
    if group == 2 and plan.constants.head_dim <= NARROW:
        return keys >= plan.programs * FEWEST_OF_TWO
    return plan.constants.sharing == 1 or keys >= plan.programs * FEWEST_KEYS


class Maps(ctypes.Structure):
    """`struct Maps` of hopper_layout.cuh."""

    _fields_ = (
        *fields(TensorMap, "key_tile key_group value_tile value_part"), *fields(c_int, "groups_apart heads_apart"),
        ("padding", c_int * 14),
    )  # fmt: skip


class KeyLayout(NamedTuple):
    """A cache of keys as groups of GROUP keys in two dimensions; `..._apart` is the distance of sequences or pages."""

    groups: int
    heads: int
    head_stride: int
    groups_apart: int
    heads_apart: int


def key_layout(k: Tensor, paged: bool = False) -> KeyLayout | None:
    """How the copy engine sees `k [B, Hkv, N, D]`, whose rows are whole chunks, or None if it cannot."""
    batch, heads, rows, _ = k.shape
    if rows % (KEYS if paged else GROUP) or not has_describable_strides(k):  # it would read beyond
        return None
    groups = rows // GROUP
    of_batch, of_head, of_row = outer_strides(k)
    if batch == 1:
        return KeyLayout(groups, heads, of_head, 0, 0)
    if heads == 1 or of_batch == heads * of_head:
        return KeyLayout(groups, batch * heads, of_batch // heads, 0, heads)
    if of_batch == rows * of_row:
        return KeyLayout(batch * groups, heads, of_head, groups, 0)
    return None


def are_describable(k: Tensor, v: Tensor, paged: bool) -> bool:
    """Whether the copy engine can read these caches, whose rows are whole chunks."""
    return key_layout(k, paged) is not None and has_describable_strides(v)


_maps: dict[tuple, Maps] = {}


def maps(k: Tensor, v: Tensor, constants: HopperConstants) -> Maps:
    """The copy engine's maps of caches that `are_describable`; cached."""
    key = k.data_ptr(), v.data_ptr(), k.shape, k.stride(), v.stride(), k.dtype, constants.paged, constants.delay
    found = _maps.get(key)
    return keep(_maps, key, _describe(k, v, constants), MAX_MAPS) if found is None else found


def _describe(k: Tensor, v: Tensor, constants: HopperConstants) -> Maps:
    layout = key_layout(k, constants.paged)
    assert layout is not None, "the caller has asked"
    row = outer_strides(k)[2]
    batch, heads, rows, head_dim = v.shape

    def of_keys(groups: int) -> TensorMap:
        extents = [head_dim, 8, RUN, layout.groups, layout.heads]
        return encode(
            k, extents, [RUN * row, row, GROUP * row, layout.head_stride], [SLAB, 8, RUN, groups, 1], PROMOTION
        )

    def of_values(rows_at_once: int) -> TensorMap:
        return encode(
            v, [head_dim, rows, heads, batch], [*reversed(outer_strides(v))], [SLAB, rows_at_once, 1, 1], PROMOTION
        )

    value_tile, value_part = (KEYS - constants.delay, VALUES) if constants.paged else (KEYS, GROUP)
    return Maps(
        of_keys(KEYS // GROUP), of_keys(1), of_values(value_tile), of_values(value_part),
        layout.groups_apart, layout.heads_apart,
    )  # fmt: skip
