"""The gradient of a convolution's taps: `dtaps[a, b] = sum grad[i, j] * x[i + offset + a, j - pad + b]` over a head.

The banded matrices of `convolution` have gradients `sum x_a^T grad`: tensor cores multiply groups of INPUTS keys of a
row by groups of OUTPUTS. Sums over diagonals are the taps' gradients. Each program sums its share of all chunks into
its own buffer, so the results are the same from run to run.
"""

# ruff: noqa: RUF005  # Triton compiles no unpacking into a tuple
from __future__ import annotations

import functools
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from mta_kernels.conv_attention.triton.launch import call_signature, cdiv, launch
from mta_kernels.conv_attention.triton.prepare import dot_precision
from mta_kernels.gpu_limits import sm_count
from mta_kernels.multi_token_attention.triton.chunks import Chunk
from mta_kernels.multi_token_attention.triton.convolution import (
    INPUTS,
    OUTPUTS,
    SMALL,
    Bands,
    load_row,
    rows_together,
)
from mta_kernels.operation import Convolution

# As CONVOLUTION, but `rows` is the fewest rows of a tile; and programs an SM, for which it has registers.
TAPS_GRADIENT: dict[str, Any] = {"GROUPS": 16, "rows": 16, "STAGES": 2, "num_warps": 1, "maxnreg": 168, "programs": 12}


@triton.jit
def _add_tap(partial_ptr, tap, total, unit, TAPS: tl.constexpr, INPUTS: tl.constexpr, OUTPUTS: tl.constexpr):
    """Adds `total * unit` to this program's sum for a tap."""
    place = partial_ptr + (tl.program_id(0).to(tl.int64) * TAPS + tap) * (INPUTS * OUTPUTS)
    place += tl.arange(0, INPUTS)[:, None] * OUTPUTS + tl.arange(0, OUTPUTS)[None, :]
    tl.store(place, tl.load(place) + total * unit)


@triton.jit(do_not_specialize=["rows", "run", "first_position", "first_row", "query_rows", "key_rows", "offset",
                               "above", "owned", "shares"])  # fmt: skip
def _taps_gradient_kernel(
    x_ptr, grad_ptr, partial_ptr, loss_scale_ptr, documents_ptr,
    heads, rows, run, pitch, first_position, first_row, query_rows, key_rows, offset, above, owned, shares,
    SCALED: tl.constexpr, CAUSAL: tl.constexpr, DOCUMENTS: tl.constexpr, TAPS: tl.constexpr, BEFORE: tl.constexpr,
    OUTPUTS: tl.constexpr, INPUTS: tl.constexpr, GROUPS: tl.constexpr, STAGES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Adds a share of the owned rows of one head to `partial [B*H, shares, TAPS, INPUTS, OUTPUTS]`.

    x, the convolution's input, and grad, the gradient of its output, are `[B*H, rows, pitch]`. A row of each is read
    once: a row of x is multiplied by the TAPS rows of grad that saw it.
    """
    pitch = tl.multiple_of(pitch, 8)
    share = tl.program_id(0) % shares
    batch_head = (tl.program_id(0) // shares).to(tl.int64)
    x_ptr += batch_head * rows * pitch
    grad_ptr += batch_head * rows * pitch
    group = tl.arange(0, GROUPS) * OUTPUTS
    out_keys = group[:, None] + tl.arange(0, OUTPUTS)[None, :]
    in_keys = (group - BEFORE)[None, :] + tl.arange(0, INPUTS)[:, None]
    totals = ()
    for _ in tl.static_range(TAPS):
        totals = totals + (tl.zeros([INPUTS, OUTPUTS], tl.float32),)
    row_tiles = tl.maximum(tl.cdiv(owned, run), 1)
    key_tiles = tl.cdiv(pitch, GROUPS * OUTPUTS)
    for tile in range(share, row_tiles * key_tiles, shares):
        first = above + tile % row_tiles * run
        after = tl.minimum(first + run, above + owned)  # one past the last row of grad
        first_key = tile // row_tiles * (GROUPS * OUTPUTS)
        out_key, in_key = first_key + out_keys, first_key + in_keys
        begin = first
        if CAUSAL:
            begin = tl.where(first_key < first_position + after, first, after)
        while begin < after:
            stop, lowest, highest = rows_together(
                begin, after, rows, first_position, first_row, query_rows, key_rows, documents_ptr, DOCUMENTS
            )  # fmt: skip
            window = ()
            for _ in tl.static_range(TAPS - 1):
                window = window + (tl.zeros([GROUPS, OUTPUTS], grad_ptr.dtype.element_ty),)
            # window[n] is the row of grad n + 1 before this one, whose product with x is for tap n + 1.
            for turn in tl.range(begin, stop + (TAPS - 1), TAPS, num_stages=STAGES):
                for step in tl.static_range(TAPS):
                    row = turn + step
                    seen_row = row + offset
                    inside = (row < stop + (TAPS - 1)) & (seen_row >= lowest) & (seen_row < highest)
                    x = load_row(x_ptr, seen_row, in_key, rows, pitch, first_position, inside, CAUSAL)
                    grad = load_row(grad_ptr, row, out_key, rows, pitch, first_position, row < stop, CAUSAL)
                    window = (grad,) + window
                    added = ()
                    for tap in tl.static_range(TAPS):
                        added = added + (tl.dot(x, window[tap], totals[tap], input_precision=PRECISION),)
                    totals = added
                    window = window[: TAPS - 1]
            if SCALED and DOCUMENTS:  # rows that are no queries add nothing
                inside = (first_row + begin >= 0) & (first_row + begin < query_rows)
                scale = tl.load(loss_scale_ptr + first_position + begin, mask=inside, other=1.0)
                emptied = ()
                for tap in tl.static_range(TAPS):
                    _add_tap(partial_ptr, tap, totals[tap], 1.0 / scale, TAPS, INPUTS, OUTPUTS)
                    emptied = emptied + (tl.zeros([INPUTS, OUTPUTS], tl.float32),)
                totals = emptied
            begin = stop
    if not (SCALED and DOCUMENTS):
        unit = 1.0
        if SCALED:
            unit = 1.0 / tl.load(loss_scale_ptr + batch_head // heads)
        for tap in tl.static_range(TAPS):
            _add_tap(partial_ptr, tap, totals[tap], unit, TAPS, INPUTS, OUTPUTS)


@functools.cache
def tile_rows(rows: int, key_tiles: int, shares: int, query_taps: int, fewest: int) -> int:
    """Rows of a tile such that the program with the most tiles of a head reads the fewest rows, with halos."""

    def read(run: int) -> int:
        return cdiv(cdiv(rows, run) * key_tiles, shares) * cdiv(run + query_taps - 1, query_taps) * query_taps

    return min((cdiv(rows, tiles) for tiles in range(1, cdiv(rows, fewest) + 1)), key=read)


class TapsGradient:
    """The gradient of a convolution's taps while chunks add to it."""

    def __init__(self, convolution: Convolution, bands: Bands, batch: int, heads: int) -> None:
        device = bands.matrices.device
        self.convolution, self.bands, self.heads = convolution, bands, heads
        self.shares = max(1, TAPS_GRADIENT["programs"] * sm_count(device) // (batch * heads))
        shape = batch, heads, self.shares, bands.query_taps, INPUTS.value, OUTPUTS.value
        self.partial = torch.zeros(shape, dtype=torch.float32, device=device)

    def add(self, x: Tensor, grad: Tensor, chunk: Chunk, loss_scale: Tensor | None) -> None:
        """Add the owned rows of a chunk: x is the input, grad the gradient of the convolved x times `loss_scale`."""
        batch, heads, rows, pitch = x.shape
        bands = self.bands
        sizes = TAPS_GRADIENT if x.element_size() == 2 else {**TAPS_GRADIENT, **SMALL}
        key_tiles = cdiv(pitch, sizes["GROUPS"] * OUTPUTS.value)
        run = tile_rows(chunk.owned, key_tiles, self.shares, bands.query_taps, sizes["rows"])
        launch(
            _taps_gradient_kernel, batch * heads * self.shares,
            (chunk.signature, call_signature(self.partial, loss_scale)),
            x, grad, self.partial, self.partial if loss_scale is None else loss_scale,
            x if chunk.documents is None else chunk.documents,
            heads, rows, run, pitch, chunk.first_position, chunk.first_row, chunk.query_rows, chunk.key_rows,
            bands.offset, chunk.above, chunk.owned, self.shares,
            SCALED=loss_scale is not None, CAUSAL=chunk.causal, DOCUMENTS=chunk.documents is not None,
            TAPS=bands.query_taps, BEFORE=bands.before,
            OUTPUTS=OUTPUTS.value, INPUTS=INPUTS.value, GROUPS=sizes["GROUPS"], STAGES=sizes["STAGES"],
            PRECISION=dot_precision(x.dtype), num_warps=sizes["num_warps"],
            maxnreg=sizes["maxnreg"],
        )  # fmt: skip

    def dtaps(self) -> Tensor:
        """`[H, cq, ck]` float32."""
        summed = self.partial.sum((0, 2))
        tap = torch.arange(self.convolution.key_taps, device=summed.device)[:, None]
        output = torch.arange(OUTPUTS.value, device=summed.device)
        # Output n reads input n + b + before - pad by tap b.
        return summed[:, :, output + tap + (self.bands.before - self.convolution.pad), output.expand(len(tap), -1)].sum(
            -1
        )
