"""Tiles in eager PyTorch, as the definition says: any device, any dtype; float64 is the oracle."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from mta_kernels.conv_attention.arguments import head_parts
from mta_kernels.conv_attention.context_parallel.tiles import Problem, Tile
from mta_kernels.conv_attention.reference import repeat_heads


@dataclass(frozen=True)
class EagerTiles:
    """Stores the scores of `head_chunk` query heads of a tile at a time, of all if it is 0."""

    head_chunk: int
    add_logsumexps = staticmethod(torch.logaddexp)

    def forward(self, problem: Problem, tile: Tile, q: Tensor, k: Tensor, v: Tensor, weight: Tensor) -> list[Tensor]:
        """Out `[B, Hq, M, D]` of the tile's keys alone, and the logsumexp `[B, Hq, M]` of its scores."""
        parts = []
        for heads, kv_heads in head_parts(q.shape[1], k.shape[1], self.head_chunk):
            scores = _convolved(problem, tile, q[:, heads], k[:, kv_heads], weight[heads], v.shape[2])
            values = repeat_heads(v[:, kv_heads], scores.shape[1])
            parts.append((torch.softmax(scores, dim=-1) @ values, torch.logsumexp(scores, dim=-1)))
        return [torch.cat(x, dim=1).to(sum_dtype(q.dtype)) for x in zip(*parts, strict=True)]

    def backward(
        self, problem: Problem, tile: Tile, q: Tensor, k: Tensor, v: Tensor, weight: Tensor,
        out: Tensor, logsumexp: Tensor, grad_out: Tensor,
    ) -> list[Tensor]:  # fmt: skip
        """What the tile contributes to the gradients of its q, k and v and of the weight.

        out, logsumexp and grad_out are those of all keys, for the tile's queries.
        """
        gradients = [torch.zeros_like(x, dtype=sum_dtype(q.dtype)) for x in (q, k, v, weight)]
        delta = (grad_out * out).sum(-1, keepdim=True)
        for heads, kv_heads in head_parts(q.shape[1], k.shape[1], self.head_chunk):
            leaves = [x.detach().requires_grad_() for x in (q[:, heads], k[:, kv_heads], weight[heads])]
            with torch.enable_grad():
                scores = _convolved(problem, tile, leaves[0], leaves[1], leaves[2], v.shape[2])
            values = repeat_heads(v[:, kv_heads], scores.shape[1])
            p = (scores.detach() - logsumexp[:, heads, :, None].to(scores.dtype)).clamp(max=0).exp()  # at most 1
            dscores = p * (grad_out[:, heads] @ values.transpose(-1, -2) - delta[:, heads])
            dq, dk, dweight = torch.autograd.grad(scores, leaves, dscores)
            dv = p.transpose(-1, -2) @ grad_out[:, heads]
            dv = dv.unflatten(1, (kv_heads.stop - kv_heads.start, -1)).sum(2)
            for total, at, part in zip(gradients, (heads, kv_heads, kv_heads), (dq, dk, dv), strict=False):
                total[:, at] += part
            gradients[3][heads] += dweight
        return gradients


def sum_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which partial results of inputs in `dtype` are added up."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def _convolved(problem: Problem, tile: Tile, q: Tensor, k: Tensor, weight: Tensor, own_keys: int) -> Tensor:
    """Steps 1 to 4 of the definition, for the queries and the `own_keys` keys of a tile that are no margins."""
    rows, keys = q.shape[2], k.shape[2]
    scores = q @ repeat_heads(k, q.shape[1]).transpose(-1, -2) * problem.operation.scale
    if tile.causal:  # the last rows of both are one position
        future = torch.arange(keys, device=q.device) > torch.arange(rows, device=q.device)[:, None] + (keys - rows)
        scores = scores.masked_fill(future, 0)
    conv = problem.conv
    left, above = conv.pad - tile.key_margin, conv.query_taps - 1 - tile.query_margin
    right = conv.key_taps - 1 - conv.pad - (keys - tile.key_margin - own_keys)
    padded = F.pad(scores, (left, right, above, 0))
    mixed = F.conv2d(padded, weight.to(scores.dtype).unsqueeze(1), groups=weight.shape[0])
    if tile.causal:
        own = slice(tile.key_margin, tile.key_margin + own_keys)
        mixed = mixed.masked_fill(future[tile.query_margin :, own], float("-inf"))
    return mixed
