"""Launches forward.cu: which constants a shape takes, and the one kernel."""

from __future__ import annotations

import ctypes
import math
from ctypes import c_float, c_int, c_void_p
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from mta_kernels.allocation import new_empty
from mta_kernels.conv_attention.banded import FOLDER as BANDED
from mta_kernels.conv_attention.banded.structures import BandedConstants, Inputs, Positions, heads_in_l2
from mta_kernels.gpu_limits import shared_memory_limit
from mta_kernels.nvrtc.compiler import Source, headers_in
from mta_kernels.nvrtc.kernel import kernel
from mta_kernels.nvrtc.structures import ELEMENTS, Rows, Weight, fields, in_chunks
from mta_kernels.operation import Convolution, Operation

FOLDER = Path(__file__).parent
HEAD_DIMS, QUERY_TAPS, KEY_TAPS = range(16, 257, 8), 8, 17  # taps at most
MAX_STRIDE = 1 << 26


def shape_unsupported(dtype: torch.dtype, head_dim: int, query_taps: int, key_taps: int) -> str | None:
    """Why no GPU could run these, or None."""
    if dtype not in ELEMENTS:
        return f"dtype {dtype} is not float16 or bfloat16"
    if head_dim % HEAD_DIMS.step or not HEAD_DIMS.start <= head_dim < HEAD_DIMS.stop:
        return f"head_dim {head_dim} is not a multiple of 8 from {HEAD_DIMS[0]} to {HEAD_DIMS[-1]}"
    if query_taps > QUERY_TAPS or key_taps > KEY_TAPS:
        return f"{query_taps}x{key_taps} taps are outside 1x1 to {QUERY_TAPS}x{KEY_TAPS} (query taps x key taps)"
    return None


def multiply_adds(head_dim: int, query_taps: int, key_taps: int) -> int:
    """Multiply-adds of a score: two products of head dim, and a tap's band with centred key taps; without the halo."""
    return 2 * head_dim + 8 * min(key_taps, 3) * query_taps


def beside_eights(conv: Convolution) -> int:
    """BESIDE of geometry.cuh."""
    return -(-conv.pad // 8) + -(-(conv.key_taps - 1 - conv.pad) // 8)


@dataclass(frozen=True)
class Sm80ForwardConstants(BandedConstants):
    """The constants of forward.cu for a shape."""

    shared_limit: int  # bytes that a block can have on the GPU; an SM has 1 KB more

    kernel_name = "cuda_forward"
    warps = 4
    blocks = 2  # that share an SM, which leaves a thread 255 registers
    chunk = 32  # columns of scores that registers hold at a time: 64 spill beside the rows of out

    @property
    def row_tiles(self) -> int:
        """Tiles of 16 rows a warp. Two use each read of shared memory twice; with more columns they do not fit."""
        return 2 if self.head_dim <= 128 else 1

    @property
    def keys(self) -> int:
        """Keys of a tile: 64, or 32 if only then `blocks` share an SM; above head dim 128 as many as 99 KB hold."""
        sizes = (64, 32) if self.head_dim <= 128 else (32,)
        return next(filter(self._share_an_sm, sizes), sizes[0])

    @property
    def blocks_an_sm(self) -> int:
        """Blocks that an SM has room for: `blocks`, or one."""
        return self.blocks if self._share_an_sm(self.keys) else 1

    def _share_an_sm(self, keys: int) -> bool:
        return self.blocks * (self._shared_memory(keys) + 1024) <= self.shared_limit + 1024

    @property
    def queries_in_registers(self) -> bool:
        """Whether registers hold the queries, which else are read from shared memory again for each tile."""
        return self.head_dim <= 64

    @property
    def threads(self) -> int:
        return 32 * self.warps

    @property
    def block_rows(self) -> int:
        """Rows of out that a block computes."""
        return self.warps * self.row_tiles * 16 - (self.conv.query_taps - 1)

    @property
    def shared_memory(self) -> int:
        """Bytes a block takes, as forward_layout.cuh lays them out."""
        return self._shared_memory(self.keys)

    def _shared_memory(self, keys: int) -> int:
        depth, rows = -(-self.head_dim // 16) * 16, self.warps * self.row_tiles * 16
        beside = beside_eights(self.conv)
        scores = (rows + 8) * ((keys // 8 + beside) | 1) * 16 + 16
        scores, queries = -(-scores // 128) * 128, rows * depth * 2
        both = max(scores, queries) if self.queries_in_registers else scores + queries
        return both + 2 * keys * depth * 2 + self.conv.query_taps * (beside + 1) * 128

    def source(self, architecture: str) -> Source:
        own = {
            "WARPS": self.warps, "ROW_TILES": self.row_tiles, "KEYS": self.keys, "CHUNK": self.chunk,
            "BLOCKS": self.blocks, "OPERANDS_IN_REGISTERS": int(self.queries_in_registers),
            "SHARED_BYTES": self.shared_memory,
        }  # fmt: skip
        return Source(FOLDER / "forward.cu", architecture, self.constants() | own, headers_in(FOLDER, BANDED))


class Sm80ForwardArguments(ctypes.Structure):
    """`struct Arguments` of forward_layout.cuh."""

    _fields_ = (
        ("at", Positions), ("inputs", Inputs), ("scale_log2", c_float), *fields(c_void_p, "out logsumexp"),
        *fields(c_int, "row_blocks work_tiles heads_in_l2"),
    )  # fmt: skip


def conv_attention_forward(
    operation: Operation, q: Tensor, k: Tensor, v: Tensor, weight: Tensor, *, head_chunk: int = 0,
    spans: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """As the Triton backend's `conv_attention_forward`: out `[B, Hq, M, D]` and logsumexp `[B, Hq, M]` float32.

    Copies q, k or v if its rows are not contiguous, lie far apart or do not begin at multiples of 16 bytes. Nothing
    waits for the GPU. `head_chunk` changes nothing: there is no scratch.
    """
    q, k, v = map(in_reach, (q, k, v))
    batch, heads, query_rows, head_dim = q.shape
    kv_heads, key_rows = k.shape[1:3]
    constants = Sm80ForwardConstants(
        q.dtype, head_dim, operation.conv, operation.causal, spans is not None, shared_memory_limit(q.device)
    )
    out, logsumexp = new_empty(q, q.shape), new_empty(q, q.shape[:3], dtype=torch.float32)
    row_blocks = -(-query_rows // constants.block_rows)
    work_tiles = row_blocks * batch * heads
    arguments = Sm80ForwardArguments(
        Positions(None if spans is None else spans.data_ptr(), heads, heads // kv_heads, query_rows, key_rows),
        Inputs(Rows.of(q), Rows.of(k), Rows.of(v), Weight.of(weight), operation.scale),
        operation.scale * math.log2(math.e), out.data_ptr(), logsumexp.data_ptr(),
        row_blocks, work_tiles, heads_in_l2(k, batch * heads),
    )  # fmt: skip
    kernel(constants, q.device.index).launch((work_tiles, 1), arguments)
    return out, logsumexp


def in_reach(x: Tensor) -> Tensor:
    """`x`, copied if the kernels cannot load its rows: see `in_chunks` and MAX_STRIDE."""
    return in_chunks(x if x.stride(2) <= MAX_STRIDE else x.clone(memory_format=torch.contiguous_format))
