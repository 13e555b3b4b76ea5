"""The workers that a sweep asks for: started or found, asked what they are, given the sweep, and sent home."""

from __future__ import annotations

import asyncio
import logging
import signal
import time
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import TYPE_CHECKING, Any

from rich.console import Console

from mtabench.cluster.local import RESOURCES, Local, local_cluster, local_workers
from mtabench.cluster.security import security_of
from mtabench.cluster_options import ClusterOptions
from mtabench.errors import MtabenchError, UsageError
from mtabench.prose import plural

if TYPE_CHECKING:
    from distributed import Client, Security

    from mtabench.cluster.crew import Crew
    from mtabench.cluster.facts import Facts
    from mtabench.cluster.watching import CrewWatcher
    from mtabench.measuring.stopwatch import Stopwatch
    from mtabench.measuring.timing import Settings
    from mtabench.problem.case import Case
    from mtabench.results.writer import Writer
    from mtabench.sweeps.plan import Plan

CONNECT_S = 10.0
MARGIN_S = 0.5
COME_S = 60.0  # for a cluster's first worker, which its queue may still be starting
MOST_PLACES = 16  # of workers in a line
START_S = 300.0  # for measuring processes: torch may have to come from a slow disk


class Team:
    """The workers of one sweep. Until `meet`, what they are is known only as far as this machine tells."""

    def __init__(self, asked: ClusterOptions, device: str, local: Sequence[Local], crew: Crew | None) -> None:
        self._asked, self._device, self._local, self._crew = asked, device, local, crew
        self._workers: Mapping[str, Facts] = {}

    @property
    def device_name(self) -> str:
        """The device's name, empty if it is not known yet."""
        names = [facts.device for facts in self._workers.values()] or [local.device for local in self._local]
        return names[0] if names else ""

    def meet(self) -> list[str]:
        """Wait for the workers; who measures, in lines for a person.

        Raises UsageError if there are none, or one that may not measure.
        """
        if self._crew is not None:
            try:
                with _ctrl_c_goes_to(self._crew), Console(stderr=True).status("waiting for the workers"):
                    self._workers = self._fit(self._first())
            except ConnectionError as error:
                raise MtabenchError(f"{error}; nothing was measured yet") from error
        count = len(self._workers) or len(self._local)
        if not count:
            return ["workers: those of the cluster; the time is that of one"]
        where = f" on {self.device_name}" if self.device_name else ""
        places = ", ".join([facts.place for facts in self._workers.values()][:MOST_PLACES])
        more = f" and {count - MOST_PLACES} more" if count > MOST_PLACES else ""
        return [
            f"workers: {count}{where}" + (f": {places}{more}" if places else ""),
            *sharing(facts.place for facts in self._workers.values() if not facts.gpu),
        ]

    def against(self, cases: Sequence[Case]) -> dict[Case, str]:
        """Nothing: the workers find out which cells cannot run there."""
        return {}

    def watcher(self, *arguments: Any) -> AbstractContextManager[Any]:
        """What shows the sweep to a person, made of a console, the number of cells, rows of before and the pace."""
        from mtabench.cluster.watching import crew_watcher

        return crew_watcher(*arguments)

    def _fit(self, met: Mapping[str, Facts]) -> Mapping[str, Facts]:
        """Those of the workers that --on means; raises UsageError if they are not all alike, and like this process."""
        from mtabench.cluster.facts import facts_here, fits
        from mtabench.cluster.sweep import reason_against

        # A login node has no GPU, and needs none to say which code it has.
        versions = facts_here("cpu").versions()
        there = dict.fromkeys(facts.device for facts in met.values())
        on = self._asked.on
        fit = {at: facts for at, facts in met.items() if fits(on, facts.device)}
        if not fit:
            raise UsageError(f"--on {on} fits none of these workers: they have {', '.join(there)}")
        gpus: dict[str, str] = {}
        for facts in fit.values():
            reason = reason_against(facts, versions, None)
            if reason:
                raise UsageError(
                    f"the worker on {facts.place} does not run the same as this process: {reason}; "
                    "install the same on both"
                )
            if facts.gpu and facts.gpu in gpus:
                raise UsageError(
                    f"the workers on {gpus[facts.gpu]} and {facts.place} share the GPU {facts.gpu}; start one worker a "
                    "GPU, each with its own CUDA_VISIBLE_DEVICES"
                )
            gpus[facts.gpu] = facts.place
        devices = list(dict.fromkeys(facts.device for facts in fit.values()))
        if len(devices) > 1:
            raise UsageError(
                f"the workers have {', '.join(devices)}, and a sweep measures on one of them; choose with "
                f"--on '{devices[0]}'"
            )
        return fit

    def seconds(self, cases: Sequence[Case], settings: Settings) -> float:
        """A guess of how long the team takes for these cells."""
        from mtabench.cluster.groups import longest_first_seconds
        from mtabench.sweeps.sweep import shapes

        groups = [self._estimate(group, settings) for group in shapes(cases)]
        return longest_first_seconds(groups, len(self._workers) or len(self._local) or 1)

    def run(self, plan: Plan, writer: Writer, settings: Settings, watcher: CrewWatcher, spent: Stopwatch) -> None:
        """Measure the cells that the writer's file does not have yet; raises as sweep.run does."""
        from mtabench.cluster.groups import Group
        from mtabench.cluster.sweep import CrewSweep
        from mtabench.results.results_file import key_of
        from mtabench.sweeps.sweep import shapes

        assert self._crew is not None
        groups = []
        for number, cases in enumerate(shapes(plan.cases)):
            pending = [case for case in cases if key_of(case) not in writer.done]
            if pending:
                groups.append(Group(number, cases, self._estimate(pending, settings)))
        sweep = CrewSweep(self._crew, self._workers, self._asked.on, plan, writer, settings, watcher)
        with _ctrl_c_goes_to(self._crew):
            sweep.run(groups)
        # What workers spent at the same time counts as the share of one.
        spent.add({what: seconds / len(self._workers) for what, seconds in sweep.spent.items()})

    def _estimate(self, cases: Sequence[Case], settings: Settings) -> float:
        from mtabench.sweeps.estimate import estimate_seconds

        return estimate_seconds(cases, settings)

    def _first(self) -> Mapping[str, Facts]:
        """Those that are there now, once they have started to measure; of a cluster, those that answer in time."""
        assert self._crew is not None
        found: dict[str, Facts] = {}
        began = time.monotonic()
        while len(found) < len(self._local) or self._crew.workers or not found:
            waited = time.monotonic() - began
            if waited > START_S or (waited > COME_S and not self._local and not self._crew.workers):
                break
            for event in self._crew.events(1.0):
                if event.kind == "ready":
                    found[event.worker] = event.value
                elif event.kind == "failed":
                    raise UsageError(f"the worker {event.worker} cannot measure: {event.value}")
                elif event.kind == "lost":
                    found.pop(event.worker, None)
        if found and len(found) >= len(self._local):
            return found
        if self._local:
            raise UsageError(f"only {len(found)} of {len(self._local)} workers started within {START_S:g} s")
        resource = RESOURCES[self._device]
        raise UsageError(
            f"{self._asked.scheduler} has no worker that is free and was started with --resources {resource}=1 "
            f"({COME_S:g} s were waited); docs/cluster.md says how to start some"
        )


@contextmanager
def gathered(asked: ClusterOptions, device: str, dry_run: bool) -> Iterator[Team]:
    """Start the workers on this machine, or connect to those of a cluster; on the way out they end or are let go.

    Nothing is started or reached for a dry run. Raises UsageError for what is not there.
    """
    security = security_of(asked) if asked.scheduler is not None else None
    local = [] if asked.scheduler is not None else local_workers(asked)
    if dry_run:
        yield Team(asked, device, local, None)
        return
    if asked.scheduler is not None:
        with _connected(asked.scheduler, security) as client, _at_work(client, device) as crew:
            yield Team(asked, device, local, crew)
    else:
        print(f"starting {plural(len(local), 'worker')}", flush=True)
        with (
            local_cluster(local, device) as (address, own),
            _connected(address, own) as client,
            _at_work(client, device) as crew,
        ):
            yield Team(asked, device, local, crew)


@contextmanager
def _connected(address: str, security: Security | None) -> Iterator[Client]:
    from distributed import Client

    try:
        with ThreadPoolExecutor(1) as pool:  # a thread of its own: a notebook's runs a loop already
            pool.submit(asyncio.run, _greet(address, security)).result()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # versions are compared afterwards, those that matter
            client = Client(address, security=security, timeout=CONNECT_S, set_as_default=False)
    except (OSError, ValueError, RuntimeError, MemoryError) as error:
        raise UsageError(
            f"no scheduler of Dask answers at {address} ({_cause(error)}); start it, or correct --scheduler and "
            "--tls-..."
        ) from error
    logging.disable()  # of a scheduler that is lost, Dask logs tracebacks where one sentence says it
    try:
        with client:
            yield client
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


@contextmanager
def _at_work(client: Client, device: str) -> Iterator[Crew]:
    from mtabench.cluster.crew import Crew

    crew = Crew(client, device)
    try:
        yield crew
    finally:
        with suppress(KeyboardInterrupt):  # once more, out of impatience
            crew.stop()


def sharing(places: Iterable[str]) -> list[str]:
    """A line for each place, such as "node07 CPU 0-3", where several workers measure on the same cores."""
    return [
        f"{count} workers on {place} slow each other down: start one a machine, or each with cores of its own, such as "
        "MTABENCH_CORES=0,1"
        for place, count in Counter(places).items()
        if count > 1
    ]


@contextmanager
def _ctrl_c_goes_to(crew: Crew) -> Iterator[None]:
    """Ctrl-C or SIGTERM is raised where events are waited for: elsewhere it may come up in the destructor of one of
    Dask's futures, where Python ignores it. A second one is raised at once.
    """
    usual = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def handle(number: int, frame: object) -> None:
        signal.signal(number, usual[signal.Signals(number)])
        crew.interrupt()

    for number, was in usual.items():
        if was is not signal.SIG_IGN:
            signal.signal(number, handle)
    try:
        yield
    finally:
        for number, was in usual.items():
            signal.signal(number, was)
