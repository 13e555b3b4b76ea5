"""The convolution of stored scores on tensor cores, along queries and keys, and its transpose.

`out[i, j] = sum_a sum_b taps[a, b] * x[i + offset + a, j - pad + b]`. For 16 keys j at a time the sum over b is a
product of the 32 keys around them, a row of a matrix, with a banded matrix `[32, 16]`; the rows of that matrix are such
groups of keys of several rows of scores. A program reads a row of scores once for all outputs that see the row.
"""

# ruff: noqa: RUF005  # Triton compiles no unpacking into a tuple
from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from mta_kernels.conv_attention.triton.launch import call_signature, cdiv, launch
from mta_kernels.conv_attention.triton.prepare import dot_precision
from mta_kernels.multi_token_attention.triton.chunks import Chunk, seen_keys, stored_end
from mta_kernels.operation import Convolution

# Keys that come out of a banded matrix and go into it. What lies before and after the former are whole groups of 8.
OUTPUTS: tl.constexpr = tl.constexpr(16)
INPUTS: tl.constexpr = tl.constexpr(32)
# Groups of OUTPUTS keys side by side, rows apart whose groups are in one product, rows one after the other, how many
# of these are read ahead, and warps.
CONVOLUTION = {"GROUPS": 16, "SLOTS": 4, "RUN": 8, "AHEAD": 2, "num_warps": 4}
SMALL = {"GROUPS": 8, "SLOTS": 4, "RUN": 1}  # the same of float32, whose products are on CUDA cores and fully unrolled


@dataclass(frozen=True)
class Bands:
    """A convolution as the kernels take it: banded matrices `[H, query taps, INPUTS, OUTPUTS]` in the scores' dtype.

    Output row i reads the rows from `i + offset` on, output keys from j on those from `j - before` on.
    """

    matrices: Tensor
    offset: int
    before: int

    @property
    def query_taps(self) -> int:
        return self.matrices.shape[1]


def bands_of(taps: Tensor, convolution: Convolution, dtype: torch.dtype, *, transposed: bool = False) -> Bands:
    """The banded matrices of `taps [H, cq, ck]`, or of the transposed convolution."""
    pad, offset = convolution.pad, 1 - convolution.query_taps
    if transposed:
        taps, pad, offset = taps.flip(1, 2), convolution.key_taps - 1 - pad, 0
    before = cdiv(pad, 8) * 8
    # Input k and output n meet at tap k - n - before + pad: zeros before and after the taps serve all others.
    key_taps = convolution.key_taps
    tap = torch.arange(INPUTS.value, device=taps.device)[:, None] - torch.arange(OUTPUTS.value, device=taps.device)
    tap = tap + (pad - before)
    inside = (tap >= 0) & (tap < key_taps)
    matrices = torch.where(inside, taps[:, :, tap.clamp(0, key_taps - 1)], 0).to(dtype)
    return Bands(matrices.contiguous(), offset, before)


@triton.jit
def load_groups(
    x_ptr, row, key, rows, pitch, first_position, inside, CAUSAL: tl.constexpr,
):  # fmt: skip
    """`x[row, key]` of one head, row `[groups]` and key `[groups, n]` in whole groups of 8; zero where not stored."""
    stored = stored_end(row, first_position, pitch, CAUSAL, True)
    seen = ((row >= 0) & (row < rows) & inside)[:, None] & (key >= 0) & (key < stored[:, None])
    return tl.load(x_ptr + (row * pitch)[:, None] + key, mask=seen, other=0.0)


@triton.jit
def only_seen(x, key, start, end):
    """`x [groups, n]`, zero at keys outside start to end `[groups]`."""
    return tl.where((key >= start[:, None]) & (key < end[:, None]), x, 0.0).to(x.dtype)


@triton.jit(do_not_specialize=["rows", "first_position", "first_row", "query_rows", "key_rows", "offset"])
def _convolution_kernel(
    x_ptr, out_ptr, bands_ptr, documents_ptr,
    heads, rows, pitch, first_position, first_row, query_rows, key_rows, offset,
    CAUSAL: tl.constexpr, DOCUMENTS: tl.constexpr, TAPS: tl.constexpr, BEFORE: tl.constexpr,
    OUTPUTS: tl.constexpr, INPUTS: tl.constexpr,
    GROUPS: tl.constexpr, SLOTS: tl.constexpr, RUN: tl.constexpr, AHEAD: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """`out` of one head for SLOTS * RUN rows and GROUPS * OUTPUTS keys; x and out `[B*H, rows, pitch]`.

    x is zero at keys that are not seen, and so is out.
    """
    pitch = tl.multiple_of(pitch, 8)
    key_tiles = tl.cdiv(pitch, GROUPS * OUTPUTS)
    row_tiles = tl.cdiv(rows, SLOTS * RUN)
    first_key = tl.program_id(0) % key_tiles * (GROUPS * OUTPUTS)
    first = tl.program_id(0) // key_tiles % row_tiles * (SLOTS * RUN)
    batch_head = (tl.program_id(0) // (key_tiles * row_tiles)).to(tl.int64)
    last = tl.minimum(first + SLOTS * RUN, rows) - 1
    x_ptr += batch_head * rows * pitch
    out_ptr += batch_head * rows * pitch
    group = tl.arange(0, SLOTS * GROUPS)
    slot_row = first + group // GROUPS * RUN  # the first row of each group's run
    out_key = (first_key + group % GROUPS * OUTPUTS)[:, None] + tl.arange(0, OUTPUTS)[None, :]
    in_key = (first_key + group % GROUPS * OUTPUTS - BEFORE)[:, None] + tl.arange(0, INPUTS)[None, :]
    if first_key < stored_end(last, first_position, pitch, CAUSAL, True):
        if CAUSAL and first_key > first_position + last:
            for step in range(RUN):
                row = slot_row + step
                stored = (row < rows)[:, None] & (out_key < pitch)
                zeros = tl.zeros([SLOTS * GROUPS, OUTPUTS], out_ptr.dtype.element_ty)
                tl.store(out_ptr + (row * pitch)[:, None] + out_key, zeros, mask=stored)
        else:
            k = tl.arange(0, INPUTS)[:, None] * OUTPUTS + tl.arange(0, OUTPUTS)[None, :]
            bands_ptr += batch_head % heads * (TAPS * INPUTS * OUTPUTS)
            bands = ()
            for tap in tl.static_range(TAPS):
                bands = bands + (tl.load(bands_ptr + tap * (INPUTS * OUTPUTS) + k),)
            window = ()
            for step in tl.static_range(TAPS - 1 + AHEAD):
                x = load_groups(x_ptr, slot_row + offset + step, in_key, rows, pitch, first_position, True, CAUSAL)
                window = window + (x,)
            for step in tl.static_range(RUN):
                row = slot_row + step
                start, end = seen_keys(
                    row, first_position, first_row, query_rows, key_rows, documents_ptr, CAUSAL, DOCUMENTS
                )  # fmt: skip
                if step + AHEAD < RUN:
                    ahead = slot_row + (offset + step + TAPS - 1 + AHEAD)
                    x = load_groups(x_ptr, ahead, in_key, rows, pitch, first_position, True, CAUSAL)
                    window = window + (x,)
                total = tl.zeros([SLOTS * GROUPS, OUTPUTS], tl.float32)
                for tap in tl.static_range(TAPS):
                    x = window[tap]
                    if DOCUMENTS:  # rows and keys of other documents
                        first_seen = tl.load(documents_ptr + first_position + row, mask=end > start, other=0)
                        last_seen = tl.load(documents_ptr + key_rows + first_position + row, mask=end > start, other=0)
                        x = only_seen(x, in_key, first_seen, last_seen)
                    total = tl.dot(x, bands[tap], total, input_precision=PRECISION)
                total = only_seen(total, out_key, start, end).to(out_ptr.dtype.element_ty)
                stored = (row < rows)[:, None] & (out_key < pitch)
                tl.store(out_ptr + (row * pitch)[:, None] + out_key, total, mask=stored)
                window = window[1:]


def convolve(x: Tensor, out: Tensor, bands: Bands, chunk: Chunk) -> None:
    """`out` is the convolution of `x`, both `[B, H, rows, pitch]` of a chunk and zero at keys that are not seen."""
    batch, heads, rows, pitch = x.shape
    sizes = CONVOLUTION if x.element_size() == 2 else {**CONVOLUTION, **SMALL}
    programs = cdiv(rows, sizes["SLOTS"] * sizes["RUN"]) * cdiv(pitch, sizes["GROUPS"] * OUTPUTS.value)
    launch(
        _convolution_kernel, programs * batch * heads, (chunk.signature, call_signature(bands.matrices)),
        x, out, bands.matrices, x if chunk.documents is None else chunk.documents,
        heads, rows, pitch, chunk.first_position, chunk.first_row, chunk.query_rows, chunk.key_rows,
        bands.offset,
        CAUSAL=chunk.causal, DOCUMENTS=chunk.documents is not None, TAPS=bands.query_taps, BEFORE=bands.before,
        OUTPUTS=OUTPUTS.value, INPUTS=INPUTS.value,
        **{name: size for name, size in sizes.items() if name != "num_warps"},
        PRECISION=dot_precision(x.dtype), num_warps=sizes["num_warps"],
    )  # fmt: skip
