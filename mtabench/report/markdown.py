"""The report as Markdown: what the page says, for where a page cannot be opened."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from mtabench.console import significant
from mtabench.escaping import in_markdown
from mtabench.measuring.settled import UNSETTLED
from mtabench.report.columns import (
    IMPLEMENTATION,
    SPREAD,
    STATUS,
    Column,
    axis_columns,
    environment,
    measured,
    measured_columns,
    spread_values,
)
from mtabench.report.data import Report, Row, Spread, is_plain, is_timed
from mtabench.report.page import facts, failures, title
from mtabench.report.sentences import plural, summary
from mtabench.results.sparklines import sparkline

MARK = "<!-- mtabench report -->"  # tells our files from a reader's own
MOST_CELLS = 1000  # GitHub shows files of up to 512 KB
MOST_MEDIANS = 12
BINS = 12


def markdown(report: Report) -> str:
    """The whole text. Nothing from the file is markup or a link in it."""
    lines = [MARK, "", f"# {in_markdown(title(report))}", "", facts(report, in_markdown), ""]
    lines += [f"- {sentence}" for sentence in summary(report, in_markdown)]
    cells = list(zip(report.rows, report.spreads, strict=True))[:MOST_CELLS]
    if len(report.rows) > len(cells):
        lines += ["", f"The tables have the first {len(cells):,} of {len(report.rows):,} cells; the summary is of all."]
    lines += ["", "## Time and speedup", "", *_panels(report, [row for row, _ in cells])]
    lines += ["## Cells", "", *_cells(report, [row for row, _ in cells])]
    lines += ["## What failed", "", *_failures(report)]
    lines += ["## Spread of the samples", "", *_spreads(report, cells)]
    lines += ["## Environment", "", *_environment(report)]
    lines += ["## Measure again", "", *_commands([row for row, _ in cells])]
    return "\n".join(lines).rstrip() + "\n"


def _panels(report: Report, rows: Sequence[Row]) -> Iterator[str]:
    """For each panel of the charts a table: sequence lengths down, implementations across."""
    baselines = list(dict.fromkeys(row["baseline"] for row in rows if row["speedup"]))
    over = f" and speedup over {in_markdown(', '.join(baselines))}" if baselines else ""
    plain = {row["impl"] for row in rows if is_plain(row)}
    for number, panel in enumerate(report.panels):
        mine = [row for row in rows if row["charted"] and number in row["panels"]]
        names = [name for name in report.implementations if any(row["impl"] == name for row in mine)]
        lengths = sorted({row["seq"] for row in mine})
        if not lengths:
            continue
        found = {(row["seq"], row["impl"]): row for row in mine}
        yield from (f"**{in_markdown(panel)}**: median in ms{over}", "")
        header = ["seq", *(in_markdown(name) + (" (plain)" if name in plain else "") for name in names)]
        table = [[f"{seq:,}", *(_time(found.get((seq, name))) for name in names)] for seq in lengths]
        yield from _table(header, table, "r" * len(header))


def _time(row: Row | None) -> str:
    if row is None:
        return ""
    if not is_timed(row):
        return in_markdown(row["status"])
    speedup = (
        f" ({significant(row['speedup'], 3, zeros=True)}x)" if row["speedup"] and row["baseline"] != row["impl"] else ""
    )
    return (
        in_markdown(UNSETTLED if row["settled"] is False else "")
        + significant(row["median_ms"], 4, zeros=True)
        + speedup
    )


def _cells(report: Report, rows: Sequence[Row]) -> Iterator[str]:
    columns = [IMPLEMENTATION, *axis_columns(report), *measured_columns(report), STATUS]
    table = [[_marked(row, column) + _field(row | measured(row), column) for column in columns] for row in rows]
    yield from _folded(plural(len(rows), "cell"), _table(map(_header, columns), table, _sides(columns)))


def _marked(row: Row, column: Column) -> str:
    """The mark before a time that did not settle."""
    return in_markdown(UNSETTLED) if column.name == "median_ms" and row["settled"] is False else ""


def _failures(report: Report) -> Iterator[str]:
    groups = failures(report)
    if not groups:
        yield from ("Nothing: every cell has a time.", "")
    for group in groups:
        reason = f": {in_markdown(group['reason'])}" if group["reason"] else ""
        yield f"- **{in_markdown(group['status'])}**{reason} ({plural(group['count'], 'cell')})"
        yield from (f"  - {in_markdown(label)}" for label in group["cells"])
        if group["count"] > len(group["cells"]):
            yield f"  - and {group['count'] - len(group['cells']):,} more"
    if groups:
        yield ""


def _spreads(report: Report, cells: Iterable[tuple[Row, Spread | None]]) -> Iterator[str]:
    if report.no_samples:
        yield from (f"Samples are not shown: {in_markdown(report.no_samples)}.", "")
        return
    yield from ("Bars: how many samples lie where between the lowest and the highest.", "")
    columns = [IMPLEMENTATION, *axis_columns(report), *SPREAD]
    table = []
    for row, spread in cells:
        if spread:
            values = row | spread_values(row, spread)
            drawn = [f"`{_bars(spread)}`", _medians(spread)]
            table.append([*(_field(values, column) for column in columns), *drawn])
    header = [*map(_header, columns), "histogram", "medians of the rounds, ms"]
    yield from _folded(plural(len(table), "cell"), _table(header, table, _sides(columns) + "ll"))


def _bars(spread: Spread) -> str:
    """A histogram in one line of text."""
    counts = [0] * BINS
    width = (spread.high - spread.low) / BINS or 1.0
    for samples in spread.rounds:
        for sample in samples:
            counts[min(int((sample - spread.low) / width), BINS - 1)] += 1
    return sparkline(counts, 0, max(counts))


def _medians(spread: Spread) -> str:
    """The median of each round; of many rounds the lowest and the highest."""
    medians = spread.medians
    if len(medians) > MOST_MEDIANS:
        return f"{significant(min(medians), 4, zeros=True)} to {significant(max(medians), 4, zeros=True)}"
    return ", ".join(significant(median, 4, zeros=True) for median in medians)


def _environment(report: Report) -> Iterator[str]:
    for name, values in environment(report):
        shown = [
            in_markdown(value) + (f" ({count:,} cells)" if count and values[1:] else "") for value, count in values
        ]
        yield f"- {name}: {', '.join(shown)}"
    yield ""


def _commands(rows: Sequence[Row]) -> Iterator[str]:
    """Commands are of few characters (see data.COMMAND), so that a fence holds them."""
    commands = [row["command"] for row in rows if row["command"]]
    if not commands:
        yield "The file holds no command that mtabench would write."
        return
    yield from _folded(plural(len(commands), "command"), ["```", *commands, "```", ""])


def _folded(head: str, lines: Iterable[str]) -> list[str]:
    return ["<details>", f"<summary>{head}</summary>", "", *lines, "</details>", ""]


def _table(header: Iterable[str], rows: Iterable[Sequence[str]], sides: str) -> list[str]:
    """A table of texts that are safe already; `sides` has l or r for each column."""
    marks = ["---:" if side == "r" else "---" for side in sides]
    return [f"| {' | '.join(row)} |" for row in (list(header), marks, *rows)] + [""]


def _header(column: Column) -> str:
    return f"{column.label} {column.unit}".strip()


def _field(row: Row, column: Column) -> str:
    value = row[column.name]
    if value is None or value == "":
        return ""
    if column.kind == "text":
        return in_markdown(str(value))
    return f"{value:,}" if isinstance(value, int) else significant(value, column.digits, zeros=True)


def _sides(columns: Iterable[Column]) -> str:
    return "".join("l" if column.kind == "text" else "r" for column in columns)
