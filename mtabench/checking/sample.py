"""Which heads and rows of a result are compared with float64: a bounded sample, drawn anew from each run's seed.

The sample has whole groups of query heads that share a KV head, or all heads of a sequence where they are mixed. Of
these it has blocks of rows: always the first and the last, and the rows around a border between blocks of a kernel.
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from random import Random
from typing import Any

import torch
from torch import Tensor

from mtabench.problem.case import Case
from mtabench.problem.inputs import Inputs

# Scores computed in float64 for one oracle, and held at once; a CPU's float64 convolution stores them once a tap.
SCORES = {"cuda": 2**28, "cpu": 2**22}
BACKWARD_SCORES = {"cuda": 2**29, "cpu": 2**21}
SCORES_AT_ONCE = {"cuda": 2**25, "cpu": 2**25}
MAX_ROWS = 2**18
EDGE_ROWS = 16  # in a block of rows of every head
LONG_BLOCK_ROWS = 64
FEWEST_BLOCKS = 4  # the first rows, the last, a border and any
CONVOLUTIONS = ("weight", "post_conv")  # of the mixers those that have a part a head
BORDERS = (2048, 128, 64)  # where kernels cut rows into chunks and tiles; a border lies at a multiple


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
        mixers: dict[str, Any] = {name: x.detach() for name, x in inputs.mixers.items()}
        convolutions = {name: x[self.query_heads.flatten()] for name, x in mixers.items() if name in CONVOLUTIONS}
        return Inputs(
            q=self._of_queries(inputs.q).to(dtype),
            k=inputs.k.detach()[self.batch, self.kv_heads][None].to(dtype),
            v=inputs.v.detach()[self.batch, self.kv_heads][None].to(dtype),
            dout=None if inputs.dout is None else self._of_queries(inputs.dout).to(dtype),
            lengths=inputs.lengths,
            **{name: x.to(dtype) for name, x in (mixers | convolutions).items()},
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


def forward_sample(case: Case, seed: int) -> list[Sample]:
    """All rows of some heads, or blocks of them where sequences are long; then a few rows of every head."""
    random = _random(case, seed)
    groups = case.batch * case.kv_heads // _together(case)
    head_rows, budget = _query_heads(case) * case.seq, SCORES[case.device]
    whole = min(groups, max(2, budget // (head_rows * case.seq)), max(1, MAX_ROWS // head_rows))
    affordable = max(LONG_BLOCK_ROWS, budget // (whole * head_rows))
    samples = [_chunked(case, _drawn(whole, groups, random), _drawn_blocks(case.seq, affordable, random))]
    if whole < groups:
        rows = FEWEST_BLOCKS * EDGE_ROWS
        edges = _drawn_blocks(case.seq, rows, random, EDGE_ROWS)
        of_groups = _drawn(min(groups, max(2, budget // (rows * head_rows))), groups, random)
        samples.append(_chunked(case, of_groups, edges))
    return samples


def decode_sample(case: Case, seed: int) -> Sample:
    """The one row of as many heads as the budget allows."""
    cost = _query_heads(case) * case.seq * max(case.window, case.head_dim)
    groups = case.batch * case.kv_heads // _together(case)
    drawn = _drawn(min(groups, max(2, 4 * SCORES[case.device] // cost)), groups, _random(case, seed))
    return _chunked(case, drawn, [(0, 1)])


def backward_sample(case: Case, seed: int) -> Sample:
    """All rows of some KV heads, the same in every sequence: the mixers' gradients sum over them."""
    cost = case.batch * _query_heads(case) * case.seq * case.seq
    of_sequence = case.kv_heads // _together(case)
    count = min(of_sequence, max(1, BACKWARD_SCORES[case.device] // cost))
    kept = _drawn(count, of_sequence, _random(case, seed))
    groups = [sequence * of_sequence + group for sequence in range(case.batch) for group in kept]
    return _chunked(case, groups, [(0, case.seq)])


def border_near(rows: int, random: Random) -> int:
    """A row at which blocks or chunks of a kernel may begin, in the middle if there are few."""
    step = next((step for step in BORDERS if step < rows), 0)
    return step * random.randint(1, (rows - 1) // step) if step else rows // 2


def _chunked(case: Case, groups: list[int], blocks: list[tuple[int, int]]) -> Sample:
    """Cut heads into chunks and rows into smaller blocks, so that the scores held at once are bounded."""
    group, together = case.heads // case.kv_heads, _together(case)
    at_once = SCORES_AT_ONCE[case.device] // together
    if case.device == "cpu":
        steps = (case.operation.pre_conv, case.operation.post_conv)
        at_once //= max(prod(step.taps) if step else 1 for step in steps)
    rows = max(1, min(at_once // (group * case.seq), max(stop - start for start, stop in blocks)))
    # The queries, keys and values of few rows are more than their scores.
    size = 1 if together > 1 else max(1, at_once // (group * case.seq * max(rows, 3 * case.head_dim)))
    chunks = []
    for first in range(0, len(groups), size):
        index = torch.tensor(groups[first : first + size], device=case.device)
        index = (index[:, None] * together + torch.arange(together, device=case.device)).flatten()
        kv_heads = index % case.kv_heads
        query_heads = kv_heads[:, None] * group + torch.arange(group, device=case.device)
        chunks.append(Heads(index // case.kv_heads, kv_heads, query_heads))
    cut = [(low, min(low + rows, stop)) for start, stop in blocks for low in range(start, stop, rows)]
    return Sample(tuple(chunks), tuple(cut))


def _together(case: Case) -> int:
    """KV heads of a sequence that make one whole: all if query heads are mixed, or a gradient sums over them."""
    shared = case.pass_ == "bwd" and (case.operation.norm or case.operation.gate)
    return case.kv_heads if case.mixings or shared else 1


def _query_heads(case: Case) -> int:
    """Query heads of those."""
    return case.heads // case.kv_heads * _together(case)


def _random(case: Case, seed: int) -> Random:
    """What draws the sample of a problem: the same if its cell is measured again with the same seed."""
    return Random(f"{seed} {case.problem_key}")


def _drawn(count: int, total: int, random: Random) -> list[int]:
    """`count` of the numbers below `total`; of three or more, two are the first and the last."""
    if count < 3:
        return sorted(random.sample(range(total), count))
    return [0, *sorted(random.sample(range(1, total - 1), count - 2)), total - 1]


def _drawn_blocks(rows: int, affordable: int, random: Random, size: int = LONG_BLOCK_ROWS) -> list[tuple[int, int]]:
    """All rows if as many are affordable, else blocks of at most `size` rows, which lie across borders of a kernel's.

    The first and the last are among them, and one around a border of the longest chunks that the rows have.
    """
    if rows <= affordable:
        return [(0, rows)]
    blocks = list(pairwise([0, *range(size // 2, rows, size), rows]))
    border = border_near(rows, random)
    chosen = {0, len(blocks) - 1, next(i for i, (_, stop) in enumerate(blocks) if border < stop)}
    others = [i for i in range(len(blocks)) if i not in chosen]
    count = min(len(others), max(FEWEST_BLOCKS, affordable // size) - len(chosen))
    return [blocks[i] for i in sorted(chosen | set(random.sample(others, count)))]
