"""Launches the convolution kernels: how warps divide a chunk, and the kernels' arguments."""

from __future__ import annotations

import ctypes
import functools
import math
from collections.abc import Iterable
from ctypes import c_int, c_void_p
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mta_kernels.allocation import empty
from mta_kernels.nvrtc.compiler import Source, headers_in
from mta_kernels.nvrtc.kernel import kernel
from mta_kernels.nvrtc.structures import ELEMENTS, fields
from mta_kernels.operation import Convolution

FOLDER = Path(__file__).parent
MOST_TAPS = (8, 17)
KEYS, THREADS = 128, 32  # of a block, which is one warp


@dataclass(frozen=True)
class BandSizes:
    """Approximate rows of a warp, stages of its ring, and warps for which an SM has registers."""

    rows: int
    stages: int
    warps: int


def rows_of_turns(turns: int, query_taps: int) -> int:
    """Rows of a task that fill so many turns, of `query_taps` rows each, together with its halo."""
    return turns * query_taps - (query_taps - 1)


# A warp reads QUERY_TAPS - 1 rows more than its own; the fewer its rows, the more evenly SMs finish.
CONVOLVE = BandSizes(50, 3, 16)
GRADIENTS = BandSizes(104, 2, 12)


@dataclass(frozen=True)
class BandConstants:
    """The constants of convolve.cu, or with `gradients` of gradients.cu."""

    gradients: bool
    dtype: torch.dtype
    conv: Convolution
    delta: bool
    causal: bool
    documents: bool
    sizes: BandSizes

    threads = THREADS

    @property
    def kernel_name(self) -> str:
        return "convolution_gradients" if self.gradients else "convolve_rows"

    @functools.cached_property
    def shared_memory(self) -> int:
        """Bytes of a block, as layout.cuh lays them out."""
        query_taps, key_taps, pad = self.conv.query_taps, self.conv.key_taps, self.conv.pad
        beside = -(-pad // 8) + -(-(key_taps - 1 - pad) // 8)
        ring = self.sizes.stages * query_taps * (KEYS // 8 + beside) * 16
        return max(2 * ring, query_taps * (beside + 1) * 8 * 8 * 4) if self.gradients else ring

    def constants(self) -> dict[str, Any]:
        return {
            "ELEMENT": ELEMENTS[self.dtype], "QUERY_TAPS": self.conv.query_taps, "KEY_TAPS": self.conv.key_taps,
            "PAD": self.conv.pad, "CAUSAL": int(self.causal), "DOCUMENTS": int(self.documents),
            "DELTA": int(self.delta), "STAGES": self.sizes.stages, "SHARED_BYTES": self.shared_memory,
            "BLOCKS_AN_SM": self.sizes.warps,
        }  # fmt: skip

    def source(self, architecture: str) -> Source:
        path = FOLDER / ("gradients.cu" if self.gradients else "convolve.cu")
        return Source(path, architecture, self.constants(), headers_in(FOLDER))


class BandArguments(ctypes.Structure):
    """`struct Arguments` of layout.cuh."""

    _fields_ = (
        *fields(c_void_p, "x grad out taps documents partial delta"),
        *fields(c_int, "heads rows pitch first_position first_row query_rows key_rows above owned"),
        *fields(c_int, "run row_tiles key_tiles tasks"),
        *fields(c_void_p, "mix parts pieces factors logsumexp convolved sums"),
        *fields(c_int, "batch blocks"),
        ("loss_scale", c_void_p),
    )


@dataclass(frozen=True)
class BandRows:
    """Stored scores `[B, H, rows, pitch]` of a chunk: row 0 is query `first_row`, at position `first_position`.

    A row is stored up to the end of the block of 128 keys that contains the key 127 after its own; unless `causal`, to
    the last key. It is zero at unseen keys. The pitch is a multiple of 128. With `documents [2, key_rows]`
    (int32, contiguous: for each position its document's first, and one past its last) a row sees its own document.
    Gradients in float16 are times `loss_scale` (float32): of each sequence, or with documents of each position.
    """

    first_position: int
    first_row: int
    query_rows: int
    key_rows: int
    causal: bool
    documents: Tensor | None
    loss_scale: Tensor | None = None


def shape_unsupported(dtype: torch.dtype, conv: Convolution) -> str | None:
    """Why no GPU's convolution kernels can take these, or None."""
    if dtype not in ELEMENTS:
        return f"dtype {dtype} is not float16 or bfloat16"
    if conv.query_taps > MOST_TAPS[0] or conv.key_taps > MOST_TAPS[1]:
        return f"{conv} taps are more than the {MOST_TAPS[0]}x{MOST_TAPS[1]} of the CUDA convolution kernels"
    return None


def convolve(
    x: Tensor, out: Tensor, taps: Tensor, conv: Convolution, where: BandRows, *, sizes: BandSizes | None = None
) -> None:  # fmt: skip
    """`out` is the convolution of `x` by `taps [H, cq, ck]`, both `[B, H, rows, pitch]` contiguous, fp16 or bf16.

    Rows beyond the chunk, or of another document, count as zeros. `sizes` override the chosen sizes, for measurements.
    Nothing waits for the GPU; the same call gives the same bits.
    """
    constants = BandConstants(False, x.dtype, conv, False, where.causal, where.documents is not None, sizes or CONVOLVE)
    arguments, kept = arguments_of(constants.sizes, x, out, taps, where)
    _launch(arguments, constants, x)
    del kept


class BandsGradient:
    """The gradients of a convolution, chunk after chunk; the gradients of its taps are summed."""

    def __init__(
        self, taps: Tensor, conv: Convolution, dtype: torch.dtype, causal: bool, documents: bool, batch: int,
        chunks: Iterable[tuple[int, int]], *, delta: bool, sizes: BandSizes | None = None,
    ) -> None:  # fmt: skip
        """For `chunks` with so many rows and keys (`rows`, `pitch`), and up to `batch` sequences."""
        self.taps, self.conv = taps.to(dtype).contiguous(), conv
        sizes = sizes or GRADIENTS
        self.constants = BandConstants(True, dtype, conv, delta, causal, documents, sizes)
        heads, device = taps.shape[0], taps.device
        shape = batch * heads, most_tasks(sizes, conv.query_taps, chunks), *conv.taps
        self.partial = torch.zeros(shape, dtype=torch.float32, device=device)

    def add(self, x: Tensor, grad: Tensor, out: Tensor, where: BandRows, *, above: int, owned: int) -> Tensor | None:
        """`out` is the gradient of `x`; `grad` is the gradient of the convolved `x`. All are `[B, H, rows, pitch]`.

        The `owned` rows of grad from `above` on count for the taps. With `delta`, returns `sum_j x * out` of each row,
        `[B, H, rows]` float32. As `convolve` otherwise; `out` must not share memory with `x` and `grad`.
        """
        arguments, kept = arguments_of(self.constants.sizes, x, out, self.taps, where)
        arguments.grad, arguments.above, arguments.owned = grad.data_ptr(), above, owned
        arguments.partial, arguments.tasks = self.partial.data_ptr(), self.partial.shape[1]
        delta = None
        if self.constants.delta:
            delta = empty(*x.shape[:3], arguments.key_tiles, dtype=torch.float32, device=x.device)
            arguments.delta = delta.data_ptr()
        _launch(arguments, self.constants, x)
        del kept
        return None if delta is None else delta.sum(-1)

    def dtaps(self) -> Tensor:
        """`[H, cq, ck]` float32."""
        heads = self.taps.shape[0]
        return self.partial.unflatten(0, (-1, heads)).sum((0, 2))


def tiles_of(sizes: BandSizes, query_taps: int, rows: int, pitch: int) -> tuple[int, int, int]:
    """Rows of a warp, and how many warps share rows and keys."""
    run = rows_of_turns(-(-sizes.rows // query_taps), query_taps)
    return run, -(-rows // run), -(-pitch // KEYS)


def most_tasks(sizes: BandSizes, query_taps: int, chunks: Iterable[tuple[int, int]]) -> int:
    """The most tasks of a head, over chunks with so many rows and keys."""
    return max(math.prod(tiles_of(sizes, query_taps, *chunk)[1:]) for chunk in chunks)


def arguments_of(
    sizes: BandSizes, x: Tensor, out: Tensor, taps: Tensor, where: BandRows
) -> tuple[BandArguments, Any]:  # fmt: skip
    """The arguments of both kernels, and tensors to keep until the launch."""
    _, heads, rows, pitch = x.shape
    run, row_tiles, key_tiles = tiles_of(sizes, taps.shape[1], rows, pitch)
    taps = taps.to(x.dtype).contiguous()
    arguments = BandArguments(
        x=x.data_ptr(), out=out.data_ptr(), taps=taps.data_ptr(), heads=heads, rows=rows, pitch=pitch,
        first_position=where.first_position, first_row=where.first_row, query_rows=where.query_rows,
        key_rows=where.key_rows, run=run, row_tiles=row_tiles, key_tiles=key_tiles,
    )  # fmt: skip
    if where.documents is not None:
        arguments.documents = where.documents.data_ptr()
    if where.loss_scale is not None:
        arguments.loss_scale = where.loss_scale.data_ptr()
    return arguments, taps


def _launch(arguments: BandArguments, constants: BandConstants, x: Tensor) -> None:
    blocks = x.shape[0] * x.shape[1] * arguments.row_tiles * arguments.key_tiles
    kernel(constants, x.device.index).launch((blocks, 1), arguments)
