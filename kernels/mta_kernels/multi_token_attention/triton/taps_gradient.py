"""The gradient of a convolution's taps: `dtaps[a, b] = sum grad[i, j] * x[i + offset + a, j - pad + b]` over a head.

The banded matrices of `convolution` have gradients `sum x_a^T grad`, products on tensor cores, of groups of INPUTS
keys of two rows with groups of OUTPUTS; their diagonals are summed to the taps. Each program sums its share of all
chunks in a place of its own, so the results are the same from run to run.
"""

# ruff: noqa: RUF005  # Triton compiles no unpacking into a tuple
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from mta_kernels.conv_attention.triton.launch import call_signature, cdiv, launch
from mta_kernels.conv_attention.triton.prepare import dot_precision
from mta_kernels.gpu_limits import sm_count
from mta_kernels.multi_token_attention.triton.chunks import Chunk, stored_end
from mta_kernels.multi_token_attention.triton.convolution import INPUTS, OUTPUTS, SMALL, Bands, load_groups, only_seen
from mta_kernels.operation import Convolution

# As CONVOLUTION, and programs a multiprocessor.
TAPS_GRADIENT = {"GROUPS": 16, "SLOTS": 4, "RUN": 8, "num_warps": 4, "programs": 4}


@triton.jit
def load_pairs(x_ptr, row, pair, key, rows, pitch, first_position, CAUSAL: tl.constexpr, INPUTS: tl.constexpr):
    """`[groups, 2 * INPUTS]` of one head: `x[row, key]`, then `x[row + 1, key]`; zero where not stored.

    row `[groups]`, key `[groups, 2 * INPUTS]` twice the same whole groups of 8, pair `[1, 2 * INPUTS]` counts them.
    """
    stored = stored_end(row, first_position, pitch, CAUSAL, True)
    stored_next = stored_end(row + 1, first_position, pitch, CAUSAL, True)
    # Said of each half by itself, so that the compiler sees that 8 keys share an answer.
    seen = (pair < INPUTS) & ((row >= 0) & (row < rows))[:, None] & (key < stored[:, None])
    seen |= (pair >= INPUTS) & ((row >= -1) & (row < rows - 1))[:, None] & (key < stored_next[:, None])
    place = (row[:, None] + pair // INPUTS) * pitch + key
    return tl.load(x_ptr + place, mask=seen & (key >= 0), other=0.0)


@triton.jit(do_not_specialize=["rows", "first_position", "first_row", "query_rows", "key_rows", "offset", "above",
                               "owned"])  # fmt: skip
def _taps_gradient_kernel(
    x_ptr, grad_ptr, partial_ptr, documents_ptr,
    heads, rows, pitch, first_position, first_row, query_rows, key_rows, offset, above, owned, shares,
    CAUSAL: tl.constexpr, DOCUMENTS: tl.constexpr, PAIRS: tl.constexpr, BEFORE: tl.constexpr, OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr, GROUPS: tl.constexpr, SLOTS: tl.constexpr, RUN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Adds a share of the owned rows of one head to `partial [B*H, shares, PAIRS, 2 * INPUTS,
    OUTPUTS]`, for pairs of query taps.

    x, of which the convolution was, and grad, the gradient of what it gave, are `[B*H, rows, pitch]`.
    """
    pitch = tl.multiple_of(pitch, 8)
    share = tl.program_id(0) % shares
    batch_head = (tl.program_id(0) // shares).to(tl.int64)
    x_ptr += batch_head * rows * pitch
    grad_ptr += batch_head * rows * pitch
    group = tl.arange(0, SLOTS * GROUPS)
    out_key = (group % GROUPS * OUTPUTS)[:, None] + tl.arange(0, OUTPUTS)[None, :]
    pair = tl.arange(0, 2 * INPUTS)[None, :]
    in_key = (group % GROUPS * OUTPUTS - BEFORE)[:, None] + pair % INPUTS
    totals = ()
    for _ in tl.static_range(PAIRS):
        totals = totals + (tl.zeros([2 * INPUTS, OUTPUTS], tl.float32),)
    for tile in range(share, tl.cdiv(owned, SLOTS * RUN), shares):
        first = above + tile * (SLOTS * RUN)
        slot_row = first + group // GROUPS * RUN  # the first row of each group's run
        end = key_rows
        if CAUSAL:
            end = tl.minimum(first_position + first + SLOTS * RUN, key_rows)
        for first_key in tl.range(0, end, GROUPS * OUTPUTS, num_stages=1):
            window = ()
            for step in tl.static_range(2 * PAIRS - 2):
                x = load_pairs(
                    x_ptr, slot_row + (offset + step), pair, first_key + in_key, rows, pitch, first_position, CAUSAL,
                    INPUTS,
                )  # fmt: skip
                window = window + (x,)
            for step in tl.static_range(RUN):
                row = slot_row + step
                ahead = row + (offset + 2 * PAIRS - 2)
                x = load_pairs(
                    x_ptr, ahead, pair, first_key + in_key, rows, pitch, first_position, CAUSAL, INPUTS
                )  # fmt: skip
                window = window + (x,)
                counted = row < above + owned
                grad = load_groups(grad_ptr, row, first_key + out_key, rows, pitch, first_position, counted, CAUSAL)
                summed = ()
                for two in tl.static_range(PAIRS):
                    x = window[2 * two]
                    if DOCUMENTS:  # rows and keys of other documents
                        inside = counted & (first_row + row >= 0) & (first_row + row < query_rows)
                        first_seen = tl.load(documents_ptr + first_position + row, mask=inside, other=0)
                        last_seen = tl.load(documents_ptr + key_rows + first_position + row, mask=inside, other=0)
                        x = only_seen(x, first_key + in_key, first_seen, last_seen)
                    summed = summed + (tl.dot(tl.trans(x), grad, totals[two], input_precision=PRECISION),)
                totals = summed
                window = window[1:]
    k = tl.arange(0, 2 * INPUTS)[:, None] * OUTPUTS + tl.arange(0, OUTPUTS)[None, :]
    partial_ptr += tl.program_id(0).to(tl.int64) * (PAIRS * 2 * INPUTS * OUTPUTS)
    for two in tl.static_range(PAIRS):
        place = partial_ptr + two * (2 * INPUTS * OUTPUTS) + k
        tl.store(place, tl.load(place) + totals[two])


class TapsGradient:
    """The gradient of a convolution's taps while chunks add to it."""

    def __init__(self, convolution: Convolution, bands: Bands, batch: int, heads: int) -> None:
        device = bands.matrices.device
        self.convolution, self.bands, self.heads = convolution, bands, heads
        self.shares = cdiv(TAPS_GRADIENT["programs"] * sm_count(device), batch * heads)
        shape = batch, heads, self.shares, cdiv(bands.query_taps, 2) * 2, INPUTS.value, OUTPUTS.value
        self.partial = torch.zeros(shape, dtype=torch.float32, device=device)

    def add(self, x: Tensor, grad: Tensor, chunk: Chunk) -> None:
        """Count the owned rows of a chunk: x went into the convolution, grad is of what came out."""
        batch, heads, rows, pitch = x.shape
        bands = self.bands
        sizes = TAPS_GRADIENT if x.element_size() == 2 else {**TAPS_GRADIENT, **SMALL}
        launch(
            _taps_gradient_kernel, batch * heads * self.shares, (chunk.signature, call_signature(self.partial)),
            x, grad, self.partial, x if chunk.documents is None else chunk.documents,
            heads, rows, pitch, chunk.first_position, chunk.first_row, chunk.query_rows, chunk.key_rows,
            bands.offset, chunk.above, chunk.owned, self.shares,
            CAUSAL=chunk.causal, DOCUMENTS=chunk.documents is not None,
            PAIRS=cdiv(bands.query_taps, 2), BEFORE=bands.before,
            OUTPUTS=OUTPUTS.value, INPUTS=INPUTS.value, GROUPS=sizes["GROUPS"], SLOTS=sizes["SLOTS"],
            RUN=sizes["RUN"], PRECISION=dot_precision(x.dtype), num_warps=sizes["num_warps"],
        )  # fmt: skip

    def dtaps(self) -> Tensor:
        """`[H, cq, ck]` float32."""
        summed = self.partial.sum((0, 2))[:, : self.bands.query_taps]
        tap = torch.arange(self.convolution.key_taps, device=summed.device)[:, None]
        output = torch.arange(OUTPUTS.value, device=summed.device)
        # Output n and tap b meet at input n + b + before - pad.
        return summed[:, :, output + tap + (self.bands.before - self.convolution.pad), output.expand(len(tap), -1)].sum(
            -1
        )
