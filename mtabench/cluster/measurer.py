"""The process in which a worker measures. It lives for one sweep and measures one group of cells after the other.

Why not in Dask's worker process: its event loop answers the scheduler and reads what the network brings, in a thread
of the interpreter that launches the kernels, and would hold its lock now and then within a timed window; and a kernel
that crashes would take the connection with it. Why not in a process a group, as `--isolate` does a cell: to import
torch and to start CUDA takes as long as a small group. Why no longer than a sweep: the next one measures the code as
it is then, and an idle GPU has nobody's memory in it.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from mtabench.cluster.facts import Facts, facts_here
from mtabench.errors import MtabenchError
from mtabench.measuring.stopwatch import Stopwatch
from mtabench.processes import EXIT_S, die_with_parent, ending, kill, last_line, start_process
from mtabench.results.results_file import Key, key_of_row

if TYPE_CHECKING:  # Dask's worker process, which passes them on, needs no torch
    from mtabench.measuring.ceilings import Ceilings
    from mtabench.measuring.timing import Settings
    from mtabench.results.facts import RunFacts
    from mtabench.sweeps.plan import Plan

Row = dict[str, Any]

CORES = "MTABENCH_CORES"  # the cores of this worker's measuring process, such as 0,1; all if it is not set


@dataclass(frozen=True, slots=True)
class Request:
    """A group to measure: the plan's cells, without those whose rows are `done`, in the results file at `path`.

    `facts` lack the environment, which the process that measures knows. It goes there as a pickle.
    """

    plan: Plan
    settings: Settings
    facts: RunFacts
    ceilings: Mapping[str, Ceilings]
    done: Mapping[Key, Mapping[str, str]]
    path: Path


@dataclass(slots=True)
class Outcome:
    """What became of a group: rows, samples, seconds spent; `lost` says why cells without a row are missing."""

    rows: list[Row] = field(default_factory=list)
    samples: list[Sequence[object]] = field(default_factory=list)
    spent: Mapping[str, float] = field(default_factory=dict)
    lost: str = ""


@dataclass(frozen=True, slots=True)
class Ended:
    """What the process sends after a group. `broken` says why it can measure nothing more, if so."""

    spent: Mapping[str, float]
    broken: str = ""


class MeasuringProcess:
    """The measuring process of one sweep, from the outside; `start` it before anything else."""

    def __init__(self, run_id: str, device: str) -> None:
        self.run_id = run_id
        self._device = device
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> Facts:
        """Start the process; what it is. Raises MtabenchError if it cannot start, or has no such device."""
        self._output: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 (as long as the process)
        self._pipe, theirs = Pipe()
        with theirs:
            self._process = start_process(f"{__name__}:serve", theirs.fileno(), self._output)
        try:
            self._pipe.send(self._device)
            said = self._pipe.recv()
        except (EOFError, OSError):
            raise MtabenchError(f"the measuring process does not start: {self._ending()}") from None
        if isinstance(said, MtabenchError):
            self.stop()
            raise said
        return said

    def measure(self, request: bytes, doing: Callable[[str], None]) -> Outcome:
        """Measure a group. Where a kernel broke the GPU's context, a fresh process measures the cells after it."""
        outcome = Outcome()
        while True:
            before = len(outcome.rows)
            broken = self._attempt(request, outcome, doing)
            if not broken:
                return outcome
            self.stop()
            if outcome.lost or len(outcome.rows) == before:
                outcome.lost = outcome.lost or broken
                return outcome

    def stop(self) -> None:
        """End the process, whatever it does."""
        if self._process is not None:
            kill(self._process)

    def _attempt(self, request: bytes, outcome: Outcome, doing: Callable[[str], None]) -> str:
        """Why the process can go on no more, or nothing once the group is done; adds to the outcome."""
        step = "starting"
        try:
            if self._process is None or self._process.poll() is not None:
                self.start()
            self._pipe.send((request, {key_of_row(row): row for row in outcome.rows}))
            while not isinstance(said := self._pipe.recv(), Ended):
                if isinstance(said, Outcome):
                    outcome.rows += said.rows
                    outcome.samples += said.samples
                else:
                    step = said.rpartition(": ")[2]
                    doing(said)
        except MtabenchError as error:
            outcome.lost = str(error)
            return outcome.lost
        except (EOFError, OSError):
            outcome.lost = f"{self._ending()}; last step: {step}"
            return outcome.lost
        outcome.spent = {name: outcome.spent.get(name, 0.0) + seconds for name, seconds in said.spent.items()}
        return said.broken

    def _ending(self) -> str:
        assert self._process is not None
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(EXIT_S)
        return (ending(self._process.returncode) or "its process ended") + last_line(self._output)


def serve(descriptor: int) -> None:
    """In the measuring process: say what it is, then measure what comes, until nothing can come any more."""
    die_with_parent()
    with Connection(descriptor) as pipe:
        cores = os.environ.get(CORES)
        if cores:
            os.sched_setaffinity(0, map(int, cores.split(",")))  # before torch counts them
        try:
            facts = facts_here(pipe.recv())
        except MtabenchError as error:
            pipe.send(error)
            return
        pipe.send(facts)
        ceilings: dict[str, Ceilings | None] = {}
        while True:
            try:
                packed, written = pipe.recv()
            except EOFError:
                return
            request = pickle.loads(packed)
            request = replace(request, done={**request.done, **written})
            pipe.send(_measure(request, facts, ceilings, pipe.send))


def _measure(
    request: Request, facts: Facts, ceilings: dict[str, Ceilings | None], send: Callable[[object], None]
) -> Ended:
    """Measure a group as a sweep does; `ceilings` are this device's, for all groups."""
    from mtabench.environment import git_columns
    from mtabench.registry import load_again, loaded_files
    from mtabench.sweeps.sweep import Messenger, Sweep

    spent = Stopwatch()
    try:
        load_again(request.plan.options.impl)
    except MtabenchError as error:
        return Ended({}, f"on {facts.place}: {error}")
    where = {**facts.environment, **git_columns(loaded_files()), "worker": facts.place}
    here = replace(request.facts, environment=where)
    messenger = Messenger(request.path, send, Outcome, {key: dict(row) for key, row in request.done.items()})
    for dtype, kept in request.ceilings.items():
        ceilings.setdefault(dtype, kept)  # what an earlier group measured besides stays
    sweep = Sweep(request.plan, messenger, request.settings, messenger, here, ceilings, spent)
    try:
        sweep.measure_shape(request.plan.cases)
    except MtabenchError as error:  # the GPU's context
        return Ended(dict(spent.seconds), str(error))
    return Ended(dict(spent.seconds))
