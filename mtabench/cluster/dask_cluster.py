"""The workers of a Dask cluster that is there, through its client.

Each worker is given one group at a time, by its address, so that the sweep's process decides what is next. Dask would
hand tasks of a lost worker on by itself, and blame all that waited there.
"""

from __future__ import annotations

import asyncio
import logging
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, Any

from mtabench.cluster import worker as tasks
from mtabench.cluster.crew import WorkerLostError
from mtabench.cluster.facts import Facts
from mtabench.errors import UsageError
from mtabench.sweeps.measuring_process import Outcome

if TYPE_CHECKING:
    from distributed import Client, Security

RESOURCES = {"cuda": "GPU", "cpu": "CPU"}
CONNECT_S = 10.0
MARGIN_S = 0.5
LOOK_AGAIN_S = 1.0
STOP_S = 30.0  # for workers to end what they do


class DaskWorker:
    """A worker of a cluster, by its address."""

    def __init__(self, cluster: DaskCluster, address: str) -> None:
        self.name = address
        self._cluster = cluster

    @property
    def is_there(self) -> bool:
        """See `Worker`."""
        return self.name in self._cluster.addresses

    def start(self) -> Facts:
        """See `Worker`."""
        return self._cluster.call(self.name, tasks.start)

    def measure(self, request: bytes, doing: Callable[[str], None]) -> Outcome:
        """See `Worker`."""
        self._cluster.listeners[self.name] = doing
        return self._cluster.call(self.name, tasks.measure, request)

    def stop(self) -> None:
        """All end together, as the connection does."""


class DaskCluster:
    """The workers that have a device of this kind as a resource, those that come later included."""

    def __init__(self, client: Client, device: str, run_id: str) -> None:
        self.addresses: set[str] = set()  # of those that are there
        self.listeners: dict[str, Callable[[str], None]] = {}
        self._client, self._device, self._run_id = client, device, run_id
        self._looked = float("-inf")
        self._is_stopped = False
        client.subscribe_topic(run_id, self._hear)

    def arriving(self) -> list[DaskWorker]:
        """Those that came since the last call; raises ConnectionError if the scheduler is gone."""
        self._check_connection()
        if time.monotonic() - self._looked < LOOK_AGAIN_S:
            return []
        self._looked = time.monotonic()
        workers = self._client.scheduler_info()["workers"]
        there = {address for address, info in workers.items() if info["resources"].get(RESOURCES[self._device])}
        new = there - self.addresses
        self.addresses = there
        return [DaskWorker(self, address) for address in workers if address in new]

    def call(self, address: str, function: Callable[..., Any], *arguments: object) -> Any:
        """Call a function of `cluster.worker` there, in a task; raises what it raises, or as `Worker`."""
        from distributed.scheduler import KilledWorker

        future = self._client.submit(
            function, self._run_id, self._device, *arguments, workers=[address], allow_other_workers=False,
            resources={RESOURCES[self._device]: 1}, retries=0, pure=False,
        )  # fmt: skip
        while True:
            try:
                return future.result(timeout=LOOK_AGAIN_S)
            except KilledWorker:
                raise WorkerLostError from None
            except TimeoutError:
                self._check_connection()
            except Exception:
                self._check_connection(future.status == "cancelled")
                raise
            if self._is_stopped or address not in self.addresses:
                future.cancel()
                raise WorkerLostError

    def stop(self) -> None:
        """Have the workers end what they do for this sweep, their measuring processes included."""
        self._is_stopped = True
        call = partial(self._client.run, tasks.stop, self._run_id, on_error="ignore", asynchronous=True)
        with suppress(Exception):  # the scheduler is gone
            self._client.unsubscribe_topic(self._run_id)
            self._check_connection()
            self._client.sync(call, callback_timeout=STOP_S)

    def _check_connection(self, lost: bool = False) -> None:
        """Dask's client cancels what it asked for when it loses its scheduler, and may find it again or not."""
        if lost or self._client.status != "running":
            raise ConnectionError("the connection to Dask's scheduler was lost")

    def _hear(self, event: tuple[float, Any]) -> None:
        """Called by Dask's client in its own thread."""
        self.listeners[event[1]["worker"]](event[1]["text"])


@contextmanager
def connected(address: str, security: Security | None, device: str, run_id: str) -> Iterator[DaskCluster]:
    """The cluster of a scheduler, whose workers are let go at the end; raises UsageError if it does not answer."""
    from distributed import Client

    try:
        with ThreadPoolExecutor(1) as pool:  # a thread of its own: a notebook's runs a loop already
            pool.submit(asyncio.run, _greet(address, security)).result()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # versions are compared afterwards, those that matter
            client = Client(address, security=security, timeout=CONNECT_S, set_as_default=False)
    except (OSError, ValueError, RuntimeError, MemoryError) as error:
        raise UsageError(
            f"no scheduler of Dask answers at {address} ({_cause(error)}); start it, or correct --scheduler "
            "and the TLS files of Dask's configuration"
        ) from error
    logging.disable()  # of a scheduler that is lost, Dask logs tracebacks where one sentence says it
    try:
        with client:
            cluster = DaskCluster(client, device, run_id)
            try:
                yield cluster
            finally:
                with suppress(KeyboardInterrupt):  # once more, out of impatience
                    cluster.stop()
    finally:
        logging.disable(logging.NOTSET)


async def _greet(address: str, security: Security | None) -> None:
    """Connect and part: a Client waits without end for the first words of what accepts a connection and is silent."""
    from distributed import Security
    from distributed.comm import connect

    credentials = (security or Security()).get_connection_args("client")
    async with asyncio.timeout(CONNECT_S + MARGIN_S):  # Dask's own ends first, and says more
        comm = await connect(address, timeout=CONNECT_S, **credentials)
        await comm.close()


def _cause(error: BaseException) -> str:
    """What is behind an error in words: Dask's own texts hold the names of its objects, or nothing."""
    chain, behind = [error], error.__cause__ or error.__context__
    while behind is not None and behind not in chain:
        chain.append(behind)
        behind = behind.__cause__ or behind.__context__
    for one in reversed(chain):  # where the system refused, what came of it says less
        if isinstance(one, OSError) and one.strerror:
            return one.strerror
    if type(chain[-1]).__name__ in ("TimeoutError", "CancelledError"):  # asyncio's or others'
        return f"no answer within {CONNECT_S:g} s"
    told = " ".join(str(chain[-1]).split())
    return told if told and " object at 0x" not in told else type(chain[-1]).__name__
