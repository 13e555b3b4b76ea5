"""A comparison as a table, as Markdown and as what CI systems read."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterable, Iterator

from rich.table import Table
from rich.text import Text

from mtabench.comparing.compare import COMPARED, VERDICTS, ComparedCell, Comparison
from mtabench.escaping import in_markdown
from mtabench.sweeps.runs import Run

STYLES = {"slower": "bold red", "broken": "bold red", "unclear": "yellow", "faster": "green"}
HEADER = ("cell", "base ms", "head ms", "change", "95 % interval", "verdict")
TABLE_WIDTH = 72  # columns of a terminal, the least for the table: below, Rich would cut digits off
MOST_ANNOTATIONS = 10  # of each kind; GitHub shows no more of a step
MOST_SUMMARY_BYTES = 1_000_000  # GitHub takes 1 MiB of a step


def summary(comparison: Comparison) -> str:
    """How many cells have each verdict, in a sentence."""
    counts = comparison.counts
    found = ", ".join(f"{counts[verdict]} {verdict}" for verdict in VERDICTS if counts[verdict])
    return f"{found}; changes below {100 * comparison.threshold:g} % do not count"


def narrow(comparison: Comparison) -> Text:
    """Every cell as a sentence, the most urgent first, for where the table has no room."""
    sentences = (Text(sentence(cell), style=STYLES.get(cell.verdict, "")) for cell in comparison.cells)
    return Text("\n").join(sentences)


def table(comparison: Comparison) -> Table:
    """Every cell on a line, the most urgent first."""
    shown = Table(box=None, pad_edge=False, header_style="bold")
    for name in HEADER:
        folds = name in ("cell", "verdict")
        shown.add_column(name, justify="left" if folds else "right", overflow="fold", no_wrap=not folds)
    for cell in comparison.cells:
        *numbers, verdict = _fields(cell)
        shown.add_row(*map(Text, numbers), Text(verdict, style=STYLES.get(cell.verdict, "")))
    return shown


def markdown(comparison: Comparison) -> str:
    """The summary, the notes and a table; cells that stayed the same are folded away."""
    lines = ["## mtabench compare", "", in_markdown(f"{summary(comparison)}."), ""]
    lines += [f"- {in_markdown(note)}" for note in comparison.notes] + [""] * bool(comparison.notes)
    told = [cell for cell in comparison.cells if cell.verdict != "same"]
    quiet = [cell for cell in comparison.cells if cell.verdict == "same"]
    lines += _markdown_table(told) if told else []
    if quiet:
        lines += ["<details>", f"<summary>{len(quiet)} same</summary>", "", *_markdown_table(quiet), "</details>", ""]
    return "\n".join(lines)


def junit(comparison: Comparison) -> str:
    """JUnit's XML: a test case a cell, which fails if its verdict fails a build; what was not compared is skipped."""
    failing = comparison.failing
    failures = sum(cell.verdict in failing for cell in comparison.cells)
    skipped = sum(cell.verdict not in (*failing, "same", "faster") for cell in comparison.cells)
    totals = {"tests": f"{len(comparison.cells)}", "failures": f"{failures}", "errors": "0", "skipped": f"{skipped}"}
    root = ElementTree.Element("testsuites", totals)
    suite = ElementTree.SubElement(root, "testsuite", {"name": "mtabench compare", **totals})
    for cell in comparison.cells:
        attributes = {"classname": "mtabench", "name": cell.name}
        if cell.head and cell.head.ok:
            attributes["time"] = f"{cell.head.row['median_ms'] / 1e3:.9f}"
        case = ElementTree.SubElement(suite, "testcase", attributes)
        if cell.verdict in failing:
            ElementTree.SubElement(case, "failure", {"type": cell.verdict, "message": sentence(cell)})
        elif cell.verdict not in ("same", "faster"):
            ElementTree.SubElement(case, "skipped", {"message": sentence(cell)})
    ElementTree.indent(root)
    return ElementTree.tostring(root, encoding="unicode", xml_declaration=True) + "\n"


def github_annotations(comparison: Comparison) -> Iterator[str]:
    """GitHub's workflow commands: an error for each cell that fails the build, a warning for each unclear one."""
    for kind, verdicts in (("error", comparison.failing), ("warning", ("unclear",))):
        told = [cell for cell in comparison.cells if cell.verdict in verdicts]
        if kind == "warning" and comparison.strict:
            continue
        for cell in told[: MOST_ANNOTATIONS - (len(told) > MOST_ANNOTATIONS)]:
            yield f"::{kind} title={_escaped(f'mtabench: {cell.verdict}', ':,')}::{_escaped(sentence(cell))}"
        if len(told) > MOST_ANNOTATIONS:
            yield f"::{kind} title=mtabench::{len(told) - MOST_ANNOTATIONS + 1} more are in the step summary"


def step_summary(comparison: Comparison) -> str:
    """The Markdown, cut to what GitHub takes."""
    whole = markdown(comparison)
    if len(whole.encode()) <= MOST_SUMMARY_BYTES:
        return whole
    return whole.encode()[:MOST_SUMMARY_BYTES].decode(errors="ignore").rpartition("\n")[0] + "\n\nCut here.\n"


def github_action_benchmark(run: Run) -> str:
    """The times of a run for benchmark-action/github-action-benchmark, tool `customSmallerIsBetter`."""
    entries = [
        {
            "name": cell.name,
            "unit": "ms",
            "value": cell.row["median_ms"],
            "range": f"{cell.row['ci95_low_ms']:g} to {cell.row['ci95_high_ms']:g}",
            "extra": cell.row["repro"],
        }
        for cell in run.cells.values()
        if cell.ok
    ]
    return json.dumps(entries, indent=2) + "\n"


def bencher(run: Run) -> str:
    """The times of a run in the Bencher Metric Format, whose latency is in nanoseconds."""
    columns = {"value": "median_ms", "lower_value": "ci95_low_ms", "upper_value": "ci95_high_ms"}
    metrics = {
        cell.name: {"latency": {name: round(cell.row[column] * 1e6, 3) for name, column in columns.items()}}
        for cell in run.cells.values()
        if cell.ok
    }
    return json.dumps(metrics, indent=2) + "\n"


def sentence(cell: ComparedCell) -> str:
    """What was found of a cell, in one line."""
    _, before, after, change, interval, verdict = _fields(cell)
    times = f" {before} to {after} ms, {change} ({interval})," if cell.verdict in COMPARED and change else ""
    return f"{cell.name}:{times} {verdict}"


def _fields(cell: ComparedCell) -> tuple[str, ...]:
    """The texts under HEADER."""
    before, after = (f"{x.row['median_ms']:.4g}" if x and x.ok else "" for x in (cell.base, cell.head))
    change = "" if cell.change is None else f"{_percent(cell.change)} %"
    interval = "" if cell.low is None or cell.high is None else f"{_percent(cell.low)} to {_percent(cell.high)} %"
    verdict = f"{cell.verdict}: {cell.reason}" if cell.reason else cell.verdict
    return cell.name, before, after, change, interval, verdict


def _percent(share: float) -> str:
    """With two decimals, and three digits where it is beyond all measure."""
    return f"{100 * share:+.2f}" if share < 10 else f"{100 * share:+.3g}"


def _markdown_table(cells: Iterable[ComparedCell]) -> list[str]:
    rows = [HEADER, ("---", "---:", "---:", "---:", "---:", "---"), *map(_fields, cells)]
    return [f"| {' | '.join(map(in_markdown, row))} |" for row in rows] + [""]


def _escaped(text: str, more: str = "") -> str:
    """A text inside a workflow command; `more` are the characters that end a property."""
    for character in "%\r\n" + more:
        text = text.replace(character, f"%{ord(character):02X}")
    return text
