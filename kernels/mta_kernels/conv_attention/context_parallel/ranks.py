"""What the algorithm asks of the ranks it runs on, and how a process group does it.

The algorithm knows `Ranks` alone, so that ranks may be processes of a group or, in a test, threads of one process.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch.distributed as dist
from torch import Tensor

from mta_kernels.allocation import empty_like


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
