"""The workers of a sweep as its process sees them, through Dask's client: who comes and goes, who gets what, results.

Each worker has at most one group at a time, sent to it by name, so that this process decides what is next. Dask would
hand tasks of a lost worker on by itself, and blame all that waited there.
"""

from __future__ import annotations

import queue
import secrets
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from mtabench.cluster import worker as tasks
from mtabench.cluster.facts import Facts
from mtabench.cluster.local import RESOURCES
from mtabench.cluster.measurer import Outcome
from mtabench.errors import MtabenchError

if TYPE_CHECKING:
    from distributed import Client, Future

ANSWER_S = 30.0  # for a result that is ready, and for workers to end what they do


class WorkerEvent(NamedTuple):
    """What happened to a worker.

    It is "ready", with its Facts, "doing" something, with a text, or "done" with its group, with the Outcome. One that
    cannot start has "failed", with the reason. One that is "lost" takes along what it had.
    """

    kind: Literal["ready", "doing", "done", "failed", "lost"]
    worker: str
    value: Any = None


class Crew:
    """All workers of a Dask cluster that have a device of this kind as a resource, those that come later included.

    `start` and `measure` are what runs there, by default the functions of `cluster.worker`.
    """

    def __init__(
        self,
        client: Client,
        device: str,
        start: Callable[[str, str], Facts] = tasks.start,
        measure: Callable[[bytes, str, str], Outcome] = tasks.measure,
    ) -> None:
        self.run_id = secrets.token_hex(6)
        self._client, self._device = client, device
        self._start, self._measure = start, measure
        self._topic = f"mtabench-{self.run_id}"
        self._sent: dict[str, Future] = {}  # what each worker has to do
        self._starting: set[str] = set()
        self._numbers = 0
        self._inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
        client.subscribe_topic(self._topic, self._hear)
        client.subscribe_topic("all", self._hear)  # before looking, so that nobody is missed in between
        self._welcome(None)

    @property
    def workers(self) -> int:
        """How many have something to do, be it to start."""
        return len(self._sent)

    def send(self, worker: str, request: bytes) -> None:
        """Give a worker that has nothing to do a group, as a pickled Request; raises ConnectionError as `events`."""
        self._submit(worker, self._measure, request, self.run_id, self._topic)

    def events(self, timeout_s: float) -> list[WorkerEvent]:
        """What happened since the last call, in order; waits so long for something to happen.

        Raises ConnectionError if the scheduler is gone: then nobody can tell any more what the workers do.
        """
        from distributed.scheduler import KilledWorker

        found: list[WorkerEvent] = []
        ended: dict[str, Future] = {}
        came: set[str] = set()
        for message in self._messages(timeout_s):
            if isinstance(message, WorkerEvent):
                found.append(message)
                continue
            what, worker, value = message  # the last is the future that ended
            if what == "interrupted":
                raise KeyboardInterrupt
            if what == "ended":
                # Killed: it failed because its worker is gone, which is told by itself.
                killed = value.status == "error" and isinstance(value.exception(timeout=ANSWER_S), KilledWorker)
                cancelled = value.status == "cancelled"
                if self._sent.get(worker) is not value or killed:
                    continue
                self._check_connection(cancelled)
                ended[worker] = self._sent.pop(worker)
            elif what == "add-worker":
                came.add(worker)
            elif what == "remove-worker":
                came.discard(worker)
                ended.pop(worker, None)  # what was not fetched yet went with it
                future = self._sent.pop(worker, None)
                if future is not None:
                    future.cancel()
                self._starting.discard(worker)
                found.append(WorkerEvent("lost", worker))
        self._check_connection()
        self._welcome(came)
        return found + self._results(ended)

    def interrupt(self) -> None:
        """Have `events` raise KeyboardInterrupt; may be called by a signal's handler."""
        self._inbox.put(("interrupted", "", None))

    def stop(self) -> None:
        """Have the workers end what they do for this sweep, their measuring processes included."""
        call = partial(self._client.run, tasks.stop, self.run_id, on_error="ignore", asynchronous=True)
        with suppress(Exception):  # the scheduler is gone
            for topic in (self._topic, "all"):
                self._client.unsubscribe_topic(topic)
            for future in self._sent.values():
                future.cancel(force=True)
            self._sent.clear()
            self._check_connection()
            self._client.sync(call, callback_timeout=ANSWER_S)

    def _welcome(self, came: set[str] | None) -> None:
        """Have those that came, or all that are there, start their measuring processes."""
        if came is not None and not came:
            return
        for worker, info in self._client.scheduler_info()["workers"].items():
            fits = info["resources"].get(RESOURCES[self._device]) and (came is None or worker in came)
            if fits and worker not in self._sent:
                self._starting.add(worker)
                self._submit(worker, self._start, self.run_id, self._device)

    def _check_connection(self, lost: bool = False) -> None:
        """Dask's client cancels what it asked for when it loses its scheduler, and may find it again or not."""
        if lost or self._client.status != "running":
            raise ConnectionError("the connection to Dask's scheduler was lost")

    def _submit(self, worker: str, function: Callable[..., object], *arguments: object) -> None:
        self._check_connection()
        self._numbers += 1
        future = self._client.submit(
            function, *arguments, key=f"{self._topic}-{self._numbers}", workers=[worker], allow_other_workers=False,
            resources={RESOURCES[self._device]: 1}, retries=0, pure=False,
        )  # fmt: skip
        self._sent[worker] = future
        future.add_done_callback(lambda ended: self._inbox.put(("ended", worker, ended)))

    def _hear(self, event: tuple[float, Any]) -> None:
        """Called by Dask's client in its own thread."""
        message = event[1]
        if "text" in message:
            self._inbox.put(WorkerEvent("doing", message["worker"], message["text"]))
        elif message.get("action") in ("add-worker", "remove-worker"):
            self._inbox.put((message["action"], message["worker"], None))

    def _messages(self, timeout_s: float) -> Iterable[Any]:
        with suppress(queue.Empty):
            yield self._inbox.get(timeout=timeout_s)
            while True:
                yield self._inbox.get_nowait()

    def _results(self, ended: dict[str, Future]) -> list[WorkerEvent]:
        """Fetched together: each is a message from its worker."""
        if len(ended) > 1 and all(future.status == "finished" for future in ended.values()):
            call = partial(self._client.gather, list(ended.values()), asynchronous=True)
            with suppress(Exception):  # then one by one, which tells whose it was
                values = self._client.sync(call, callback_timeout=ANSWER_S)
                return [self._event(worker, value) for worker, value in zip(ended, values, strict=True)]
        return [self._result(worker, future) for worker, future in ended.items()]

    def _result(self, worker: str, future: Future) -> WorkerEvent:
        try:
            return self._event(worker, future.result(timeout=ANSWER_S))
        except MtabenchError as error:
            reason = str(error)
        except Exception as error:
            reason = " ".join(f"{type(error).__name__}: {error}".split())
        if worker in self._starting:
            return WorkerEvent("failed", worker, reason)
        return WorkerEvent("done", worker, Outcome(lost=reason))

    def _event(self, worker: str, value: Facts | Outcome) -> WorkerEvent:
        self._starting.discard(worker)
        return WorkerEvent("ready" if isinstance(value, Facts) else "done", worker, value)
