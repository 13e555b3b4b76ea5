"""Run a plan with each cell in a fresh process, so that a crash, a kill or a hang costs one row."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Any

from mtabench.measuring import timing
from mtabench.measuring.ceilings import Ceilings
from mtabench.measuring.stopwatch import Stopwatch
from mtabench.problem.case import Case
from mtabench.processes import ProcessEndedError, call_in_process
from mtabench.registry import load_again
from mtabench.results.facts import RunFacts
from mtabench.results.results_file import key_of
from mtabench.results.rows import Row, cell_row
from mtabench.results.writer import Writer
from mtabench.sweeps.plan import Plan
from mtabench.sweeps.sweep import Messenger, Sweep, Watcher, interruptible, new_sweep

CELL_TIMEOUT_S = 600.0


@dataclass(frozen=True, slots=True)
class Result:
    """What a cell's process sends at its end; other messages are texts that say what it does."""

    row: Row
    samples: list[Sequence[object]]
    ceilings: dict[str, Ceilings | None]
    spent: Mapping[str, float]


def run_isolated(
    plan: Plan, writer: Writer, settings: timing.Settings, watcher: Watcher, spent: Stopwatch | None = None
) -> Counter[str]:
    """As sweep.run, a process a cell; the baseline of each problem first, so that each row has its speedup.

    A cell whose process does not end with a result is an `error`, or a `timeout` after the plan's `cell_timeout`.
    """
    sweep = new_sweep(plan, writer, settings, watcher, spent)
    with interruptible(plan, writer):
        for case in _baselines_first(plan):
            if key_of(case) not in writer.done and sweep.can_run(case):
                result = _measure(case, sweep)
                sweep.ceilings |= result.ceilings
                sweep.keep_ceilings()
                sweep.spent.add(result.spent)
                _add_speedup(result.row, case, plan, writer)
                sweep.write([result.row], result.samples)
    return sweep.statuses


def measure_cell(
    send: Callable[[Any], None],
    plan: Plan,
    settings: timing.Settings,
    facts: RunFacts,
    ceilings: dict[str, Ceilings | None],
    path: Path,
) -> None:
    """In the cell's process: verify and time the plan's one cell, and send its Result. `path` is the results file."""
    load_again(plan.options.impl)
    spent = Stopwatch()

    def pack(rows: list[Row], samples: list[Sequence[object]]) -> Result:
        (row,) = rows
        return Result(row, samples, ceilings, dict(spent.seconds))

    messenger = Messenger(path, send, pack)
    Sweep(plan, messenger, settings, messenger, facts, ceilings, spent).measure_shape(plan.cases)


def _measure(case: Case, sweep: Sweep) -> Result:
    """The result of a cell's process, or one that says how the process ended without."""
    results: list[Result] = []
    step = "starting"

    def receive(message: Result | str) -> None:
        nonlocal step
        if isinstance(message, Result):
            results.append(message)
        else:
            step = message.rpartition(": ")[2]
            sweep.watcher.doing(message)

    plan = replace(sweep.plan, cases=(case,))
    arguments = (plan, sweep.settings, sweep.facts, sweep.ceilings, sweep.writer.path)
    status, reason = "error", "its process ended without a result"
    try:
        call_in_process(measure_cell, arguments, sweep.plan.options.cell_timeout or CELL_TIMEOUT_S, receive)
    except TimeoutError as error:
        status, reason = "timeout", str(error)
    except ProcessEndedError as error:
        reason = str(error)
    if results:
        return results[0]
    return Result(cell_row(case, sweep.facts, status, f"{reason}; last step: {step}"), [], {}, {})


def _baselines_first(plan: Plan) -> Iterator[Case]:
    """The plan's cells, those that speedups refer to before the others of their shape."""
    for _, cases in groupby(plan.cases, key=lambda case: case.shape_key):
        yield from sorted(cases, key=lambda case: not plan.is_baseline(case))


def _add_speedup(row: Row, case: Case, plan: Plan, writer: Writer) -> None:
    """Fill `baseline` and `speedup` of a cell whose baseline has a row in the file."""
    for base in plan.cases:
        if plan.is_baseline(base) and case.is_compared_with(base):
            found = writer.done.get(key_of(base))
            if found and found["status"] == "ok" and row["status"] == "ok":
                row["baseline"], row["speedup"] = base.impl, float(found["median_ms"]) / row["median_ms"]
