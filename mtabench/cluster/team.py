"""The workers that a sweep asks for: started or found, asked what they are, given the sweep, and let go."""

from __future__ import annotations

import secrets
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rich.console import Console

from mtabench.cluster.crew import Crew, Worker
from mtabench.cluster.facts import Facts
from mtabench.cluster.local import LocalWorker, local_workers
from mtabench.cluster_options import ClusterOptions
from mtabench.errors import MtabenchError, UsageError
from mtabench.prose import plural
from mtabench.sweeps.this_process import ThisProcess

if TYPE_CHECKING:
    from mtabench.measuring.timing import Settings
    from mtabench.problem.case import Case
    from mtabench.results.writer import Writer
    from mtabench.sweeps.plan import Plan
    from mtabench.sweeps.watching import Watcher

COME_S = 60.0  # for a cluster's first worker, which its queue may still be starting
MOST_PLACES = 16  # of workers in a line
START_S = 300.0  # for measuring processes: torch may have to come from a slow disk


class Team(ThisProcess):
    """The workers of one sweep. Until `meet`, what they are is known only as far as this machine tells."""

    def __init__(
        self, asked: ClusterOptions, device: str, local: Sequence[LocalWorker], crew: Crew | None, run_id: str = ""
    ) -> None:
        super().__init__()
        self._asked, self._device, self._local, self._crew, self._run_id = asked, device, local, crew, run_id
        self._workers: Mapping[Worker, Facts] = {}

    @property
    def device_name(self) -> str:
        """The device's name, empty if it is not known yet."""
        names = [facts.device for facts in self._workers.values()] or [local.device_name for local in self._local]
        return names[0] if names else ""

    def meet(self) -> list[str]:
        """Wait for the workers; who measures, in lines for a person.

        Raises UsageError if there are none, or one that may not measure.
        """
        if self._crew is not None:
            try:
                with Console(stderr=True).status("waiting for the workers"):
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

    def seconds(self, cases: Sequence[Case], settings: Settings) -> float:
        """A guess of how long the team takes for these cells."""
        from mtabench.sweeps.estimate import estimate_seconds
        from mtabench.sweeps.sweep import shapes

        groups = [estimate_seconds(group, settings) for group in shapes(cases)]
        return max(0.0, *groups, sum(groups) / (len(self._workers) or len(self._local) or 1))

    def run(self, plan: Plan, writer: Writer, settings: Settings, watcher: Watcher) -> None:
        """Measure the cells that the writer's file does not have yet; raises as sweep.run does."""
        from mtabench.cluster.sweep import CrewSweep

        assert self._crew is not None
        CrewSweep(self._crew, self._workers, plan, writer, settings, watcher, self._run_id).run()

    def _fit(self, met: Mapping[Worker, Facts]) -> Mapping[Worker, Facts]:
        """The workers; raises UsageError if they are not all alike, and like this process."""
        from mtabench.cluster.facts import facts_here
        from mtabench.cluster.sweep import reason_against

        # A login node has no GPU, and needs none to say which code it has.
        versions = facts_here("cpu").versions()
        gpus: dict[str, str] = {}
        for facts in met.values():
            reason = reason_against(facts, versions)
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
        devices = list(dict.fromkeys(facts.device for facts in met.values()))
        if len(devices) > 1:
            raise UsageError(
                f"the workers have {', '.join(devices)}, and a sweep measures on one of them; choose some by "
                "--gpus 0,2, or start workers on GPUs of one kind"
            )
        return met

    def _first(self) -> Mapping[Worker, Facts]:
        """Those that are there now, once they have started to measure; of a cluster, those that answer in time."""
        assert self._crew is not None
        found: dict[Worker, Facts] = {}
        began = time.monotonic()
        while len(found) < len(self._local) or self._crew.busy or not found:
            waited = time.monotonic() - began
            if waited > START_S or (waited > COME_S and not self._local and not self._crew.busy):
                break
            for event in self._crew.events(1.0):
                if event.kind == "ready":
                    found[event.worker] = event.value
                elif event.kind == "failed":
                    raise UsageError(f"the worker {event.worker.name} cannot measure: {event.value}")
        if found and len(found) >= len(self._local):
            return found
        if self._local:
            raise UsageError(f"only {len(found)} of {len(self._local)} workers started within {START_S:g} s")
        from mtabench.cluster.dask_cluster import RESOURCES

        raise UsageError(
            f"{self._asked.scheduler} has no worker that is free and was started with --resources "
            f"{RESOURCES[self._device]}=1 ({COME_S:g} s were waited); docs/cluster.md says how to start some"
        )


@contextmanager
def gathered(asked: ClusterOptions, device: str, dry_run: bool) -> Iterator[Team]:
    """Start the workers on this machine, or connect to those of a cluster; on the way out they end or are let go.

    Nothing is started or reached for a dry run. Raises UsageError for what is not there.
    """
    run_id = secrets.token_hex(6)
    if asked.scheduler is None:
        local = local_workers(asked)
        if dry_run:
            yield Team(asked, device, local, None)
            return
        print(f"starting {plural(len(local), 'worker')}", flush=True)
        arriving = iter([local])
        with _stopped(Crew(lambda: next(arriving, ()))) as crew:
            yield Team(asked, device, local, crew, run_id)
        return
    from mtabench.cluster.dask_cluster import connected
    from mtabench.cluster.security import security_of

    security = security_of(asked.scheduler)
    if dry_run:
        yield Team(asked, device, [], None)
        return
    with connected(asked.scheduler, security, device, run_id) as cluster, _stopped(Crew(cluster.arriving)) as crew:
        yield Team(asked, device, [], crew, run_id)


@contextmanager
def _stopped(crew: Crew) -> Iterator[Crew]:
    try:
        yield crew
    finally:
        crew.stop()


def sharing(places: Iterable[str]) -> list[str]:
    """A line for each place, such as "node07 CPU 0-3", where several workers measure on the same cores."""
    return [
        f"{count} workers on {place} slow each other down: start one a machine, or each with cores of its own, such as "
        "MTABENCH_CORES=0,1"
        for place, count in Counter(places).items()
        if count > 1
    ]
