"""Rows of neighbouring chunks that the convolution reaches into: fetched before the work, their gradients returned.

Chunks are `[B, H, rows, D]`; a rank has two (see `layout`). Those next to them lie on the ranks next to this one, and
chunks R-1 and R both on the last rank.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from mta_kernels.conv_attention.context_parallel.ranks import Ranks

Strips = Sequence[Tensor]


def widen(ranks: Ranks, tensors: Sequence[Tensor], before: Sequence[int], after: Sequence[int]) -> list[Tensor]:
    """Each `x [B, H, 2 * rows, D]` as its two chunks with `before` and `after` rows of their neighbours.

    `[2, B, H, before + rows + after, D]` each, zeros beyond the ends of the sequence.
    """
    chunks = [x.unflatten(2, (2, -1)).movedim(2, 0) for x in tensors]
    rows = [x.shape[3] for x in chunks]
    tails = [[x[i, :, :, n - b :] for x, n, b in zip(chunks, rows, before, strict=True)] for i in range(2)]
    heads = [[x[i, :, :, :a] for x, a in zip(chunks, after, strict=True)] for i in range(2)]
    befores, afters = _exchange(ranks, tails, heads)
    return [
        torch.stack([torch.cat([befores[i][n], x[i], afters[i][n]], dim=2) for i in range(2)])
        for n, x in enumerate(chunks)
    ]


def narrow(ranks: Ranks, gradients: Sequence[Tensor], before: Sequence[int], after: Sequence[int]) -> list[Tensor]:
    """The gradient of `widen`: each `[2, B, H, before + rows + after, D]` to `[B, H, 2 * rows, D]`.

    What was fetched gives its gradients back to those that it was fetched from, which add them to their own.
    """
    sizes = list(zip(gradients, before, after, strict=True))
    own = [x[:, :, :, b : x.shape[3] - a].clone() for x, b, a in sizes]
    to_previous = [[x[i, :, :, :b] for x, b, _ in sizes] for i in range(2)]
    to_next = [[x[i, :, :, x.shape[3] - a :] for x, _, a in sizes] for i in range(2)]
    from_previous, from_next = _exchange(ranks, to_next, to_previous)
    for n, (x, b, a) in enumerate(zip(own, before, after, strict=True)):
        for i in range(2):
            x[i, :, :, :a] += from_previous[i][n]
            x[i, :, :, x.shape[3] - b :] += from_next[i][n]
    return [x.movedim(0, 2).flatten(2, 3) for x in own]


def _exchange(ranks: Ranks, to_next: Sequence[Strips], to_previous: Sequence[Strips]) -> tuple[list[Strips], ...]:
    """Strips of both chunks to the chunks after and before them; those that both got from before and after them.

    The first chunk's next one is on the rank above, the second's on the rank below: zigzag.
    """
    up, down = _flat(to_next[0], to_previous[1]), _flat(to_previous[0], to_next[1])
    from_below, from_above = ranks.exchange(up, down)
    before_first, after_second = _strips(from_below, to_next[0], to_previous[1])
    after_first, before_second = _strips(from_above, to_previous[0], to_next[1])
    if ranks.rank == ranks.size - 1:  # its chunks are neighbours
        after_first, before_second = to_previous[1], to_next[0]
    return [before_first, before_second], [after_first, after_second]


def _flat(*strips: Strips) -> Tensor:
    return torch.cat([x.reshape(-1) for some in strips for x in some])


def _strips(message: Tensor | None, *like: Strips) -> list[Strips]:
    """The strips in a message, or zeros if there is none."""
    if message is None:
        return [[torch.zeros_like(x) for x in some] for some in like]
    parts = iter(message.split([x.numel() for some in like for x in some]))
    return [[next(parts).view(x.shape) for x in some] for some in like]
