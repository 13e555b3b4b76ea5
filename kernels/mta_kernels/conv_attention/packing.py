"""Packed documents as one sequence: rows of zeros between them, wide enough that no convolution reaches across.

Every shape follows from the number of tokens and of documents, so nothing waits for the device. Gathers move rows and
their gradients: the results are the same from run to run. Under torch.func the gradients are PyTorch's own: a Function
that its transforms support (`setup_context`) would make every call slower.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from mta_kernels.operator_gradients import under_torch_func


class PackedLayout(NamedTuple):
    """Where the `N` packed rows stand among the `P` spread ones.

    `position [N]` is the spread row of a packed one, `source [P]` the packed row of a spread one, where `gap [P, 1]`
    is False. `spans [2, P]` int32: the first key that a spread row may see, and one past the last.
    """

    position: Tensor
    source: Tensor
    gap: Tensor
    spans: Tensor


def spread_layout(cu_seqlens: Tensor, tokens: int, gap: int) -> PackedLayout:
    """The layout of `tokens` rows in documents with the bounds `cu_seqlens [S + 1]`, `gap` rows of zeros after each.

    `P = tokens + S * gap`. The rows of a gap see the document before them, or one of their own if it is empty: every
    row sees a key.
    """

    def count(numbers: int) -> Tensor:
        return torch.arange(numbers, dtype=cu_seqlens.dtype, device=cu_seqlens.device)

    cu_seqlens = cu_seqlens.contiguous()  # else searchsorted copies it each time, and warns
    bounds = cu_seqlens.shape[0]
    starts = torch.add(cu_seqlens, count(bounds), alpha=gap)  # of the spread documents
    row, token = count(tokens + (bounds - 1) * gap), count(tokens)
    document = torch.searchsorted(starts, row, right=True) - 1
    first, end = starts[document], starts[document + 1] - gap
    in_gap = row >= end
    return PackedLayout(
        position=torch.add(token, torch.searchsorted(cu_seqlens, token, right=True) - 1, alpha=gap),
        source=torch.sub(row, document, alpha=gap).masked_fill(in_gap, 0),
        gap=in_gap[:, None],
        spans=torch.stack([first, torch.maximum(end, first + 1)]).int(),
    )


def spread_rows(x: Tensor, layout: PackedLayout) -> Tensor:
    """`x [1, H, N, D]` with rows of zeros between its documents: `[1, H, P, D]`."""
    return _move(x, layout, collect=False)


def collect_rows(x: Tensor, layout: PackedLayout) -> Tensor:
    """The rows of documents, out of `x [1, H, P, D]`: `[1, H, N, D]`."""
    return _move(x, layout, collect=True)


def _move(x: Tensor, layout: PackedLayout, *, collect: bool) -> Tensor:
    move = _moved if under_torch_func() else _MoveRows.apply
    return move(x, layout.position, layout.source, layout.gap, collect)


def rows_that_see(spans: Tensor, block: int) -> Tensor:
    """For blocks of `block` keys the rows, multiples of it, from and to before which one is seen: `[2, blocks]`."""
    key_rows = spans.shape[1]
    first_keys = torch.arange(-(-key_rows // block), device=spans.device, dtype=torch.int32) * block
    last_rows = (first_keys + block - 1).clamp(max=key_rows - 1)
    first = torch.searchsorted(spans[1, last_rows], first_keys, right=True)
    end = torch.searchsorted(spans[0, ::block].contiguous(), first_keys + block)
    return (torch.stack([first, end]) * block).to(torch.int32)


def largest_of_documents(rows: Tensor, spans: Tensor) -> Tensor:
    """For each of `rows [heads, P]`, numbers from 0 on, the largest in its document; NaN counts as 0."""
    first = spans[0].long().expand_as(rows)  # identifies the document
    largest = torch.zeros_like(rows).scatter_reduce_(1, first, rows.nan_to_num(0.0, float("inf")), "amax")
    return largest.gather(1, first)


# Bounds of dc and ds, which are rounded to 16 bits: up to 136 of them are added, times weights below 1.
GRADIENT_LIMITS = {torch.float16: 8, torch.bfloat16: 14}  # log2, as GradLimit of backward_scale.cuh


def document_factors(grad_out: Tensor, v: Tensor, spans: Tensor) -> Tensor:
    """`[Hq, P]` powers of two, one a document, that bring `|grad_out v^T - delta| <= 2 |grad_out| |v|` to the limit."""
    heads, kv_heads = grad_out.shape[1], v.shape[1]
    norms = (torch.linalg.vector_norm(x[0], dim=-1, dtype=torch.float32) for x in (grad_out, v))
    grad_norm, value_norm = (largest_of_documents(x, spans).log2_() for x in norms)
    bound = grad_norm + value_norm.repeat_interleave(heads // kv_heads, dim=0) + 1
    return torch.exp2((GRADIENT_LIMITS[v.dtype] - bound).floor_().nan_to_num_().clamp_(-100, 100))


class _MoveRows(torch.autograd.Function):
    """`spread_rows`, or with `collect` `collect_rows`: each is the gradient of the other."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, position: Tensor, source: Tensor, gap: Tensor, collect: bool) -> Tensor:
        ctx.save_for_backward(position, source, gap)
        ctx.collect = collect
        return _moved(x, position, source, gap, collect)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        position, source, gap = ctx.saved_tensors
        return _moved(grad, position, source, gap, not ctx.collect), None, None, None, None


def _moved(x: Tensor, position: Tensor, source: Tensor, gap: Tensor, collect: bool) -> Tensor:
    if collect:
        return x.index_select(2, position)
    # Not filled in place: torch.compile of PyTorch 2.11 would silently drop the gradient of x.
    return torch.where(gap, 0, x.index_select(2, source))
