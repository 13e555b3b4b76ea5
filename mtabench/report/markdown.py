"""The report as Markdown: what the page says, for where a page cannot be opened."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain

from mtabench.console import significant
from mtabench.escaping import in_markdown, markdown_table
from mtabench.measuring.settled import UNSETTLED
from mtabench.prose import plural
from mtabench.report.columns import ReportColumn, cell_columns, environment, measured, spread_columns
from mtabench.report.data import Report, Row, Spread, is_plain, is_timed
from mtabench.report.page import facts, failures, title
from mtabench.report.sentences import figures, summary
from mtabench.results.sparklines import sparkline

MARK = "<!-- mtabench report -->"  # tells our files from a reader's own
MOST_CELLS = 1000  # GitHub shows files of up to 512 KB
MOST_MEDIANS = 12
BINS = 12


def markdown(report: Report) -> str:
    """The whole text. Nothing from the file is markup or a link in it."""
    lines = [MARK, "", f"# {in_markdown(title(report))}", "", facts(report, in_markdown), ""]
    lines += [
        f"- **{one.value}** {one.interval} {one.words}".replace("**  ", "** ") for one in figures(report, in_markdown)
    ]
    lines += ["", *(f"- {sentence}" for sentence in summary(report, in_markdown))]
    rows = report.rows[:MOST_CELLS]
    if len(report.rows) > len(rows):
        lines += ["", f"The tables have the first {len(rows):,} of {len(report.rows):,} cells; the summary is of all."]
    lines += ["", "## Time and speedup", "", *_panels(report, rows)]
    lines += ["## Cells", "", *_cells(report, rows)]
    lines += ["## What failed", "", *_failures(report)]
    lines += ["## Spread of the samples", "", *_spreads(report, rows)]
    lines += ["## Environment", "", *_environment(report)]
    lines += ["## Measure again", "", *_commands(rows)]
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
        yield from (*markdown_table(header, table, [True] * len(header)), "")


def _time(row: Row | None) -> str:
    if row is None:
        return ""
    if not is_timed(row):
        return in_markdown(row["status"])
    told = row["speedup"] and row["baseline"] != row["impl"]
    speedup = f" ({significant(row['speedup'], 3, zeros=True)}x)" if told else ""
    return _mark(row) + significant(row["median_ms"], 4, zeros=True) + speedup


def _cells(report: Report, rows: Sequence[Row]) -> Iterator[str]:
    columns = cell_columns(report)
    table = [
        [_mark(row) * (column.name == "median_ms") + _field(row | measured(row), column) for column in columns]
        for row in rows
    ]
    yield from _folded(plural(len(rows), "cell"), [*markdown_table(map(_header, columns), table, _right(columns)), ""])


def _mark(row: Row) -> str:
    """The mark before a time that did not settle."""
    return in_markdown(UNSETTLED) if row["settled"] is False else ""


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


def _spreads(report: Report, rows: Sequence[Row]) -> Iterator[str]:
    if report.no_samples:
        yield from (f"Samples are not shown: {in_markdown(report.no_samples)}.", "")
        return
    yield from ("Bars: how many samples lie where between the lowest and the highest.", "")
    columns = spread_columns(report)
    table = []
    for row, spread in zip(rows, report.spreads, strict=False):
        if spread:
            values = row | spread.values
            drawn = [f"`{_bars(spread)}`", _medians(spread.medians)]
            table.append([*(_field(values, column) for column in columns), *drawn])
    header = [*map(_header, columns), "histogram", "medians of the rounds, ms"]
    yield from _folded(
        plural(len(table), "cell"), [*markdown_table(header, table, [*_right(columns), False, False]), ""]
    )


def _bars(spread: Spread) -> str:
    """A histogram in one line of text."""
    counts = [0] * BINS
    low = spread.values["low_ms"]
    width = (spread.values["high_ms"] - low) / BINS or 1.0
    for sample in chain(*spread.rounds):
        counts[min(int((sample - low) / width), BINS - 1)] += 1
    return sparkline(counts, 0, max(counts))


def _medians(medians: Sequence[float]) -> str:
    """The median of each round; of many rounds the lowest and the highest."""
    many = len(medians) > MOST_MEDIANS
    shown = (min(medians), max(medians)) if many else medians
    return (" to " if many else ", ").join(significant(median, 4, zeros=True) for median in shown)


def _environment(report: Report) -> Iterator[str]:
    for name, values in environment(report):
        shown = [
            in_markdown(value) + (f" ({plural(count, 'cell')})" if count and values[1:] else "")
            for value, count in values
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


def _header(column: ReportColumn) -> str:
    return f"{column.label} {column.unit}".strip()


def _field(row: Row, column: ReportColumn) -> str:
    value = row[column.name]
    if value is None or value == "":
        return ""
    if column.kind == "text":
        return in_markdown(str(value))
    if isinstance(value, int) and column.factor == 1:
        return f"{value:,}"
    text = significant(column.factor * value, column.digits, zeros=True)
    return f"{int(text):,}" if text.isdigit() else text


def _right(columns: Iterable[ReportColumn]) -> list[bool]:
    return [column.kind != "text" for column in columns]
