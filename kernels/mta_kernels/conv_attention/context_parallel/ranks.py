"""What the algorithm asks of the ranks it runs on, and how a process group does it.

The algorithm knows `Ranks` alone, so that ranks may be processes of a group or, in a test, threads of one process.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from mta_kernels.allocation import empty_like

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


class Transfer(Protocol):
    """Tensors under way."""

    def wait(self) -> list[Tensor]:
        """The tensors received; on a GPU the current stream waits for them, and the host does not."""


class Ranks(Protocol):
    """The ranks that share a sequence; every rank makes the same calls in the same order."""

    rank: int
    size: int

    def shift(self, tensors: Sequence[Tensor]) -> Transfer:
        """Send tensors to the next rank round the ring, and receive as many of these shapes from the one before."""

    def exchange(self, up: Tensor, down: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """Send `up` to the rank above and `down` to the one below; what the ones below and above sent this one.

        The ranks form no ring here: None where there is no rank. Shapes are the same on all ranks.
        """

    def gather(self, x: Tensor) -> list[Tensor]:
        """The tensors x of all ranks, which have one shape, in the order of the ranks."""


@dataclass
class _Transfer:
    sent: Sequence[Tensor]  # held until they have left
    received: list[Tensor]
    works: list[dist.Work]

    def wait(self) -> list[Tensor]:
        for work in self.works:
            work.wait()
        self.sent = ()
        return self.received


class GroupRanks:
    """The ranks of a process group: NCCL for tensors on GPUs, gloo on a CPU.

    NCCL moves what it is given on a stream of its own, beside the kernels that are launched after it, and `wait` makes
    the current stream wait for that stream.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group, self.rank, self.size = group, group.rank(), group.size()

    def shift(self, tensors: Sequence[Tensor]) -> Transfer:
        return self._start(
            [(x, (self.rank + 1) % self.size) for x in tensors],
            [(empty_like(x), (self.rank - 1) % self.size) for x in tensors],
        )

    def exchange(self, up: Tensor, down: Tensor) -> tuple[Tensor | None, Tensor | None]:
        above = self.rank + 1 if self.rank + 1 < self.size else None
        below = self.rank - 1 if self.rank else None
        from_below = empty_like(up) if below is not None else None
        from_above = empty_like(down) if above is not None else None
        sends = [(x, peer) for x, peer in ((up, above), (down, below)) if peer is not None]
        receives = [
            (x, peer) for x, peer in ((from_below, below), (from_above, above)) if x is not None and peer is not None
        ]
        self._start(sends, receives).wait()
        return from_below, from_above

    def gather(self, x: Tensor) -> list[Tensor]:
        x = x.contiguous()
        found = [empty_like(x) for _ in range(self.size)]
        dist.all_gather(found, x, group=self.group)
        return found

    def _start(self, sends: Sequence[tuple[Tensor, int]], receives: Sequence[tuple[Tensor, int]]) -> _Transfer:
        """Messages between two ranks arrive in the order in which they are sent; empty ones are not sent."""
        operations = [dist.P2POp(dist.isend, x, self._peer(to), self.group) for x, to in sends if x.numel()]
        operations += [dist.P2POp(dist.irecv, x, self._peer(source), self.group) for x, source in receives if x.numel()]
        works = dist.batch_isend_irecv(operations) if operations else []
        return _Transfer([x for x, _ in sends], [x for x, _ in receives], works)

    def _peer(self, rank: int) -> int:
        return dist.get_global_rank(self.group, rank)
