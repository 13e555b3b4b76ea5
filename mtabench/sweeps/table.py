"""What a person sees of a sweep: its plan, a line a row, and a table at the end."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from mtabench.console import flop_unit, leave_out, significant
from mtabench.errors import NothingTimedError
from mtabench.measuring.settled import (
    MUCH_WIDER,
    UNSETTLED,
    half_interval_of,
    mark_of,
    target_of,
    typical_half,
    unsettled,
    was_crowded,
)
from mtabench.problem.axes import short
from mtabench.problem.case import Case
from mtabench.problem.operations import PLAIN, PLAIN_LACKS, STEPS, page_size_text, step_words, taps_text
from mtabench.prose import plural
from mtabench.results.results_file import text_of
from mtabench.results.splits import Choice, choices
from mtabench.sweeps.estimate import shown
from mtabench.sweeps.plan import Plan
from mtabench.tables import Column, numbered, print_prose, width_of

STYLES = {"ok": "green", "wrong": "bold red", "error": "red", "oom": "yellow", "invalid": "yellow"}
ALWAYS = ("seq", "impl")
# Shown where they differ.
OPTIONAL = ("pass", "dtype", "layers", "batch", "heads", "kv_heads", "head_dim", *STEPS, "causal")
MOST_REASONS = 3  # in a sentence
Row = Mapping[str, Any]


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


def print_results(console: Console, rows: Sequence[Row]) -> None:
    """Print the rows of a sweep as a table; below it what it has no room for, and each reason once."""
    reasons = numbered(text_of(row.get("reason")) for row in rows)
    marks = [reasons.get(text_of(row.get("reason")), "") for row in rows]
    table, left_out = _table(rows, _columns(rows, len(rows)), marks, console.width)
    console.print(table)
    if left_out:
        print_prose(console, f"left out for {console.width} columns: {', '.join(left_out)}")
    for reason, mark in reasons.items():
        print_prose(console, reason, f"{mark} ")


def results_table(rows: Sequence[Row], width: int, limit: int) -> Table:
    """The last `limit` rows of a sweep as a table for a terminal of `width`, each on one line without its reason."""
    shown = rows[-limit:]
    return _table(shown, _columns(rows, limit), [""] * len(shown), width)[0]


def _table(rows: Sequence[Row], columns: Sequence[Column], marks: Sequence[str], width: int) -> tuple[Table, list[str]]:
    """The table, with a mark behind each status, and the names of the columns that it has no room for."""
    statuses = Column("status", [f"{row['status']} {mark}".rstrip() for row, mark in zip(rows, marks, strict=True)])
    columns, left_out = leave_out(columns, lambda kept: width_of([*kept, statuses]) <= width)
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        table.add_column(column.heading, justify=column.justify, no_wrap=True)
    table.add_column("status", no_wrap=True)
    for i, (row, mark) in enumerate(zip(rows, marks, strict=True)):
        status = Text(row["status"], style=STYLES.get(row["status"], "")).append(f" {mark}" if mark else "", style="")
        table.add_row(*(escape(str(column.texts[i])) for column in columns), status)
    return table, [column.name for column in left_out]


def _columns(rows: Sequence[Row], count: int) -> list[Column]:
    """All columns but the status, with the texts of the last so many rows."""
    cells = [_cell(row) for row in rows]
    problem = [*(name for name in OPTIONAL if _differ(rows, cells, name)), *ALWAYS]
    if len({text_of(row.get("splits")) for row in rows} - {""}) > 1:
        problem.append("splits")
    cells, rows = cells[-count:], rows[-count:]
    left = ("impl", "dtype")
    unit, factor = flop_unit(float(text_of(row.get("useful_tflops")) or 0) for row in rows)
    return [
        *(
            Column(name.replace("_", " "), [cell[name] for cell in cells], 0, "left" if name in left else "right")
            for name in problem
        ),
        Column("median ms", [_median(row) for row in rows]),
        Column("±", [_half_interval(row) for row in rows], 2),
        Column("p10-p90 ms", [_percentiles(row) for row in rows], 5),
        Column("speedup", [_formatted(row, "speedup", "{:.2f}x") for row in rows], 1),
        Column(unit, [_number(row, "useful_tflops", 3, factor) for row in rows], 3),
        Column("of roof", [_formatted(row, "fraction_of_roofline", "{:.1%}") for row in rows], 4),
    ]


def _differ(rows: Sequence[Row], cells: Sequence[Mapping[str, str]], name: str) -> bool:
    """Whether cells have several values; a step that one lacks is one, but for plain attention, which has none."""
    if name in PLAIN_LACKS:
        return len({cell[name] for row, cell in zip(rows, cells, strict=True) if row["op"] != PLAIN}) > 1
    return len({cell[name] for cell in cells} - {""}) > 1


def _median(row: Row) -> str:
    """The median in ms, marked if it did not settle."""
    return mark_of(row) + _number(row, "median_ms")


def _half_interval(row: Row) -> str:
    """Half the 95 % interval of the median, in percent of it."""
    half = half_interval_of(row)
    return "" if half is None else f"{100 * half:.1f} %"


def _percentiles(row: Row) -> str:
    return f"{_number(row, 'p10_ms', 3)}-{_number(row, 'p90_ms', 3)}" if _number(row, "p10_ms") else ""


def _formatted(row: Row, name: str, form: str) -> str:
    text = text_of(row.get(name))
    return form.format(float(text)) if text else ""


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
        result = f"{_median(row)} ms" + (f", {float(speedup):.2f}x {row['baseline']}" if speedup else "")
        result += "" if row["status"] == "ok" else f", {row['status']}: {text_of(row.get('reason'))}"
    splits = f", splits {cell['splits']}" if cell["splits"] else ""
    return f"{problem}  {cell['impl']}{splits}: {result}"


def auto_lines(rows: Sequence[Row]) -> list[str]:
    """A sentence for each problem on how much slower auto's splits were than the best measured, if both were."""
    found = list(choices(rows))
    cells = [_cell(choice.auto) for choice in found]
    differing = [name for name in (*OPTIONAL, *ALWAYS) if len({cell[name] for cell in cells}) > 1]
    places = [", ".join(f"{name.replace('_', ' ')} {cell[name]}" for name in differing) for cell in cells]
    return [
        f"{place}: {_auto_sentence(choice)}" if place else _auto_sentence(choice)
        for place, choice in zip(places, found, strict=True)
    ]


def _auto_sentence(choice: Choice) -> str:
    used, percent = text_of(choice.auto["splits_used"]), f"{100 * choice.slowdown:.1f}"
    took = f"auto took {plural(int(used), 'split')}" if used else "auto"
    if not choice.slowdown:
        verdict = "the best of those measured"
    elif percent == "0.0":
        verdict = f"as fast as the best of those measured ({choice.best['splits']})"
    else:
        verdict = f"{percent} % slower than the best of those measured ({choice.best['splits']})"
        verdict += "; their 95 % intervals overlap" if choice.overlap else ""
    runs = "" if choice.auto["run_id"] == choice.best["run_id"] else "; the two are of different runs"
    return f"{took}: {_number(choice.auto, 'median_ms')} ms, {verdict}{runs}"


def roof_lines(rows: Sequence[Row]) -> list[str]:
    """A sentence where no time of a kernel is held against the ceilings of its device."""
    timed = [row for row in rows if row["status"] == "ok" and not row.get("layers")]
    if not timed or any(row.get("fraction_of_roofline") for row in timed):
        return []
    return [
        "no share of the roofline: another job had the cores while the ceilings were measured, or there was no room; "
        "`mtabench env --measure` says which"
    ]


def settled_lines(rows: Sequence[Row], max_rounds: int, time_limit_s: float, *, out_typed: bool) -> list[str]:
    """How wide most intervals are if they miss the target, how many times did not settle and what to try.

    The sweep had these limits a cell. Only who typed --out must type another one.
    """
    marked, timed = unsettled(rows), [row for row in rows if row["status"] == "ok"]
    usual, typical = typical_half(timed), []
    if usual is not None:
        typical = [
            f"most times are known to ±{100 * usual:.2g} % here, the median of {len(timed)} cells, and not to the "
            f"target of {100 * target_of(timed[0]):g} %; {UNSETTLED} marks more than {MUCH_WIDER:g} times that"
        ]
    if not marked:
        return typical
    head = f"{len(marked)} of {len(timed)} cells did not settle (marked {UNSETTLED})"
    crowded = [float(row["run_delay"]) for row in marked if was_crowded(row)]
    if crowded:
        return [
            *typical,
            f"{head}: threads waited for a core up to {100 * max(crowded):.0f} % of the time, so another job runs; "
            f"end it, and type the same command {'with another --out' if out_typed else 'again'}",
        ]
    more = f"--rounds {4 * max_rounds} --time-limit {4 * time_limit_s:g}{' and another --out' if out_typed else ''}"
    return [*typical, f"{head}: is another job running? If not, type the same command with {more}"]


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
