"""What a person sees of a sweep: its plan, a line a row, on a terminal a bar, and a table at the end."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from mtabench.console import say, significant
from mtabench.errors import NothingTimedError
from mtabench.escaping import printable
from mtabench.measuring.settled import MUCH_WIDER, UNSETTLED, TypicalHalf, mark_of, target_of, unsettled, was_crowded
from mtabench.problem.axes import short
from mtabench.problem.case import Case
from mtabench.problem.operations import PLAIN_LACKS, STEPS, page_size_text, step_words, taps_text
from mtabench.results.results_file import Key, key_of_row, text_of
from mtabench.sweeps.estimate import shown
from mtabench.sweeps.plan import Plan
from mtabench.tables import print_prose

STYLES = {"ok": "green", "wrong": "bold red", "error": "red", "oom": "yellow", "invalid": "yellow"}
ALWAYS = ("seq", "impl")
# Shown where they differ.
OPTIONAL = ("pass", "dtype", "layers", "batch", "heads", "kv_heads", "head_dim", *STEPS, "causal")
MOST_REASONS = 3  # in a sentence
Row = Mapping[str, Any]
REDRAW_S = 0.2
LONGEST_CELL_S = 3600.0  # cells of the last so many seconds say how long the others take


def print_plan(
    console: Console, plan: Plan, pending: int, against: Mapping[Case, str], seconds: float, reasons: bool = False
) -> None:
    """The expanded axes, the number of cells (those not in the file yet, those that can run) and the estimate.

    `against` says why cells cannot run; with `reasons` so does a line an implementation.
    """
    width = max(map(len, plan.axes))
    console.print(f"{plan.pass_} sweep", style="bold")
    for name, values in plan.axes.items():
        print_prose(console, values, f"  {name:<{width}}  ")
    cells = f"{len(plan.cases)}"
    if pending < len(plan.cases):
        cells += f", of which {len(plan.cases) - pending} are in the file already"
    if against:
        cells += f", {'of which ' if pending == len(plan.cases) else ''}{len(against)} cannot run here"
    console.print(f"  {'cells':<{width}}  {cells}, about {shown(seconds)} (a guess)", highlight=False)
    for note in (*plan.notes, *(reason_lines(against) if reasons else ())):
        print_prose(console, note, "  ")


def check_any(cases: Sequence[Case], against: Mapping[Case, str]) -> None:
    """Raise NothingTimedError, with the reasons, if none of the cells can run."""
    if cases and len(against) == len(cases):
        raise NothingTimedError(f"nothing was measured: {'; '.join(reason_lines(against)[:MOST_REASONS])}")


def reason_lines(against: Mapping[Case, str]) -> list[str]:
    """A line for each implementation that cannot run some cells: how many, and why the first one cannot."""
    lines = []
    for label in dict.fromkeys(case.label for case in against):
        reasons = [reason for case, reason in against.items() if case.label == label]
        others = len(set(reasons)) - 1
        more = f" (the first of {others + 1} reasons)" if others else ""
        lines.append(f"{label} cannot run {len(reasons)} of these cells: {reasons[0]}{more}")
    return lines


def line(row: Row) -> str:
    """A row as one plain line."""
    cell = _cell(row)
    steps = step_words(*(cell[name] for name in PLAIN_LACKS), text_of(row.get("page_size")))
    problem = f"{cell['pass']}, {cell['layers']} layers, " if cell["layers"] else ""
    problem += f"{cell['dtype']} batch {cell['batch']} heads {cell['heads']}x{cell['head_dim']} seq {cell['seq']}"
    problem += f" {steps}" if steps else ""
    if not _number(row, "median_ms"):
        result = f"{row['status']}: {text_of(row.get('reason'))}"
    else:
        speedup = text_of(row.get("speedup"))
        median = mark_of(row) + _number(row, "median_ms")
        result = f"{median} ms" + (f", {float(speedup):.2f}x {row['baseline']}" if speedup else "")
        result += "" if row["status"] == "ok" else f", {row['status']}: {text_of(row.get('reason'))}"
    splits = f", splits {cell['splits']}" if cell["splits"] else ""
    return f"{problem}  {cell['impl']}{splits}: {result}"


def roof_lines(rows: Sequence[Row]) -> list[str]:
    """A sentence where no time of a kernel is held against the ceilings of its device."""
    timed = [row for row in rows if row["status"] == "ok" and not row.get("layers")]
    if not timed or any(row.get("fraction_of_roofline") for row in timed):
        return []
    return [
        "no share of the roofline: another job had the cores while the ceilings were measured, or there was no room; "
        "`mtabench env --measure` says which"
    ]


def settled_lines(rows: Sequence[Row], max_rounds: int, time_limit_s: float) -> list[str]:
    """How wide most intervals are if they miss the target, how many times did not settle and what to try.

    The sweep had these limits a cell.
    """
    marked, timed = unsettled(rows), [row for row in rows if row["status"] == "ok"]
    lines = []
    if (usual := TypicalHalf().add(timed)) is not None:
        lines.append(
            f"most times are known to ±{100 * usual:.2g} % here, the median of {len(timed)} cells, and not to the "
            f"target of {100 * target_of(timed[0]):g} %; {UNSETTLED} marks more than {MUCH_WIDER:g} times that"
        )
    if marked:
        why = f"is another job running? If not, give --rounds {4 * max_rounds} --time-limit {4 * time_limit_s:g}"
        if crowded := [float(row["run_delay"]) for row in marked if was_crowded(row)]:
            why = (
                f"threads waited for a core up to {100 * max(crowded):.0f} % of the time, so another job runs; "
                "end it, and measure again"
            )
        lines.append(f"{len(marked)} of {len(timed)} cells did not settle (marked {UNSETTLED}): {why}")
    return lines


def _cell(row: Row) -> dict[str, str]:
    cell = {name: text_of(row.get(name)) for name in (*ALWAYS, *OPTIONAL)}
    cell["seq"] = short(int(cell["seq"]))
    cell |= {name: taps_text(row.get(f"{name}_q"), row.get(f"{name}_k")) for name in ("conv", "post_conv")}
    cell["page_size"] = page_size_text(cell["pass"], cell["page_size"])
    used = text_of(row.get("splits_used"))
    cell["splits"] = text_of(row.get("splits"))
    cell["splits"] += f" ({used})" if cell["splits"] == "auto" and used else ""
    return cell


def _number(row: Row, name: str, digits: int = 4, factor: float = 1.0) -> str:
    """The number in a column times a factor, as `significant` shows it; empty where unknown."""
    text = text_of(row.get(name))
    return significant(factor * float(text), digits) if text else ""


class Watcher(AbstractContextManager):
    """Shows a sweep of `total` cells; `before` are rows that the file already has, `guesses` seconds of the others.

    The bar is drawn where something ended or begins, never by a thread: that would disturb what is timed.
    """

    def __init__(
        self, console: Console, total: int, before: Sequence[Row], guesses: Mapping[Key, float] | None = None
    ) -> None:
        self.rows: list[Row] = list(before)
        self._console, self._total = console, total
        self._guesses = dict(guesses or {})
        self._drawn = 0.0
        columns = BarColumn(), TimeElapsedColumn(), TimeRemainingColumn(), TextColumn("{task.description}")
        self._progress = Progress(
            *columns, console=console, auto_refresh=False, transient=True, speed_estimate_period=LONGEST_CELL_S,
            disable=not console.is_terminal,
        )  # fmt: skip
        self._bar = self._progress.add_task("", total=sum(self._guesses.values()) or None)

    def doing(self, text: str) -> None:
        """Show what the sweep works on; a log wants results."""
        self._progress.update(self._bar, description=escape(printable(text)), refresh=True)

    def working(self, place: str, text: str) -> None:
        """The same of a worker, when the bar is drawn again."""
        self._progress.update(self._bar, description=escape(printable(f"{place}: {text}")) if text else "")

    def said(self, text: str) -> None:
        """Print it."""
        say(self._console, text)

    def ended(self, row: Row) -> None:
        """Print the cell's line, with the worker that measured it."""
        self.rows.append(row)
        worker = text_of(row.get("worker"))
        self.said(f"[{len(self.rows)}/{self._total}] {line(row)}" + (f" [{worker}]" if worker else ""))
        key = key_of_row({name: text_of(value) for name, value in row.items()})
        self._progress.advance(self._bar, self._guesses.pop(key, 0.0))

    def refresh(self) -> None:
        """Draw, not too often."""
        now = time.monotonic()
        if now - self._drawn >= REDRAW_S:
            self._progress.refresh()
            self._drawn = now

    def __enter__(self) -> Watcher:
        self._progress.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._progress.stop()
