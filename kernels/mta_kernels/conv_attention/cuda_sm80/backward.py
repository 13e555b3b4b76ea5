"""Launches backward.cu, whose blocks compute rows of a head, or products of the p and ds that rows stored."""

from __future__ import annotations

import ctypes
import functools
import math
from ctypes import c_float, c_int, c_void_p
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from mta_kernels.allocation import new_empty
from mta_kernels.backend import Gradients
from mta_kernels.conv_attention.banded import FOLDER as BANDED
from mta_kernels.conv_attention.banded.backward_plan import (
    ALIGNED,
    NORM_PARTS,
    BackwardConstants,
    ChunkPlan,
    Chunks,
    ExactArguments,
    GradientPreparation,
)
from mta_kernels.conv_attention.banded.structures import BandedConstants, Inputs, Positions
from mta_kernels.conv_attention.cuda_sm80.forward import beside_eights, in_reach
from mta_kernels.conv_attention.head_chunks import gradients_by_chunks
from mta_kernels.conv_attention.packing import document_factors, rows_that_see
from mta_kernels.gpu_limits import shared_memory_limit, sm_count
from mta_kernels.nvrtc.compiler import Source, headers_in
from mta_kernels.nvrtc.kernel import Kernel, kernel
from mta_kernels.nvrtc.structures import Rows, Weight, fields
from mta_kernels.operation import ONE_TAP, Convolution, Operation, key_padding

FOLDER = Path(__file__).parent
ON_EVERY_GPU = 128  # head dims have tiles up to here; beyond, where thread blocks have 163 KB of shared memory
ABOVE = 16  # rows of zeros


class BackwardTiles(NamedTuple):
    """How a block of backward.cu computes rows."""

    row_groups: int  # of 32 rows
    column_groups: int  # warps that share a group's rows, each with a part of the keys
    keys: int  # of a tile
    chunk: int  # columns of a warp that registers hold at a time
    blocks: int  # that share an SM
    in_registers: bool  # the rows of q and grad_out


@dataclass(frozen=True)
class Sm80BackwardConstants(BackwardConstants):
    """The constants of backward.cu for a shape."""

    tiles: BackwardTiles

    kernel_name = "cuda_backward"

    @property
    def warps(self) -> int:
        return self.tiles.row_groups * self.tiles.column_groups

    @property
    def threads(self) -> int:
        return 32 * self.warps

    @property
    def block_rows(self) -> int:
        """Rows that a block computes whole."""
        return 32 * self.tiles.row_groups - 2 * (self.conv.query_taps - 1)

    @property
    def places(self) -> int:
        """PLACES of backward_layout.cuh."""
        return 64 * self.warps // self.parts

    @property
    def parts(self) -> int:
        """Warps that share the columns of a product, PARTS of backward_layout.cuh."""
        return 4 if self.head_dim > 128 else 2 if self.head_dim > 64 else 1

    def products_of_rows(self, rows: int) -> int:
        """The blocks of products of dq."""
        return -(-rows // self.places)

    @property
    def shared_memory(self) -> int:
        """Bytes a block takes, as backward_layout.cuh lays them out."""
        depth, rows, taps = -(-self.head_dim // 16) * 16, 32 * self.tiles.row_groups, self.conv.query_taps
        beside = beside_eights(self.conv)
        scores = -(-((rows + ABOVE) * ((self.tiles.keys // 8 + beside) | 1) * 16 + 16) // 128) * 128
        queries = rows * depth * 2
        both = max(2 * scores, 2 * queries) if self.tiles.in_registers else 2 * scores + 2 * queries
        of_rows = both + 2 * self.tiles.keys * depth * 2 + taps * (beside + 1) * 128
        stages, product_depth = (3, 64) if self.head_dim > 64 else (2, 32)  # at least
        of_products = stages * product_depth * (self.places + depth) * 2
        return max(of_rows, of_products) + 16

    def source(self, architecture: str) -> Source:
        own = {
            "WARPS": self.warps, "ROW_TILES": 2, "COLUMN_GROUPS": self.tiles.column_groups, "KEYS": self.tiles.keys,
            "CHUNK": self.tiles.chunk, "BLOCKS": self.tiles.blocks,
            "OPERANDS_IN_REGISTERS": int(self.tiles.in_registers), "SHARED_BYTES": self.shared_memory,
        }  # fmt: skip
        return Source(FOLDER / "backward.cu", architecture, self.constants() | own, headers_in(FOLDER, BANDED))

    @property
    def prepared(self) -> BackwardPrepareConstants:
        """The constants of the first launch: few of these change it."""
        return BackwardPrepareConstants(self.dtype, self.head_dim)


@dataclass(frozen=True)
class BackwardPrepareConstants(BandedConstants):
    """The constants of prepare.cu for a shape; none of the convolution's make a difference."""

    conv: Convolution = ONE_TAP
    causal: bool = True
    spans: bool = False

    kernel_name, threads, shared_memory = "cuda_backward_prepare", 256, 32

    def source(self, architecture: str) -> Source:
        return Source(FOLDER / "prepare.cu", architecture, self.constants(), headers_in(FOLDER, BANDED))


# Up to head dim 64, up to 128 and above, the fastest first. The last tiles of the first two lists fit the 99 KB of
# sm_86, sm_89 and sm_120.
SMALL_TILES = (BackwardTiles(4, 1, 64, 32, 2, True), BackwardTiles(4, 1, 32, 32, 2, True))
LARGE_TILES = (
    BackwardTiles(4, 1, 32, 32, 2, False), BackwardTiles(2, 2, 64, 32, 2, False), BackwardTiles(4, 2, 64, 32, 1, False),
    BackwardTiles(2, 2, 64, 32, 1, False),
)  # fmt: skip
WIDE_TILES = BackwardTiles(4, 2, 64, 32, 1, False), BackwardTiles(2, 2, 64, 32, 1, False)


def constants_for(
    dtype: torch.dtype, head_dim: int, conv: Convolution, causal: bool, spans: bool, shared_limit: int
) -> Sm80BackwardConstants | None:
    """With the first tiles that fit a GPU whose blocks can have `shared_limit` bytes, or None; an SM has 1 KB more."""
    tiles = SMALL_TILES if head_dim <= 64 else LARGE_TILES if head_dim <= ON_EVERY_GPU else WIDE_TILES
    found = (Sm80BackwardConstants(dtype, head_dim, conv, causal, spans, x) for x in tiles)
    return next((x for x in found if x.tiles.blocks * (x.shared_memory + 1024) <= shared_limit + 1024), None)


def no_room(head_dim: int, query_taps: int, key_taps: int, shared_limit: int) -> str | None:
    """Why a GPU whose blocks can have `shared_limit` bytes has no tiles for such a backward, in a clause, or None."""
    conv = Convolution(query_taps, key_taps, key_padding(key_taps, "both"))  # other paddings take no more
    if constants_for(torch.bfloat16, head_dim, conv, True, False, shared_limit):
        return None
    return (
        f"the backward of head_dim {head_dim} with {query_taps}x{key_taps} taps needs more shared memory than the "
        f"{shared_limit // 1024} KB that a thread block has on this GPU"
    )


class Sm80BackwardArguments(ctypes.Structure):
    """`struct Arguments` of backward_layout.cuh."""

    _fields_ = (
        ("at", Positions), ("inputs", Inputs), ("grad_out", Rows),
        *fields(c_void_p, "value_norms grad_norms logsumexp delta p ds ds_unit dk dv seen_by dq dweight"),
        *fields(c_float, "scale scale_log2"), *fields(c_int, "chunk_rows pitch"), ("chunks", Chunks),
    )  # fmt: skip


def _gradients(
    operation: Operation, q: Tensor, k: Tensor, v: Tensor, weight: Tensor, out: Tensor, logsumexp: Tensor,
    grad_out: Tensor, spans: Tensor | None,
) -> Gradients:  # fmt: skip
    """Dq in q's dtype, dk, dv and the weight's gradient in float32; logsumexp is contiguous.

    Scratch: p and ds of the chunks of rows in flight, see `ChunkPlan`.
    """
    q, k, v, out, grad_out = map(in_reach, (q, k, v, out, grad_out))
    batch, heads, query_rows, head_dim = q.shape
    kv_heads, key_rows = k.shape[1:3]
    batch_heads, device = batch * heads, q.device
    constants = constants_for(
        q.dtype, head_dim, operation.conv, operation.causal, spans is not None, shared_memory_limit(device)
    )
    assert constants, "no_room is asked first"
    plan = _plan(constants, batch_heads, query_rows, key_rows, sm_count(device) * constants.tiles.blocks)
    taps = weight[0].numel()

    def numbers(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return new_empty(q, shape, dtype=dtype)

    dq = new_empty(q, q.shape)
    dk, dv = (numbers(batch, kv_heads, heads // kv_heads, key_rows, head_dim) for _ in range(2))
    dweight = numbers(batch, heads, plan.all_row_blocks, taps)
    chunk_rows = plan.row_blocks * constants.block_rows
    stored = numbers(2, plan.slots, chunk_rows, plan.pitch, dtype=q.dtype)
    value_norms, grad_norms = numbers(batch * kv_heads, NORM_PARTS), numbers(batch_heads, NORM_PARTS)
    delta, ds_unit = numbers(batch_heads, query_rows), numbers(batch_heads)
    counters = numbers(plan.counters, dtype=torch.int32)
    seen_by, factors = None, grad_norms
    if spans is not None:
        seen_by, factors = rows_that_see(spans, ALIGNED), document_factors(grad_out, v, spans)

    preparation = GradientPreparation(
        Rows.of(v), Rows.of(out), Rows.of(grad_out), value_norms.data_ptr(), grad_norms.data_ptr(), delta.data_ptr(),
        counters.data_ptr(), heads, kv_heads, batch, query_rows, key_rows, len(counters),
    )  # fmt: skip
    chunks = plan.chunk_structure(batch_heads)
    chunks.scheduler = counters.data_ptr()
    at = Positions(None if spans is None else spans.data_ptr(), heads, heads // kv_heads, query_rows, key_rows)
    inputs = Inputs(Rows.of(q), Rows.of(k), Rows.of(v), Weight.of(weight), operation.scale)
    arguments = Sm80BackwardArguments(
        at, inputs, Rows.of(grad_out), value_norms.data_ptr(), factors.data_ptr(), logsumexp.data_ptr(),
        delta.data_ptr(), stored[0].data_ptr(), stored[1].data_ptr(), ds_unit.data_ptr(), dk.data_ptr(), dv.data_ptr(),
        None if seen_by is None else seen_by.data_ptr(), dq.data_ptr(), dweight.data_ptr(),
        operation.scale, operation.scale * math.log2(math.e), chunk_rows, plan.pitch, chunks,
    )  # fmt: skip
    exact_arguments = ExactArguments(
        at, inputs, Rows.of(grad_out), logsumexp.data_ptr(), dq.data_ptr(), dk.data_ptr(), dv.data_ptr(),
        dweight.data_ptr(), plan.all_row_blocks * taps,
    )  # fmt: skip
    jobs = max(batch_heads, batch * kv_heads), 2 * NORM_PARTS
    prepare, backward, exact = _kernels(constants, device.index)
    prepare.launch(jobs, preparation)
    backward.launch((plan.work_tiles, 1), arguments)
    exact.launch((batch_heads, 1), exact_arguments)
    dk, dv = (x.squeeze(2) if heads == kv_heads else x.sum(2) for x in (dk, dv))
    return dq, dk, dv, dweight.sum((0, 2)).view(weight.shape)


conv_attention_backward = functools.partial(gradients_by_chunks, _gradients)
_plan = functools.lru_cache(256)(ChunkPlan.of)


@functools.cache
def _kernels(constants: Sm80BackwardConstants, device: int) -> tuple[Kernel, ...]:
    return tuple(kernel(x, device) for x in (constants.prepared, constants, constants.exact))
