"""A process that measures cells for another: a cell with --isolate, a group after the other for a worker.

A worker's own process cannot measure: a thread of it answers other processes. This thread would hold the interpreter's
lock now and then within a timed window. Why a worker has no process a group: to import torch and to start CUDA takes as
long as a small group. Why none lives longer than a sweep: the next one measures the code as it is then.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from mtabench.errors import MtabenchError
from mtabench.processes import Process, ProcessEndedError
from mtabench.results.results_file import Key, key_of, key_of_row

if TYPE_CHECKING:  # Dask's worker process, which passes them on, needs no torch
    from mtabench.measuring.ceilings import Ceilings
    from mtabench.measuring.timing import Settings
    from mtabench.results.rows import RunFacts
    from mtabench.sweeps.plan import Plan

CORES = "MTABENCH_CORES"  # the cores of this worker's measuring process, such as 0,1; all if it is not set
NO_RESULT = "its process ended without a result"

Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Request:
    """Cells of a plan to measure, but for those whose rows are `done`, in the results file at `path`."""

    plan: Plan
    settings: Settings
    facts: RunFacts
    ceilings: Mapping[str, Ceilings | None]
    done: Mapping[Key, Mapping[str, str]]
    path: Path

    def packed(self) -> bytes:
        """It as a pickle, which needs torch where it is opened, and nothing where it is passed on."""
        return pickle.dumps(self)


@dataclass(slots=True)
class Outcome:
    """The outcome of cells: rows, samples, ceilings by dtype.

    `lost` says why cells have no row, if so, and `status` what they are then.
    """

    rows: list[Row] = field(default_factory=list)
    samples: list[Sequence[object]] = field(default_factory=list)
    ceilings: dict[str, Ceilings | None] = field(default_factory=dict)
    lost: str = ""
    status: str = "error"

    def add(self, part: Outcome) -> None:
        """What was measured next."""
        self.rows += part.rows
        self.samples += part.samples
        self.ceilings |= part.ceilings
        self.lost = part.lost


class MeasuringProcess:
    """A process that measures, from the outside. It starts where it is needed, until it is stopped."""

    def __init__(self, environment: Mapping[str, str] = MappingProxyType({})) -> None:
        """`environment` are variables that are others there."""
        self._environment = environment
        self._process: Process | None = None
        self._is_stopped = False

    def measure(self, request: bytes, doing: Callable[[str], None], timeout_s: float | None = None) -> Outcome:
        """Measure cells. Where a kernel broke the GPU's context, a fresh process measures the cells after it."""
        outcome = Outcome()
        while True:
            before = len(outcome.rows)
            step = "starting"

            def receive(message: Outcome | str) -> None:
                nonlocal step
                if isinstance(message, Outcome):
                    outcome.add(message)
                else:
                    step = message.rpartition(": ")[2]
                    doing(message)

            try:
                outcome.lost = NO_RESULT
                written = {key_of_row(row): row for row in outcome.rows}
                self.call(measure_group, (request, written), receive, timeout_s)
            except (ProcessEndedError, TimeoutError) as error:
                outcome.lost = f"{error}; last step: {step}"
                outcome.status = "timeout" if isinstance(error, TimeoutError) else "error"
                return outcome
            if not outcome.lost or len(outcome.rows) == before:
                return outcome
            self._end()

    def call(
        self, function: Callable[..., None], arguments: tuple[Any, ...], receive: Callable[[Any], None],
        timeout_s: float | None = None,
    ) -> None:  # fmt: skip
        """As `Process.call`, in this process while it lives; raises ProcessEndedError if it was stopped."""
        if self._is_stopped:
            raise ProcessEndedError("its process was stopped")
        self._process = self._process or Process(self._environment)
        try:
            self._process.call(function, arguments, receive, timeout_s)
        except BaseException:
            self._end()
            raise

    def stop(self) -> None:
        """End the process, whatever it does."""
        self._is_stopped = True
        self._end()

    def _end(self) -> None:
        if self._process is not None:
            self._process.stop()
            self._process = None


def pin_cores() -> None:
    """Keep to the cores of this worker, before torch counts them."""
    if cores := os.environ.get(CORES):
        os.sched_setaffinity(0, map(int, cores.split(",")))


def measure_group(send: Callable[[object], None], packed: bytes, written: Mapping[Key, Row]) -> None:
    """In the process: measure a Request's cells but for those `written` since, and send the results."""
    pin_cores()
    from mtabench.environment import git_columns
    from mtabench.registry import load_again, loaded_files
    from mtabench.sweeps.sweep import Messenger, Sweep

    request: Request = pickle.loads(packed)
    lost, ceilings = "", dict(request.ceilings)
    done: dict[Key, Any] = {**request.done, **written}
    pending = sum(key_of(case) not in done for case in request.plan.cases)
    messenger = Messenger(request.path, send, Outcome, done)
    try:
        load_again(request.plan.options.impl)
        facts = replace(request.facts, environment={**request.facts.environment, **git_columns(loaded_files())})
        sweep = Sweep(request.plan, messenger, request.settings, messenger, facts, ceilings)
        sweep.measure_shape(request.plan.cases)
    except MtabenchError as error:  # the GPU's context
        lost = str(error) if messenger.rows < pending else ""
    send(Outcome(ceilings=ceilings, lost=lost))
