"""Which heads and rows of a result are compared with float64: a bounded, deterministic sample.

Whole groups of query heads that share a KV head, spread evenly over the batch, first and last among them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from mtabench.sweeps.case import Case
from mtabench.sweeps.inputs import Inputs

# Scores computed in float64 for one oracle, and held at once; a CPU's float64 convolution stores them once a tap.
SCORES = {"cuda": 2**28, "cpu": 2**22}
BACKWARD_SCORES = {"cuda": 2**29, "cpu": 2**21}
SCORES_AT_ONCE = {"cuda": 2**25, "cpu": 2**25}
MAX_ROWS = 2**18
EDGE_ROWS = 16  # rows of every head at the start, in the middle and at the end
LONG_BLOCK_ROWS = 64


@dataclass(frozen=True, slots=True)
class Heads:
    """Some KV heads with all their query heads, seen as the heads of one sequence.

    `batch`, `kv_heads` are `[S]`, `query_heads` is `[S, group]`: indices into the inputs.
    """

    batch: Tensor
    kv_heads: Tensor
    query_heads: Tensor

    def gather(self, inputs: Inputs, dtype: torch.dtype) -> Inputs:
        """Their part of the inputs, copied, in `dtype`: `q, dout [1, S * group, N, D]`, `k, v [1, S, N, D]`."""
        return Inputs(
            q=self._of_queries(inputs.q).to(dtype),
            k=inputs.k.detach()[self.batch, self.kv_heads][None].to(dtype),
            v=inputs.v.detach()[self.batch, self.kv_heads][None].to(dtype),
            weight=None if inputs.weight is None else inputs.weight.detach()[self.query_heads.flatten()].to(dtype),
            dout=None if inputs.dout is None else self._of_queries(inputs.dout).to(dtype),
            lengths=inputs.lengths,
        )

    def picker(self, name: str, rows: tuple[int, int] | None) -> Callable[[Tensor], Tensor]:
        """Takes `[heads * rows, D]` of these heads out of a tensor shaped as input `name`; None means all rows."""
        taken = slice(*rows) if rows else slice(None)
        if name == "q":
            return lambda tensor: tensor[self.batch[:, None], self.query_heads, taken].flatten(0, -2)
        return lambda tensor: tensor[self.batch, self.kv_heads, taken].flatten(0, -2)

    def _of_queries(self, tensor: Tensor) -> Tensor:
        return tensor.detach()[self.batch[:, None], self.query_heads].flatten(0, 1)[None]


@dataclass(frozen=True, slots=True)
class Sample:
    """Rows `blocks` of each of the heads in `chunks`; a block of a chunk fits into memory."""

    chunks: tuple[Heads, ...]
    blocks: tuple[tuple[int, int], ...]


def forward_sample(case: Case) -> list[Sample]:
    """All rows of some heads, or blocks of them where sequences are long; then a few rows of every head."""
    groups = case.batch * case.kv_heads
    head_rows, budget = case.heads // case.kv_heads * case.seq, SCORES[case.device]
    whole = min(groups, max(2, budget // (head_rows * case.seq)), max(1, MAX_ROWS // head_rows))
    affordable = max(LONG_BLOCK_ROWS, budget // (whole * head_rows))
    samples = [_sample(case, whole, _spread_blocks(case.seq, affordable))]
    if whole < groups:
        edges = _spread_blocks(case.seq, 3 * EDGE_ROWS, EDGE_ROWS)
        cost = 3 * EDGE_ROWS * head_rows
        samples.append(_sample(case, min(groups, max(2, budget // cost)), edges))
    return samples


def decode_sample(case: Case) -> Sample:
    """The one row of as many heads as the budget allows."""
    window = min(case.conv_q or 1, case.seq)
    cost = case.heads // case.kv_heads * case.seq * max(window, case.head_dim)
    groups = min(case.batch * case.kv_heads, max(2, 4 * SCORES[case.device] // cost))
    return _sample(case, groups, [(0, 1)])


def backward_sample(case: Case) -> Sample:
    """All rows of some KV heads, the same in every sequence: the weight's gradient sums over them."""
    cost = case.batch * case.heads // case.kv_heads * case.seq * case.seq
    count = min(case.kv_heads, max(1, BACKWARD_SCORES[case.device] // cost))
    kept = _spread(count, case.kv_heads)
    groups = [sequence * case.kv_heads + kv_head for sequence in range(case.batch) for kv_head in kept]
    return _chunked(case, groups, [(0, case.seq)])


def _sample(case: Case, groups: int, blocks: list[tuple[int, int]]) -> Sample:
    return _chunked(case, _spread(groups, case.batch * case.kv_heads), blocks)


def _chunked(case: Case, groups: list[int], blocks: list[tuple[int, int]]) -> Sample:
    """Cut heads into chunks and rows into smaller blocks, so that the scores held at once are bounded."""
    group = case.heads // case.kv_heads
    at_once = SCORES_AT_ONCE[case.device]
    if case.device == "cpu":
        at_once //= (case.conv_q or 1) * (case.conv_k or 1)
    rows = max(1, min(at_once // (group * case.seq), max(stop - start for start, stop in blocks)))
    # The queries, keys and values of few rows are more than their scores.
    size = max(1, at_once // (group * case.seq * max(rows, 3 * case.head_dim)))
    chunks = []
    for first in range(0, len(groups), size):
        index = torch.tensor(groups[first : first + size], device=case.device)
        kv_heads = index % case.kv_heads
        query_heads = kv_heads[:, None] * group + torch.arange(group, device=case.device)
        chunks.append(Heads(index // case.kv_heads, kv_heads, query_heads))
    cut = [(low, min(low + rows, stop)) for start, stop in blocks for low in range(start, stop, rows)]
    return Sample(tuple(chunks), tuple(cut))


def _spread(count: int, total: int) -> list[int]:
    """`count` of the numbers below `total`, evenly spread, first and last among them; the last if one."""
    if count == 1:
        return [total - 1]
    return sorted({round(i * (total - 1) / (count - 1)) for i in range(count)})


def _spread_blocks(rows: int, affordable: int, size: int = LONG_BLOCK_ROWS) -> list[tuple[int, int]]:
    """All rows if as many are affordable, else blocks of `size` rows, evenly spread, first and last among them."""
    if rows <= affordable:
        return [(0, rows)]
    count = max(2, affordable // size)
    starts = _spread(min(count, math.ceil(rows / size)), rows - size + 1)
    return [(start, start + size) for start in starts]
