"""The workers of a sweep as its process sees them: each is called in a thread, and what came of it is an event."""

import queue
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import Any, Literal, NamedTuple, Protocol

from mtabench.cluster.facts import Facts
from mtabench.errors import MtabenchError
from mtabench.sweeps.measuring_process import Outcome

MOST_WORKERS = 10_000


class WorkerLostError(Exception):
    """A worker is gone, with what it had to do."""


class Worker(Protocol):
    """What measures on one device, one call at a time. Any call raises WorkerLostError if the worker is gone."""

    name: str

    @property
    def is_there(self) -> bool:
        """Whether it can be called, as far as that is known."""

    def start(self) -> Facts:
        """Start its measuring process; what it is. Raises MtabenchError if it cannot measure."""

    def measure(self, request: bytes, doing: Callable[[str], None]) -> Outcome:
        """Measure a packed Request; `doing` is given what it works on."""

    def stop(self) -> None:
        """End what it does, from another thread."""


class WorkerEvent(NamedTuple):
    """What a worker did.

    It is "ready", with its Facts, or "done" with its group, with the Outcome. One that cannot start has "failed", with
    the reason. One that is "lost" takes along what it had.
    """

    kind: Literal["ready", "done", "failed", "lost"]
    worker: Worker
    value: Any = None


class Crew:
    """All workers that come, of which `arriving` gives those that are new; it raises ConnectionError if none can."""

    def __init__(self, arriving: Callable[[], Iterable[Worker]]) -> None:
        self.busy = 0  # how many have something to do, be it to start
        self._arriving = arriving
        self._workers: list[Worker] = []
        self._threads = ThreadPoolExecutor(MOST_WORKERS)
        self._ended: queue.SimpleQueue[tuple[Worker, bool, Future[Any]]] = queue.SimpleQueue()

    def send(self, worker: Worker, request: bytes, doing: Callable[[str], None]) -> None:
        """Give a worker that has nothing to do a group."""
        self._call(worker, partial(worker.measure, request, doing), starting=False)

    def events(self, timeout_s: float) -> list[WorkerEvent]:
        """What happened since the last call, in order; waits so long for something to happen.

        Raises ConnectionError if nobody can tell any more what the workers do.
        """
        for worker in self._arriving():
            self._workers.append(worker)
            self._call(worker, worker.start, starting=True)
        found = []
        with suppress(queue.Empty):
            found.append(self._ended.get(timeout=timeout_s))
            while True:
                found.append(self._ended.get_nowait())
        return [self._event(*one) for one in found]

    def stop(self) -> None:
        """Have the workers end what they do, their measuring processes included."""
        for worker in self._workers:
            worker.stop()
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _call(self, worker: Worker, call: Callable[[], Any], *, starting: bool) -> None:
        self.busy += 1
        self._threads.submit(call).add_done_callback(lambda future: self._ended.put((worker, starting, future)))

    def _event(self, worker: Worker, starting: bool, future: Future[Any]) -> WorkerEvent:
        self.busy -= 1
        try:
            return WorkerEvent("ready" if starting else "done", worker, future.result())
        except ConnectionError:
            raise
        except WorkerLostError:
            return WorkerEvent("lost", worker)
        except Exception as error:
            kind = "" if isinstance(error, MtabenchError) else f"{type(error).__name__}: "
            reason = kind + " ".join(str(error).split())
        return WorkerEvent("failed", worker, reason) if starting else WorkerEvent("done", worker, Outcome(lost=reason))
