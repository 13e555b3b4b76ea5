"""What measures a sweep: the process of the command itself, or with --isolate a fresh one a cell; or workers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import chain
from typing import TYPE_CHECKING, Any

from mtabench.problem.case import Case
from mtabench.results.results_file import key_of
from mtabench.results.writer import Writer
from mtabench.sweeps.measuring_process import MeasuringProcess, Outcome, Request
from mtabench.sweeps.plan import Plan

if TYPE_CHECKING:
    from mtabench.measuring.timing import Settings
    from mtabench.sweeps.sweep import Sweep

CELL_TIMEOUT_S = 600.0


class ThisProcess:
    """Measures in this process, or with --isolate in one a cell."""

    def __init__(self, isolate: bool = False) -> None:
        self._isolate = isolate

    @property
    def device_name(self) -> str | None:
        """The device of all cells, empty if it is not known yet; None if this process is to look when it needs it."""
        return None

    def meet(self) -> list[str]:
        """What measures, in lines for a person: nothing to add."""
        return []

    def against(self, cases: Sequence[Case]) -> dict[Case, str]:
        """Why cells cannot run on this machine, of those that cannot."""
        from mtabench.sweeps.estimate import memory_reason, unsupported_reason

        return {case: reason for case in cases if (reason := unsupported_reason(case) or memory_reason(case))}

    def seconds(self, cases: Sequence[Case], settings: Settings) -> float:
        """A guess of the time that these cells take."""
        from mtabench.sweeps.estimate import estimate_seconds

        return estimate_seconds(cases, settings, self._isolate)

    def run(self, plan: Plan, writer: Writer, settings: Settings, watcher: Any) -> None:
        """Measure the cells that the writer's file does not have yet; raises as sweep.run does."""
        from mtabench.sweeps.sweep import run

        (run_isolated if self._isolate else run)(plan, writer, settings, watcher)


def run_isolated(plan: Plan, writer: Writer, settings: Settings, watcher: Any) -> Counter[str]:
    """As sweep.run, a process a cell; the baseline of each problem first, so that each row has its speedup.

    A cell whose process does not end with a result is an `error`, or a `timeout` after the plan's `cell_timeout`.
    """
    from mtabench.results.rows import cell_row
    from mtabench.sweeps.sweep import interruptible, new_sweep, shapes

    sweep = new_sweep(plan, writer, settings, watcher)
    with interruptible(plan, writer):
        baselines_first = (sorted(one, key=lambda case: not plan.is_baseline(case)) for one in shapes(plan.cases))
        for case in chain.from_iterable(baselines_first):
            if key_of(case) not in writer.done and sweep.can_run(case):
                outcome = _measure(case, sweep)
                sweep.ceilings |= outcome.ceilings
                sweep.keep_ceilings()
                (row,) = outcome.rows or [cell_row(case, sweep.facts, outcome.status, outcome.lost)]
                _add_speedup(row, case, plan, writer)
                sweep.write([row], outcome.samples)
    return sweep.statuses


def _measure(case: Case, sweep: Sweep) -> Outcome:
    """What a process of its own made of a cell."""
    plan = replace(sweep.plan, cases=(case,))
    request = Request(plan, sweep.settings, sweep.facts, sweep.ceilings, {}, sweep.writer.path)
    process = MeasuringProcess()
    try:
        timeout_s = plan.options.cell_timeout or CELL_TIMEOUT_S
        return process.measure(request.packed(), sweep.watcher.doing, timeout_s)
    finally:
        process.stop()


def _add_speedup(row: dict[str, Any], case: Case, plan: Plan, writer: Writer) -> None:
    """Fill `baseline` and `speedup` of a cell whose baseline has a row in the file."""
    for base in plan.cases:
        if plan.is_baseline(base) and case.is_compared_with(base):
            found = writer.done.get(key_of(base))
            if found and found["status"] == "ok" and row["status"] == "ok":
                row["baseline"], row["speedup"] = base.impl, float(found["median_ms"]) / row["median_ms"]
