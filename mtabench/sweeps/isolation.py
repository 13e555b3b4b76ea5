"""Run a plan with each cell in a fresh process, so that a crash, a kill or a hang costs one row."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

from mtabench.measuring import timing
from mtabench.problem.case import Case
from mtabench.results.results_file import key_of
from mtabench.results.rows import Row, cell_row
from mtabench.results.writer import Writer
from mtabench.sweeps.measuring_process import MeasuringProcess, Outcome, Request
from mtabench.sweeps.plan import Plan
from mtabench.sweeps.sweep import Sweep, interruptible, new_sweep, shapes
from mtabench.sweeps.watching import Watcher

CELL_TIMEOUT_S = 600.0


def run_isolated(plan: Plan, writer: Writer, settings: timing.Settings, watcher: Watcher) -> Counter[str]:
    """As sweep.run, a process a cell; the baseline of each problem first, so that each row has its speedup.

    A cell whose process does not end with a result is an `error`, or a `timeout` after the plan's `cell_timeout`.
    """
    sweep = new_sweep(plan, writer, settings, watcher)
    with interruptible(plan, writer):
        for case in _baselines_first(plan):
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


def _baselines_first(plan: Plan) -> Iterator[Case]:
    """The plan's cells, those that speedups refer to before the others of their shape."""
    for cases in shapes(plan.cases):
        yield from sorted(cases, key=lambda case: not plan.is_baseline(case))


def _add_speedup(row: Row, case: Case, plan: Plan, writer: Writer) -> None:
    """Fill `baseline` and `speedup` of a cell whose baseline has a row in the file."""
    for base in plan.cases:
        if plan.is_baseline(base) and case.is_compared_with(base):
            found = writer.done.get(key_of(base))
            if found and found["status"] == "ok" and row["status"] == "ok":
                row["baseline"], row["speedup"] = base.impl, float(found["median_ms"]) / row["median_ms"]
