"""Ranks that are threads of this process and take turns: one runs at a time, until it waits for a message."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from torch import Tensor


class SimulatedRanks:
    """As `mta_kernels.conv_attention.context_parallel.ranks.Ranks` describes it."""

    def __init__(self, rank: int, size: int, mail: dict[tuple[int, int], queue.Queue], turn: threading.Lock) -> None:
        self.rank, self.size, self._mail, self._turn = rank, size, mail, turn

    def shift(self, tensors: Sequence[Tensor]) -> SimulatedTransfer:
        self._send((self.rank + 1) % self.size, tensors)
        return SimulatedTransfer(self, (self.rank - 1) % self.size)

    def exchange(self, up: Tensor, down: Tensor) -> tuple[Tensor | None, Tensor | None]:
        above, below = self.rank + 1 < self.size, self.rank > 0
        if above:
            self._send(self.rank + 1, up)
        if below:
            self._send(self.rank - 1, down)
        return self.receive(self.rank - 1) if below else None, self.receive(self.rank + 1) if above else None

    def gather(self, x: Tensor) -> list[Tensor]:
        for rank in range(self.size):
            self._send(rank, x)
        return [self.receive(rank) for rank in range(self.size)]

    def receive(self, rank: int) -> Any:
        self._turn.release()
        try:
            return self._mail[rank, self.rank].get(timeout=60)
        finally:
            self._turn.acquire()

    def _send(self, rank: int, what: Tensor | Sequence[Tensor]) -> None:
        tensors = what.clone() if isinstance(what, Tensor) else [x.clone() for x in what]
        self._mail[self.rank, rank].put(tensors)


class SimulatedTransfer:
    def __init__(self, ranks: SimulatedRanks, source: int) -> None:
        self._ranks, self._source = ranks, source

    def wait(self) -> list[Tensor]:
        return self._ranks.receive(self._source)


def run_ranks(size: int, function: Callable[[SimulatedRanks], Any]) -> list[Any]:
    """What `function(ranks)` returns on each of `size` ranks."""
    mail: dict[tuple[int, int], queue.Queue] = {(a, b): queue.Queue() for a in range(size) for b in range(size)}
    turn = threading.Lock()

    def run(rank: int) -> Any:
        with turn:
            return function(SimulatedRanks(rank, size, mail, turn))

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(run, range(size)))
