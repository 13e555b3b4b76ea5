"""The workers of a Dask cluster that is there, through its client.

Each has one task at a time, by its address: where tasks wait at a worker that dies, Dask blames all of them.
Dask's messages are pickles: a sender can run code as the reader of a message. So both ends show certificates of one
authority, except towards a scheduler on this machine.
"""

from __future__ import annotations

import asyncio
import logging
import warnings
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from mtabench.cluster import worker
from mtabench.cluster.facts import Facts
from mtabench.cluster.worker import Measurer
from mtabench.errors import UsageError
from mtabench.sweeps.measuring_process import Outcome

if TYPE_CHECKING:
    from distributed import Client, Security

RESOURCES = {"cuda": "GPU", "cpu": "CPU"}
CONNECT_S = 10.0
STOP_S = 30.0  # for workers to end what they do


class DaskWorkers:
    """The workers that have a device of this kind as a resource, those that come later included."""

    device_name = ""  # is not known yet

    def __init__(self, client: Client, device: str, run_id: str) -> None:
        self._client, self._device, self._run_id = client, device, run_id
        self._listeners: dict[str, Callable[[str], None]] = {}
        client.subscribe_topic(run_id, lambda event: self._listeners[event[1]["worker"]](event[1]["text"]))

    def there(self) -> Collection[str]:
        """The addresses of all workers; raises ConnectionError if the scheduler is gone."""
        try:
            workers = self._client.scheduler_info()["workers"] if self._client.status == "running" else None
        except OSError:
            workers = None
        if workers is None:
            raise ConnectionError("the connection to Dask's scheduler was lost")
        return [address for address, info in workers.items() if info["resources"].get(RESOURCES[self._device])]

    def start(self, name: str) -> Future[Facts]:
        """See Measurer.start."""
        return self._at(name).submit(Measurer(self._run_id, name, self._device).start)

    def measure(self, name: str, request: bytes, doing: Callable[[str], None]) -> Future[Outcome]:
        """See Measurer.measure."""
        self._listeners[name] = doing
        return self._at(name).submit(Measurer(self._run_id, name, self._device).measure, request)

    def stop(self) -> None:
        """End the measuring processes; the workers stay."""
        with suppress(Exception):  # the scheduler is gone
            self.there()
            call = partial(self._client.run, worker.stop, self._run_id, on_error="ignore", asynchronous=True)
            self._client.sync(call, callback_timeout=STOP_S)

    def _at(self, name: str) -> Executor:
        return self._client.get_executor(
            workers=[name], allow_other_workers=False, resources={RESOURCES[self._device]: 1}, retries=0, pure=False
        )


@contextmanager
def connected(address: str, security: Security | None, device: str, run_id: str) -> Iterator[DaskWorkers]:
    """The workers of a scheduler; raises UsageError if it does not answer."""
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
            yield DaskWorkers(client, device, run_id)
    finally:
        logging.disable(logging.NOTSET)


async def _greet(address: str, security: Security | None) -> None:
    """Connect and part: a Client waits without end for the first words of what accepts a connection and is silent."""
    from distributed import Security
    from distributed.comm import connect

    async with asyncio.timeout(CONNECT_S + 0.5):  # Dask's own ends first, and says more
        credentials = (security or Security()).get_connection_args("client")
        comm = await connect(address, timeout=CONNECT_S, **credentials)
        await comm.close()


def _cause(error: BaseException | None) -> str:
    """What the system says is behind an error: Dask's own texts hold the names of its objects, or nothing."""
    while error is not None:
        if isinstance(error, OSError) and error.strerror:
            return error.strerror
        error = error.__cause__ or error.__context__
    return f"no answer within {CONNECT_S:g} s"


def security_of(address: str) -> Security | None:
    """The credentials for a scheduler by Dask's configuration; None for plain loopback.

    Raises UsageError for an invalid address, and for one beyond this machine without TLS. So it does for TLS with a
    missing authority, certificate or key.
    """
    from distributed import Security

    parts = urlsplit(address)
    try:
        if parts.scheme not in ("tls", "tcp") or not parts.hostname or not parts.port or parts.path:
            raise ValueError
    except ValueError:  # also of a port that is no number
        raise UsageError(
            f"--scheduler {address!r} is no address; expected tls://HOST:PORT, such as tls://node01:8786"
        ) from None
    if parts.scheme == "tcp":
        if parts.hostname not in ("127.0.0.1", "::1", "localhost"):
            raise UsageError(
                f"--scheduler {address} is not encrypted, and anybody on the network could run code here; plain tcp:// "
                f"is for this machine only, so start the cluster with TLS and give tls://{parts.hostname}:PORT"
            )
        return None
    security = Security(require_encryption=True)
    needed = "a PEM file each as distributed.comm.tls.ca-file, .client.cert and .client.key in Dask's configuration"
    try:
        if security.get_connection_args("client")["ssl_context"] is None:
            raise OSError("one is not set")
    except OSError as error:
        raise UsageError(f"--scheduler {address} needs {needed} ({error}); docs/cluster.md says how") from error
    return security
