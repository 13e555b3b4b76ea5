"""How two runs are judged, and where what is found goes: standard output, files, GitHub."""

import os
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from mtabench.comparing.compare import (
    NOTHING,
    UNCLEAR,
    VERDICTS,
    WRONG,
    ComparedCell,
    Comparison,
    NotComparableError,
    parse_fail_on,
)
from mtabench.comparing.inference import POWER
from mtabench.console import make_console
from mtabench.errors import UsageError
from mtabench.escaping import in_log, in_markdown, markdown_table
from mtabench.json_output import print_json
from mtabench.measuring.settled import UNSETTLED, mark_of, unsettled_of
from mtabench.options import Comparing
from mtabench.problem.axes import parse_percent
from mtabench.results import outputs
from mtabench.results.cell_names import told_apart
from mtabench.results.outputs import append_text, write_text
from mtabench.results.results_file import KEY_COLUMNS, NUMERIC_COLUMNS, samples_paths
from mtabench.results.runs import Cell
from mtabench.tables import as_columns, fitted, lines, numbered, print_lines, print_prose, width_of

STYLES = {"slower": "bold red", "broken": "bold red", "gone": "bold red", "unclear": "yellow", "faster": "green"}
HEADER = ("cell", "base ms", "head ms", "change", "95 % interval", "detectable", "verdict")
TEXTS = ("cell", "verdict")  # of HEADER; the others are numbers
IN_DOUBT = ("broken", "slower", "gone", "unclear")  # what a reader should know of, whatever fails
FEWEST_GROUPED = 4  # cells that a run lacks of an implementation, which one sentence names
MOST_ANNOTATIONS = 10  # of each kind; GitHub shows no more of a step
MOST_SUMMARY_BYTES = 1_000_000  # GitHub takes 1 MiB of a step
FORMATS = ("table", "markdown", "json")


def conclusions(comparison: Comparison) -> Iterator[str]:
    """The sentences below the cells: how far to trust them, what could have been found, the counts, the outcome."""
    yield from comparison.notes
    if marked := unsettled_of([side.row for cell in comparison.cells for side in cell.sides if side.ok]):
        yield f"{UNSETTLED} {marked}"
    smallest = [cell.detectable for cell in comparison.cells if cell.detectable is not None]
    if smallest:
        least, most = share(min(smallest)), share(max(smallest))
        where = "" if least == most else f" in the quietest cell, of {most} in the noisiest"
        yield f"detectable in {100 * POWER:g} % of comparisons: a slowdown of {least}{where}"
    if comparison.cells and not comparison.across_devices:
        yield f"{_counted(comparison, VERDICTS)}; changes below {100 * comparison.threshold:g} % do not count"
    yield outcome(comparison)


def outcome(comparison: Comparison) -> str:
    """Whether a build passes, and why, in a sentence."""
    if comparison.across_devices:
        return "no verdict: times of two devices"
    code = comparison.exit_code
    asked = f"--fail-on {','.join(comparison.fail_on)}"
    if code == WRONG:
        return f"fails with exit code {code}: {sum(cell.wrong for cell in comparison.cells)} wrong"
    if code == NOTHING:
        return f"fails with exit code {code}: nothing was compared, since no cell has a time in both runs"
    if code == UNCLEAR and "unclear" not in comparison.fail_on:
        return f"fails with exit code {code}: {comparison.counts['unclear']} unclear, and no cell has another verdict"
    if code:
        return f"fails with exit code {code}: {_counted(comparison, comparison.fail_on)} ({asked})"
    others = _counted(comparison, [one for one in IN_DOUBT if one not in comparison.fail_on])
    doubts = f", although there {'is' if others.startswith('1 ') else 'are'} {others}" if others else ""
    return f"passes: none is {_either(comparison.fail_on)} ({asked}){doubts}"


def _counted(comparison: Comparison, verdicts: Iterable[str]) -> str:
    counts = comparison.counts
    return ", ".join(f"{counts[verdict]} {verdict}" for verdict in verdicts if counts[verdict])


def _either(words: Sequence[str]) -> str:
    *first, last = words
    return f"{', '.join(first)} or {last}" if first else last


def print_cells(console: Console, comparison: Comparison) -> None:
    """Every cell on a line, the most urgent first, or on two where the width has no room for a table."""
    groups, cells = _grouped(comparison.cells)
    for text, verdict in groups.items():
        print_prose(console, text, style=STYLES.get(verdict, ""))
    if not cells:
        return
    shared, parts, names = told_apart([cell.sides[-1].row for cell in cells])
    if shared:
        print_prose(console, f"all cells: {shared}", style="bold")
    marks = numbered(cell.reason for cell in cells)
    choices: tuple[dict[str, str], ...] = {}, marks
    for notes in choices:  # a reason stands in its row, or where there is no room below the table
        rows: list[list[str | Text]] = [[*_fields(cell), _verdict(cell, notes)] for cell in cells]
        filled = [column for column in as_columns(HEADER[1:], rows, TEXTS) if any(map(str, column.texts))]
        above, columns, _ = fitted([*parts, *filled], console.width)
        if width_of(columns) <= console.width:
            print_lines(console, lines(columns, above))
            for reason, mark in notes.items():
                print_prose(console, reason, f"{mark} ")
            return
    for name, cell in zip(names, cells, strict=True):
        print_prose(console, f"{cell.verdict}: {name}".removeprefix(": "), style=STYLES.get(cell.verdict, ""))
        if known := ", ".join(filter(None, (_numbers(cell), cell.reason))):
            print_prose(console, known, "  ")


def _grouped(cells: Sequence[ComparedCell]) -> tuple[dict[str, str], list[ComparedCell]]:
    """A sentence, and its verdict, for all that one run lacks of an implementation; then the other cells."""
    missing: dict[tuple[str, ...], list[ComparedCell]] = {}
    for cell in cells:
        if cell.verdict in ("gone", "new"):
            missing.setdefault((cell.verdict, str(cell.sides[-1].row["impl"]), cell.reason), []).append(cell)
    several = {key: found for key, found in missing.items() if len(found) >= FEWEST_GROUPED}
    told = {id(cell) for found in several.values() for cell in found}
    sentences = {
        f"{verdict}: {len(found)} cells of {impl}{f': {reason}' if reason else ''}": verdict
        for (verdict, impl, reason), found in several.items()
    }
    return sentences, [cell for cell in cells if id(cell) not in told]


def _verdict(cell: ComparedCell, marks: Mapping[str, str]) -> str | Text:
    text = f"{cell.verdict} {marks[cell.reason]}" if cell.reason in marks else cell.outcome
    style = STYLES.get(cell.verdict)
    return Text(text, style) if style else text


def markdown(comparison: Comparison | str) -> str:
    """The outcome, the other conclusions and a table; cells that stayed the same are folded away.

    Of two runs that cannot be compared, the sentence that says why.
    """
    if isinstance(comparison, str):
        return "\n".join(_markdown_title(comparison))
    *others, last = conclusions(comparison)
    lines = [*_markdown_title(last), *(f"- {in_markdown(text)}" for text in others)] + [""] * bool(others)
    groups, cells = _grouped(comparison.cells)
    lines += [f"- {in_markdown(text)}" for text in groups] + [""] * bool(groups)
    told = [cell for cell in cells if cell.verdict != "same"]
    quiet = [cell for cell in cells if cell.verdict == "same"]
    lines += _markdown_table(told) if told else []
    if quiet:
        lines += ["<details>", f"<summary>{len(quiet)} same</summary>", "", *_markdown_table(quiet), "</details>", ""]
    return "\n".join(lines)


def comparison_data(found: Comparison) -> dict[str, Any]:
    """Every cell with its verdict, and what the build makes of them, in JSON's types."""
    runs = {"base": found.base, "head": found.head}
    return {
        "across_devices": found.across_devices,
        **{name: {"file": run.path, "devices": sorted(run.values("device"))} for name, run in runs.items()},
        "threshold": found.threshold,
        "fail_on": found.fail_on,
        "exit_code": found.exit_code,
        "outcome": outcome(found),
        "notes": list(conclusions(found))[:-1],
        "counts": {verdict: found.counts[verdict] for verdict in VERDICTS},
        "cells": [_cell_data(found, cell) for cell in found.cells],
    }


def _cell_data(found: Comparison, cell: ComparedCell) -> dict[str, Any]:
    base, head = (side.row["status"] if side else None for side in (cell.base, cell.head))
    row: Mapping[str, Any] = cell.sides[-1].row
    problem = {name: row[name] if row[name] != "" else None for name in KEY_COLUMNS}
    problem |= {name: int(row[name]) for name in NUMERIC_COLUMNS if name in problem and row[name] == row[name]}
    return {
        "name": cell.name, "problem": problem, "verdict": cell.verdict or None, "fails": found.fails(cell),
        "reason": cell.reason or None, "base_status": base, "head_status": head, "base_ms": cell.base_ms,
        "head_ms": cell.head_ms, "change": cell.change, "change_low": cell.low, "change_high": cell.high,
        "detectable": cell.detectable,
    }  # fmt: skip


def junit(comparison: Comparison | str) -> str:
    """JUnit's XML: a test case a cell, which fails if it fails a build; what was not compared is skipped.

    The conclusions are the suite's output. If nothing was compared, a test case of its own says so as an error.
    """
    if isinstance(comparison, str):
        cases, said = [], [comparison]
    else:
        cases, said = [_junit_case(comparison, cell) for cell in comparison.cells], list(conclusions(comparison))
    if isinstance(comparison, str) or comparison.nothing_compared:
        case = ElementTree.Element("testcase", {"classname": "mtabench", "name": "comparison"})
        ElementTree.SubElement(case, "error", {"type": "nothing compared", "message": said[-1]})
        cases.append(case)
    counted = {"failures": "failure", "errors": "error", "skipped": "skipped"}
    totals = {"tests": f"{len(cases)}"} | {
        name: f"{sum(case.find(kind) is not None for case in cases)}" for name, kind in counted.items()
    }
    root = ElementTree.Element("testsuites", totals)
    suite = ElementTree.SubElement(root, "testsuite", {"name": "mtabench compare", **totals})
    suite.extend(cases)
    ElementTree.SubElement(suite, "system-out").text = "\n".join(said)
    ElementTree.indent(root)
    return ElementTree.tostring(root, encoding="unicode", xml_declaration=True) + "\n"


def _junit_case(comparison: Comparison, cell: ComparedCell) -> ElementTree.Element:
    attributes = {"classname": "mtabench", "name": cell.name}
    time = cell.head_ms or (cell.head.row["median_ms"] if cell.head and cell.head.ok else None)
    if time is not None:
        attributes["time"] = f"{time / 1e3:.9f}"
    case = ElementTree.Element("testcase", attributes)
    if comparison.fails(cell):
        ElementTree.SubElement(case, "failure", {"type": cell.verdict, "message": sentence(cell)})
    elif cell.verdict in ("same", "faster"):
        ElementTree.SubElement(case, "system-out").text = sentence(cell)
    else:
        ElementTree.SubElement(case, "skipped", {"message": sentence(cell)})
    return case


def github_annotations(comparison: Comparison | str) -> Iterator[str]:
    """GitHub's workflow commands: an error for what fails the build, a warning for each other cell in doubt."""
    if isinstance(comparison, str) or comparison.nothing_compared:
        why = comparison if isinstance(comparison, str) else outcome(comparison)
        yield f"::error title={_escaped('mtabench: nothing compared', ':,')}::{_escaped(why)}"
    if isinstance(comparison, str):
        return
    failing = [cell for cell in comparison.cells if comparison.fails(cell)]
    doubted = [cell for cell in comparison.cells if cell.verdict in IN_DOUBT and not comparison.fails(cell)]
    for kind, told in (("error", failing), ("warning", doubted)):
        for cell in told[: MOST_ANNOTATIONS - (len(told) > MOST_ANNOTATIONS)]:
            yield f"::{kind} title={_escaped(f'mtabench: {cell.verdict}', ':,')}::{_escaped(sentence(cell))}"
        if len(told) > MOST_ANNOTATIONS:
            yield f"::{kind} title=mtabench::{len(told) - MOST_ANNOTATIONS + 1} more are in the step summary"


def step_summary(comparison: Comparison | str) -> str:
    """The Markdown, cut to what GitHub takes."""
    whole = markdown(comparison)
    if len(whole.encode()) <= MOST_SUMMARY_BYTES:
        return whole
    return whole.encode()[:MOST_SUMMARY_BYTES].decode(errors="ignore").rpartition("\n")[0] + "\n\nCut here.\n"


def sentence(cell: ComparedCell) -> str:
    """What was found of a cell, in one line."""
    return f"{cell.name}: {', '.join(filter(None, (_numbers(cell), cell.outcome)))}"


def _numbers(cell: ComparedCell) -> str:
    """The times, the change and how sure it is; nothing for a cell that was not compared."""
    before, after, change, interval, smallest = _fields(cell)
    known = f" ({interval}, detectable {smallest})" if interval else ""
    return f"{before} to {after} ms, {change}{known}" if change else ""


def _fields(cell: ComparedCell) -> tuple[str, ...]:
    """The texts under HEADER between the cell and its verdict."""
    before, after = map(_time, (cell.base_ms, cell.head_ms), (cell.base, cell.head))
    change = "" if cell.change is None else _changed(cell.change).replace("x", "x as long")
    interval = "" if cell.low is None or cell.high is None else _interval(cell.low, cell.high)
    smallest = "" if cell.detectable is None else share(cell.detectable)
    return before, after, change, interval, smallest


def _time(compared_ms: float | None, side: Cell | None) -> str:
    """The time that was compared, or else the median; marked if it did not settle."""
    if side is None or not side.ok:
        return ""
    return mark_of(side.row) + f"{compared_ms or side.row['median_ms']:.4g}"


def _changed(change: float) -> str:
    """In percent, or from +1000 % on how many times as long it took."""
    return f"{100 * change:+.2f} %" if change < 10 else f"{1 + change:.4g}x" if change < 1000 else "over 1000x"


def _interval(low: float, high: float) -> str:
    """Both ends in the unit of the upper one."""
    least = _changed(low)
    if low < 10 <= high:
        least = f"{1 + low:.4g}x" if low > -0.999 else "under 0.001x"
    return f"{least} to {_changed(high)}".replace(" % to", " to")


def share(value: float) -> str:
    """A part of a time, 0.02 for 2 %, in two digits."""
    return f"{100 * value:.2g} %" if value < 1 else f"{100 * value:.0f} %" if value < 10 else "over 1000 %"


def _markdown_title(text: str) -> list[str]:
    return ["## mtabench compare", "", in_markdown(f"{text}."), ""]


def _markdown_table(cells: Iterable[ComparedCell]) -> list[str]:
    rows = (map(in_markdown, (cell.name, *_fields(cell), cell.outcome)) for cell in cells)
    return [*markdown_table(HEADER, rows, (name not in TEXTS for name in HEADER)), ""]


def _escaped(text: str, more: str = "") -> str:
    """A text inside a workflow command; `more` are the characters that end a property."""
    for character in "%\r\n" + more:
        text = text.replace(character, f"%{ord(character):02X}")
    return text


@dataclass(frozen=True, slots=True)
class ComparisonOptions:
    """How to judge, what to print, the files to write by their names in REPORTS, and whether to replace any there."""

    threshold: float
    fail_on: tuple[str, ...]
    format: str
    outputs: Mapping[str, Path]
    overwrite: bool = False


def comparison_options(typed: Comparing) -> ComparisonOptions:
    """The options as typed, parsed; raises UsageError."""
    if typed.format_ not in FORMATS:
        raise UsageError(f"--format {typed.format_!r} is not known; expected one of {', '.join(FORMATS)}")
    chosen = {name: getattr(typed, name) for name in REPORTS if getattr(typed, name) is not None}
    share, fail_on = parse_percent(typed.threshold, "--threshold"), parse_fail_on(typed.fail_on)
    return ComparisonOptions(share, fail_on, typed.format_, chosen, typed.overwrite)


@contextmanager
def refusal_reported(options: ComparisonOptions) -> Iterator[None]:
    """Write into every wanted report, GitHub's included, why two runs cannot be compared."""
    try:
        yield
    except NotComparableError as error:
        _write_reports(str(error), options)
        _tell_github(str(error))
        raise


def report(found: Comparison, asked: ComparisonOptions) -> int:
    """Write and print a comparison as the options say, for GitHub too where it runs this; the exit code."""
    _write_reports(found, asked)
    if asked.format == "json":
        print_json("compare", comparison_data(found))
    elif asked.format == "markdown":
        print(in_log(markdown(found)))
    else:
        console = make_console()
        print_cells(console, found)
        for text in conclusions(found):
            print_prose(console, text)
    _tell_github(found)
    return found.exit_code


def _write_reports(found: Comparison | str, options: ComparisonOptions) -> None:
    for name, path in options.outputs.items():
        write_text(path, REPORTS[name](found))


def _tell_github(found: Comparison | str) -> None:
    """Print annotations and add to the step summary, where GitHub Actions runs this."""
    if os.environ.get("GITHUB_ACTIONS") != "true":
        return
    for text in github_annotations(found):
        print(text)
    if os.environ.get("GITHUB_STEP_SUMMARY"):
        append_text(Path(os.environ["GITHUB_STEP_SUMMARY"]), step_summary(found))


def check_outputs(asked: ComparisonOptions, results: Sequence[Path]) -> None:
    """Raise UsageError for a wanted report that may not be written; `results` are the files compared."""
    files = {f"--{name.replace('_', '-')}": path for name, path in asked.outputs.items()}
    outputs.check_outputs(files, [one for path in results for one in (path, *samples_paths(path))], asked.overwrite)


# Where two runs cannot be compared they say why, so that CI shows more than a report that is missing.
REPORTS: Mapping[str, Callable[[Comparison | str], str]] = {"markdown": markdown, "junit": junit}
