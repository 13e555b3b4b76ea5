"""The algorithm: keys and values go round the ring while each rank works on those that it has; results are merged.

At step s a rank holds the keys of rank `rank - s`. Partial results are merged in this order, whatever arrives when.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from mta_kernels.conv_attention.context_parallel.eager import sum_dtype
from mta_kernels.conv_attention.context_parallel.ranks import Ranks, narrow, widen
from mta_kernels.conv_attention.context_parallel.tiles import Problem, Tile, tiles
from mta_kernels.operation import Operation


class Tiles(Protocol):
    """What computes a tile: `EagerTiles`, `TritonTiles` or `HopperTiles`."""

    def forward(self, problem: Problem, tile: Tile, q: Tensor, k: Tensor, v: Tensor, weight: Tensor) -> list[Tensor]:
        """Out and logsumexp of a tile."""

    def backward(
        self, problem: Problem, tile: Tile, q: Tensor, k: Tensor, v: Tensor, weight: Tensor,
        out: Tensor, logsumexp: Tensor, grad_out: Tensor,
    ) -> list[Tensor]:  # fmt: skip
        """What a tile contributes to the gradients of q, k, v and weight."""

    def add_logsumexps(self, one: Tensor, other: Tensor) -> Tensor:
        """The logsumexp of the keys of two tiles."""


def forward(
    ranks: Ranks, kernels: Tiles, problem: Problem, q: Tensor, k: Tensor, v: Tensor, weight: Tensor
) -> tuple[Tensor, Tensor]:
    """This rank's rows of out `[B, Hq, 2 * rows, D]`, and the logsumexp of both chunks, `[2, B, Hq, rows]`."""
    wide_q, *travelling = widen(ranks, (q, k, v), problem.before, problem.after)
    totals: list[list[Tensor]] = [[], []]  # out and logsumexp of each chunk
    for step in range(ranks.size):
        transfer = ranks.shift(travelling) if step + 1 < ranks.size else None
        for tile in tiles(problem, ranks.rank, (ranks.rank - step) % ranks.size, ranks.size):
            partial = kernels.forward(problem, tile, *tile.of(wide_q, *travelling), weight)
            _merge(kernels, totals[tile.query], partial)
        if transfer is not None:
            travelling = transfer.wait()
    outs, logsumexps = zip(*totals, strict=True)
    return torch.cat([out.to(q.dtype) for out in outs], dim=2), torch.stack(logsumexps)


def backward(
    ranks: Ranks, kernels: Tiles, problem: Problem, q: Tensor, k: Tensor, v: Tensor, weight: Tensor,
    out: Tensor, logsumexp: Tensor, grad_out: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """The gradients of this rank's q, k and v, and of the weight, summed over all ranks; in the dtype of sums."""
    wide_q, *travelling = widen(ranks, (q, k, v), problem.before, problem.after)
    outs, grad_outs = (x.unflatten(2, (2, -1)) for x in (out, grad_out))
    sums: dict[str, Any] = {"dtype": sum_dtype(q.dtype)}
    dq, dweight = torch.zeros_like(wide_q, **sums), torch.zeros_like(weight, **sums)
    following = None  # gradients of the keys and values of this step, from the rank that had them before
    for step in range(ranks.size):
        transfer = ranks.shift(travelling) if step + 1 < ranks.size else None
        dk, dv = (torch.zeros_like(x, **sums) for x in travelling)
        for tile in tiles(problem, ranks.rank, (ranks.rank - step) % ranks.size, ranks.size):
            out_rows, grad_rows = (x[:, :, tile.query] for x in (outs, grad_outs))
            *parts, weight_part = kernels.backward(
                problem, tile, *tile.of(wide_q, *travelling), weight, out_rows, logsumexp[tile.query], grad_rows
            )
            for total, part in zip(tile.of(dq, dk, dv), parts, strict=True):
                total += part
            dweight += weight_part
        if following is not None:
            for total, part in zip((dk, dv), following.wait(), strict=True):
                total += part
        following = ranks.shift([dk, dv])
        if transfer is not None:
            travelling = transfer.wait()
    assert following is not None
    dq, dk, dv = narrow(ranks, (dq, *following.wait()), problem.before, problem.after)
    return dq, dk, dv, sum_in_order(ranks.gather(dweight))


def passed_bytes(
    operation: Operation, seq_len: int, ranks: int, *, batch: int, kv_heads: int, head_dim: int, dtype: torch.dtype,
    backward: bool,
) -> int:  # fmt: skip
    """Bytes that each rank sends round the ring in a call on `seq_len` tokens: all but a few rows of halo.

    Forward and backward pass keys and values on R - 1 times, and the backward their gradients R times.
    """
    problem = Problem(seq_len // (2 * ranks), operation)
    wide = sum(problem.rows + b + a for b, a in zip(problem.before[1:], problem.after[1:], strict=True))
    numbers = 2 * batch * kv_heads * wide * head_dim
    passed = (ranks - 1) * numbers * dtype.itemsize
    return passed + ranks * numbers * sum_dtype(dtype).itemsize if backward else passed


def sum_in_order(parts: Sequence[Tensor]) -> Tensor:
    """Their sum, the first ones first: the same on every rank, bit for bit."""
    total = parts[0].clone()
    for part in parts[1:]:
        total += part
    return total


def _merge(kernels: Tiles, total: list[Tensor], partial: list[Tensor]) -> None:
    """Take in out `[B, Hq, rows, D]` and logsumexp `[B, Hq, rows]` of further keys; the first are taken as they are."""
    if not total:
        total += partial
        return
    (out, logsumexp), (more, more_logsumexp) = total, partial
    out.lerp_(more, torch.sigmoid(more_logsumexp - logsumexp)[..., None])
    total[1] = kernels.add_logsumexps(logsumexp, more_logsumexp)
