"""Processes that share the cases of a fuzz: one that dies is replaced, and the case that it was on is noted."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from fuzz.cases import BLOCK, FuzzCase, Target, draw
from mtabench.processes import ProcessEndedError, call_in_process, in_threads

LONGEST_CASE_S = 300.0  # that a worker may go on for after its time, a compile included; then it is killed


@dataclass(frozen=True)
class Share:
    """The cases of one of several workers: whole blocks in turn."""

    seed: int
    targets: tuple[Target, ...]
    device: str
    worker: int
    workers: int
    cases: int | None = None  # of all workers, at most

    def numbers(self, after: int = -1) -> Iterator[int]:
        """The numbers of its cases that come after one of them."""
        size = BLOCK[self.device]
        blocks = itertools.count(self.worker, self.workers)
        numbers = (number for block in blocks for number in range(block * size, (block + 1) * size))
        own = None if self.cases is None else len(range(self.worker, self.cases, self.workers))
        return (number for number in itertools.islice(numbers, own) if number > after)

    def draw(self, number: int) -> FuzzCase:
        """The case of a number."""
        return draw(self.seed, number, self.targets, self.device)


@dataclass(frozen=True)
class Ready:
    """A message: a worker has imported what it needs, and its time begins."""


@dataclass(frozen=True)
class Started:
    """A message: a worker is on this case now."""

    number: int


@dataclass(frozen=True)
class Ended:
    """A message: what became of a case, in words; `seconds` it took."""

    number: int
    op: str
    backend: str
    pass_: str
    wrong: tuple[str, ...]
    refused: bool
    seconds: float
    close_look: bool = False  # whether its errors were compared with what rounding may leave
    kernels: tuple[str, ...] = ()  # that its process had not run before
    marginal: bool = False  # just beyond a bound, and within it with other values


Message = Ready | Started | Ended


def run_share(send: Callable[[Message], None], share: Share, after: int, seconds: float) -> None:
    """In a worker: its cases from behind one of them on, until time is over or the GPU's context is lost."""
    from fuzz.trial import new_kernels, prepare, try_case

    prepare(share.device, share.worker)
    send(Ready())
    until = time.monotonic() + seconds
    for number in share.numbers(after):
        if time.monotonic() > until:
            return
        send(Started(number))
        begun = time.monotonic()
        case = share.draw(number)
        outcome = try_case(case)
        wrong = tuple(f"{found.check}: {found.text}" for found in outcome.wrong)
        spent = time.monotonic() - begun
        more = outcome.refused, spent, outcome.close_look, new_kernels(), outcome.marginal
        send(Ended(number, case.op, case.backend, case.pass_, wrong, *more))
        if outcome.broken:
            return


def run_workers(
    seed: int, targets: Sequence[Target], device: str, jobs: int, seconds: float, cases: int | None = None
) -> Iterator[Ended]:
    """All outcomes, as they come, of `jobs` worker processes, which have so many seconds once they have started.

    They end after so many `cases` in all. Ctrl-C ends them all.
    """
    shares = [Share(seed, tuple(targets), device, worker, jobs, cases) for worker in range(jobs)]
    return in_threads([Follower(share, seconds).run for share in shares])


class Follower:
    """Keeps the worker of a share alive until its time is over, and says what became of each case."""

    def __init__(self, share: Share, seconds: float) -> None:
        self._share, self._seconds = share, seconds
        self._until: float | None = None  # once a worker was ready
        self._number, self._is_on_it, self._begun = -1, False, 0.0

    def run(self, give: Callable[[Ended], None]) -> None:
        """Give what ends."""
        self._give = give
        while (left := self._left()) > 0 and next(self._share.numbers(self._number), None) is not None:
            self._begun = time.monotonic()
            reason = self._run_worker(left)
            if reason:
                self._note(reason)
                if self._until is None:
                    return  # it cannot even start

    def _run_worker(self, left: float) -> str:
        """Why the worker ended before its time; an empty text if it did not, or if it wants a successor."""
        try:
            arguments = (self._share, self._number, left)
            call_in_process(run_share, arguments, left + LONGEST_CASE_S, self._receive)
        except TimeoutError:
            return f"its process was stopped after {time.monotonic() - self._begun:.0f} s on it"
        except ProcessEndedError as error:
            return str(error)
        return ""

    def _left(self) -> float:
        return self._seconds if self._until is None else self._until - time.monotonic()

    def _receive(self, message: Message) -> None:
        if isinstance(message, Ready):
            self._until = self._until or time.monotonic() + self._seconds
            return
        self._number, self._is_on_it = message.number, isinstance(message, Started)
        self._begun = time.monotonic()
        if isinstance(message, Ended):
            self._give(message)

    def _note(self, reason: str) -> None:
        """The case that a worker ended on is one that failed."""
        number = self._number if self._is_on_it else next(self._share.numbers(self._number))
        case = self._share.draw(number)
        spent = time.monotonic() - self._begun
        self._give(Ended(number, case.op, case.backend, case.pass_, (f"crash: {reason}",), False, spent))
        self._number, self._is_on_it = number, False
