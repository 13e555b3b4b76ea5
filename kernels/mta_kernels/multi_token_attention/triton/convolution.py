"""The convolution of stored scores on tensor cores, along queries and keys, and its transpose.

`out[i, j] = sum_a sum_b taps[a, b] * x[i + offset + a, j - pad + b]`. For 16 keys j at a time the sum over b is the
product of the 32 keys around them with a banded matrix `[32, 16]`. These groups of keys, of several rows of scores, are
the rows of the left operand. A program reads a row of scores once for all outputs that see the row.
"""

# ruff: noqa: RUF005  # Triton compiles no unpacking into a tuple
from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from mta_kernels.conv_attention.triton.launch import call_signature, cdiv, launch
from mta_kernels.conv_attention.triton.prepare import dot_precision
from mta_kernels.multi_token_attention.triton.chunks import Chunk, seen_keys, stored_end
from mta_kernels.operation import Convolution

# Keys that a banded matrix produces and reads. The input keys before and after the output keys are whole groups of 8.
OUTPUTS: tl.constexpr = tl.constexpr(16)
INPUTS: tl.constexpr = tl.constexpr(32)
# Groups of OUTPUTS keys side by side; approximate rows of a program; prefetch distance, in turns of as many rows as
# there are query taps, and one more; warps: a single warp waits for no other; and registers a thread at most.
CONVOLUTION: dict[str, Any] = {"GROUPS": 16, "rows": 104, "STAGES": 2, "num_warps": 1, "maxnreg": 200}
# The same for float32, whose products run on CUDA cores.
SMALL: dict[str, Any] = {"rows": 16, "STAGES": 1, "num_warps": 4, "maxnreg": None}


@dataclass(frozen=True)
class Bands:
    """A convolution as the kernels take it: banded matrices `[H, query taps, INPUTS, OUTPUTS]` in the scores' dtype.

    Output row i reads the rows from `i + offset` on; output keys from j on read the keys from `j - before` on.
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
    # Input k and output n are connected by tap k - n - before + pad: zeros before and after the taps fill the rest.
    key_taps = convolution.key_taps
    tap = torch.arange(INPUTS.value, device=taps.device)[:, None] - torch.arange(OUTPUTS.value, device=taps.device)
    tap = tap + (pad - before)
    inside = (tap >= 0) & (tap < key_taps)
    matrices = torch.where(inside, taps[:, :, tap.clamp(0, key_taps - 1)], 0).to(dtype)
    return Bands(matrices.contiguous(), offset, before)


@triton.jit
def load_row(x_ptr, row, key, rows, pitch, first_position, inside, CAUSAL: tl.constexpr):
    """`x[row, key]` of one head, key `[groups, n]` in whole groups of 8; zero where not stored, or not inside."""
    end = tl.where((row >= 0) & (row < rows) & inside, stored_end(row, first_position, pitch, CAUSAL, True), 0)
    return tl.load(x_ptr + row * pitch + key, mask=(key >= 0) & (key < end), other=0.0)


@triton.jit
def rows_together(
    begin, after, rows, first_position, first_row, query_rows, key_rows, documents_ptr, DOCUMENTS: tl.constexpr,
):  # fmt: skip
    """The end of the rows from begin on, at most after, that are of one document; and that document's rows.

    Rows outside the queries see no keys: all of them count as one document.
    """
    stop, lowest, highest = after, begin * 0, rows
    if DOCUMENTS:
        query = first_row + begin
        inside = (query >= 0) & (query < query_rows)
        place = documents_ptr + first_position + begin
        end = tl.load(place + key_rows, mask=inside, other=0) - first_position
        lowest = tl.where(inside, tl.load(place, mask=inside, other=0) - first_position, lowest)
        highest = tl.where(inside, end, highest)
        stop = tl.minimum(tl.where(inside, end, tl.where(query < 0, -first_row, after)), after)
    return stop, lowest, highest


@triton.jit(do_not_specialize=["rows", "run", "first_position", "first_row", "query_rows", "key_rows", "offset"])
def _convolution_kernel(
    x_ptr, out_ptr, bands_ptr, documents_ptr,
    heads, rows, run, pitch, first_position, first_row, query_rows, key_rows, offset,
    CAUSAL: tl.constexpr, DOCUMENTS: tl.constexpr, TAPS: tl.constexpr, BEFORE: tl.constexpr,
    OUTPUTS: tl.constexpr, INPUTS: tl.constexpr, GROUPS: tl.constexpr, STAGES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """`out` of one head for `run` rows and GROUPS * OUTPUTS keys; x and out `[B*H, rows, pitch]`.

    x is zero at keys that are not seen, and so is out. The kernel reads a row of x once, and adds it to the sums of the
    TAPS rows that see it; the uppermost of these is complete then.
    """
    pitch = tl.multiple_of(pitch, 8)
    key_tiles = tl.cdiv(pitch, GROUPS * OUTPUTS)
    row_tiles = tl.cdiv(rows, run)
    first_key = tl.program_id(0) % key_tiles * (GROUPS * OUTPUTS)
    first = tl.program_id(0) // key_tiles % row_tiles * run
    batch_head = (tl.program_id(0) // (key_tiles * row_tiles)).to(tl.int64)
    after = tl.minimum(first + run, rows)  # one past its last row
    x_ptr += batch_head * rows * pitch
    out_ptr += batch_head * rows * pitch
    group = first_key + tl.arange(0, GROUPS) * OUTPUTS
    out_key = group[:, None] + tl.arange(0, OUTPUTS)[None, :]
    in_key = (group - BEFORE)[:, None] + tl.arange(0, INPUTS)[None, :]
    if CAUSAL and first_key >= first_position + after:
        for row in range(first, after):
            stored = out_key < stored_end(row, first_position, pitch, CAUSAL, True)
            tl.store(out_ptr + row * pitch + out_key, tl.zeros([GROUPS, OUTPUTS], x_ptr.dtype.element_ty), mask=stored)
    else:
        k = tl.arange(0, INPUTS)[:, None] * OUTPUTS + tl.arange(0, OUTPUTS)[None, :]
        bands_ptr += batch_head % heads * (TAPS * INPUTS * OUTPUTS)
        bands = ()
        for tap in tl.static_range(TAPS):
            bands = bands + (tl.load(bands_ptr + tap * (INPUTS * OUTPUTS) + k),)
        begin = first
        while begin < after:
            stop, lowest, highest = rows_together(
                begin, after, rows, first_position, first_row, query_rows, key_rows, documents_ptr, DOCUMENTS
            )  # fmt: skip
            sums = ()
            for _ in tl.static_range(TAPS - 1):
                sums = sums + (tl.zeros([GROUPS, OUTPUTS], tl.float32),)
            # sums[n] is of row + n, to which x adds by tap TAPS - 1 - n. After a turn the sums are in order again.
            for turn in tl.range(begin - (TAPS - 1), stop, TAPS, num_stages=STAGES):
                for step in tl.static_range(TAPS):
                    row = turn + step
                    seen_row = row + (offset + TAPS - 1)
                    inside = (row < stop) & (seen_row >= lowest) & (seen_row < highest)
                    x = load_row(x_ptr, seen_row, in_key, rows, pitch, first_position, inside, CAUSAL)
                    sums = sums + (tl.zeros([GROUPS, OUTPUTS], tl.float32),)
                    added = ()
                    for n in tl.static_range(TAPS):
                        summed = tl.dot(x, bands[TAPS - 1 - n], sums[n], input_precision=PRECISION)
                        if n == 0:
                            total = summed.to(out_ptr.dtype.element_ty)
                        else:
                            added = added + (summed,)
                    sums = added
                    start, end = seen_keys(
                        row, first_position, first_row, query_rows, key_rows, documents_ptr, CAUSAL, DOCUMENTS
                    )  # fmt: skip
                    if (first_key < start) | (first_key + GROUPS * OUTPUTS > end):
                        total = tl.where((out_key >= start) & (out_key < end), total, 0.0)
                    if (row >= begin) & (row < stop):
                        stored = out_key < stored_end(row, first_position, pitch, CAUSAL, True)
                        tl.store(out_ptr + row * pitch + out_key, total, mask=stored)
            begin = stop


def convolve(x: Tensor, out: Tensor, bands: Bands, chunk: Chunk) -> None:
    """`out` is the convolution of `x`: both `[B, H, rows, pitch]` of a chunk, and zero at keys that are not seen."""
    batch, heads, rows, pitch = x.shape
    sizes = CONVOLUTION if x.element_size() == 2 else {**CONVOLUTION, **SMALL}
    row_tiles = cdiv(rows, sizes["rows"])
    run = cdiv(rows, row_tiles)
    programs = cdiv(rows, run) * cdiv(pitch, sizes["GROUPS"] * OUTPUTS.value)
    launch(
        _convolution_kernel, programs * batch * heads, (chunk.signature, call_signature(bands.matrices)),
        x, out, bands.matrices, x if chunk.documents is None else chunk.documents,
        heads, rows, run, pitch, chunk.first_position, chunk.first_row, chunk.query_rows, chunk.key_rows,
        bands.offset,
        CAUSAL=chunk.causal, DOCUMENTS=chunk.documents is not None, TAPS=bands.query_taps, BEFORE=bands.before,
        OUTPUTS=OUTPUTS.value, INPUTS=INPUTS.value, GROUPS=sizes["GROUPS"], STAGES=sizes["STAGES"],
        PRECISION=dot_precision(x.dtype), num_warps=sizes["num_warps"],
        maxnreg=sizes["maxnreg"],
    )  # fmt: skip
