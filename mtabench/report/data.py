"""The page of one results file: the view of its rows, its charts and what they state, commands that can be trusted.

A results file may come from a stranger. The report opens no path in it. It offers a command for measuring a cell again
only if it is one that mtabench itself writes.
"""

import io
import re
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import matplotlib as mpl
import pandas as pd

from mtabench.charts import KINDS, charts_of
from mtabench.charts.chart import PASS_TITLES, Chart, make_figure
from mtabench.charts.data import baseline_name, one_line_each, read_cells, settings
from mtabench.charts.findings import longest, mean, mean_half, paired, place, plain, subject, yardstick
from mtabench.charts.kinds.speedup import rated
from mtabench.charts.style import HTML, Look, applied, in_css, styles_of
from mtabench.charts.text import TIMES, factor, milliseconds, shortened
from mtabench.errors import UsageError
from mtabench.pages.page import MOST_CHARACTERS, build_page, shown_text
from mtabench.prose import plural
from mtabench.results.columns import values_of
from mtabench.results.result_view import View, make_view, up_to_rank
from mtabench.results.results_file import read_file

MOST_FIGURES = 3
MOST_SENTENCES = 20
HIGHEST_RANK = 10  # of the columns shown
COMMAND = re.compile(
    r"mtabench (fwd|bwd|decode|model)"
    r"( --impl ([A-Za-z0-9_][A-Za-z0-9_.:+-]*=)?(\.{0,2}/)?[A-Za-z0-9_][A-Za-z0-9_./+-]*(\.py:[A-Za-z0-9_]+)?"
    r"| --(seq|head-dim|batch|heads|kv-heads|dtype|device|op|mix|conv|post-conv|norm|gate|splits|page-size"
    r"|timer|cache|rounds|time-limit|cell-timeout|seed|mode|layers|dim|attention) [A-Za-z0-9][A-Za-z0-9_.+/-]*"
    r"| --(causal|no-causal|isolate))*"
)

Row = Mapping[str, str]
MOST_CELLS = 5000  # on the page; a sentence says if there are more
NO_DETAIL = ("schema_version", "reason", "repro")  # columns that the details of a cell leave out, or say otherwise
SECTION = """
<section id="{name}-section" aria-labelledby="{name}-title">
<h2 id="{name}-title">{title}</h2>
<div id="{name}"></div>
</section>
"""
HEAD = """<p id="facts" class="quiet"></p>
<dl id="figures" class="figures"></dl>
<div id="notes"></div><div id="filters" class="filters-sticky"></div>
"""
SVG, XLINK = "http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink"
FONT = "system-ui, 'DejaVu Sans', sans-serif"


@dataclass(frozen=True, slots=True)
class Figure:
    """A number with its unit, what it is, and its 95 % interval, such as `± 2 %`; empty for counts."""

    value: str
    words: str
    interval: str = ""


def summary(cells: pd.DataFrame) -> list[str]:
    """What the charts of these cells state. Raises UsageError where a chart would be too large."""
    found = []
    for name, kind in KINDS.items():
        for stem, chart in charts_of(cells, name, kind):
            setting = stem.partition(name)[2].removeprefix("-")
            if any(map(str.isdigit, chart.title)):  # one without a number claims nothing
                found.append(chart.title + (f" ({setting})" if setting else ""))
    told = [text.replace("\N{NO-BREAK SPACE}", " ") for text in dict.fromkeys(found)]
    more = len(told) - MOST_SENTENCES
    return told if more <= 0 else [*told[:MOST_SENTENCES], f"and {plural(more, 'more finding')}, in the charts of plot"]


def figures(all_cells: pd.DataFrame) -> list[Figure]:
    """At most three: what the fastest costs over plain attention, its speedup, or else a time; and what is valid.

    Sentences about times are of the pass and setting with the most cells, and of no implementation with a wrong cell.
    """
    timed = all_cells[all_cells["status"] == "ok"]
    cells = max(_parts(all_cells), key=len)
    head = f"{PASS_TITLES[cells['pass'].iloc[0]]}: " if all_cells["pass"].nunique() > 1 else ""
    wrong = set(cells.loc[cells["status"] == "wrong", "impl"])
    found = [replace(one, words=head + one.words) for one in _of_times(cells[~cells["impl"].isin(wrong)])]
    marked = f"; {timed['unsettled'].sum():,} did not settle" if timed["unsettled"].any() else ""
    valid = Figure(f"{len(timed):,} of {len(all_cells):,}", f"cells with a valid time{marked}")
    return [*found[: MOST_FIGURES - 1], valid]


def _parts(cells: pd.DataFrame) -> Iterator[pd.DataFrame]:
    """The cells of each pass and setting, of each implementation the cells of one line."""
    for pass_ in PASS_TITLES:
        for _, setting in settings(cells[cells["pass"] == pass_]):
            yield one_line_each(setting)


def _of_times(cells: pd.DataFrame) -> Iterator[Figure]:
    own, other = subject(cells), yardstick(cells)
    over = paired(cells, own, other)
    if len(over):
        yield _ratio(over, plain(other, cells), own)
    own = own or other
    base, shapes = baseline_name(cells), rated(cells)
    shapes = shapes[shapes["impl"] == own]
    if len(shapes) and base != other:  # the baseline of a model is plain attention itself
        yield _ratio(shapes, base, own)
    timed = longest(cells[(cells["impl"] == own) & (cells["status"] == "ok")])
    if len(timed):
        shape = timed.loc[[timed["median_ms"].idxmin()]]
        ms, half = shape[["median_ms", "half"]].iloc[0]
        yield Figure(milliseconds(ms, half), f"{shortened(own)} at {place(shape, cells)}", _interval(half))


def _ratio(shapes: pd.DataFrame, other: str, own: str) -> Figure:
    """The geometric mean of ratios of times, as a number of at least 1."""
    ratio, half = mean(shapes), mean_half(shapes)
    words = f"as fast as {other}" if ratio > 1 else f"as long as {other}"
    of = f"geometric mean of {len(shapes):,} shapes" if len(shapes) > 1 else "one shape"
    value = factor(max(ratio, 1 / ratio), half)
    return Figure(f"{value}{TIMES}", f"{words}: {shortened(own)}, {of}", _interval(half))


def _interval(half: float) -> str:
    return f"± {100 * half:.2g} %" if half else ""


@dataclass(frozen=True, slots=True)
class Report:
    """The results file at `path` as it is shown.

    `rows` are texts by column, and `view` is their table. Charts are drawn from `cells`, which are empty where charts
    cannot hold them. `figures` and `summary` say what charts show. `notes` say what is not shown, and why.
    """

    path: Path
    rows: Sequence[Row]
    view: View
    cells: pd.DataFrame
    figures: Sequence[Figure]
    summary: Sequence[str]
    notes: Sequence[str]

    @property
    def title(self) -> str:
        """What the report is of, in a few words."""
        devices = list(dict.fromkeys(shown_text(row["device"]) for row in self.rows if row["device"]))
        where = f" on {', '.join(devices)}" if len(devices) in (1, 2) else ""
        return f"{shown_text(self.path.name).removesuffix('.csv')}{where}"


def read_report(path: Path) -> Report:
    """Read a results file. Raises UsageError where `read_file` does."""
    rows = read_file(path, with_rows=True).rows()
    view, notes = make_view(rows), []
    try:
        cells = read_cells([path])
        numbers, sentences = figures(cells), summary(cells)
    except UsageError as error:
        cells, numbers, sentences = pd.DataFrame(), [], []
        notes.append(shown_text(f"There are no charts: {error}.", most=1000))
    view = up_to_rank(replace(view, reasons=tuple(map(shown_text, view.reasons))), HIGHEST_RANK)
    return Report(path, rows, view, cells, numbers, sentences, notes)


def command_of(row: Row) -> str:
    """What measures a row's cell again, or nothing where the file has no command that mtabench would write."""
    known = len(row["repro"]) <= MOST_CHARACTERS and COMMAND.fullmatch(row["repro"])
    return row["repro"] if known else ""


def html_page(report: Report) -> str:
    """The page."""
    scripts = ("table.js", "report-charts.js", "report.js")
    data = page_data(report)
    headings = {name: KINDS[name].heading for name in data["kinds"]}
    headings |= {heading.lower(): heading for heading in ("Summary", "Cells", "Commands")}
    body = HEAD + "".join(SECTION.format(name=name, title=heading) for name, heading in headings.items())
    return build_page(report.title, body, data, scripts, styles=("report.css",))


def page_data(report: Report) -> dict[str, Any]:
    """What the page shows, in JSON's types."""
    notes, view = list(report.notes), report.view
    kinds = [name for name, kind in KINDS.items() if kind.heading]
    if len(report.rows) > MOST_CELLS:
        notes.append(f"The page shows the first {MOST_CELLS:,} of {len(report.rows):,} cells; the summary is of all.")
    return {
        "facts": [f"{shown_text(report.path.name)}: {view.cells}", " · ".join(view.setting), " · ".join(view.device)],
        "figures": [asdict(one) for one in report.figures],
        "summary": report.summary,
        "notes": notes,
        "columns": [
            {
                "name": column.source,
                "label": column.name,
                "unit": column.unit,
                "kind": "number" if column.right else "text",
                "filtered": column.problem or column.source == "status",
            }
            for column in view.columns
        ],
        "kinds": kinds,
        "charts": embedded_charts(report.cells, kinds) if len(report.cells) else [],
        "cells": _by_column([_cell(report, number) for number in range(min(len(report.rows), MOST_CELLS))]),
        "legends": [f"{column.name}: {column.legend}" for column in view.columns if column.legend],
    }


def _cell(report: Report, number: int) -> dict[str, Any]:
    """A row of the page: what its table shows, and the values by which that is sorted and filtered."""
    row: Row = report.rows[number]
    values = {name: shown_text(value) if isinstance(value, str) else value for name, value in values_of(row).items()}
    found = {name: value for name, value in values.items() if name not in NO_DETAIL}
    texts = [column.texts[number] for column in report.view.columns]
    for column, text in zip(report.view.columns, texts, strict=True):
        if column.problem and not isinstance(found.get(column.source), int):
            found[column.source] = text
    return found | {"texts": texts, "reason": shown_text(row["reason"]), "command": command_of(row)}


def _by_column(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Rows as one list of names and a list of values each, which takes a third of the room."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    return {"names": names, "rows": [[row.get(name) for name in names] for row in rows]}


def embedded_charts(cells: pd.DataFrame, kinds: Sequence[str]) -> list[dict[str, Any]]:
    """The charts of these kinds that `read_cells` of one file gives, in JSON's types.

    Of each its kind, title and caption, and of each panel the title and the picture. In a picture, `data-rows` of an
    element are the rows of the results file that it shows, and `data-row` the one.
    """
    look = Look(HTML, styles_of(zip(cells["impl"], cells["op"] == "attention", strict=True)))
    found: list[dict[str, Any]] = []
    for name in kinds:
        for stem, chart in charts_of(cells, name, KINDS[name]):
            caption = [" · ".join(parts) for parts in chart.caption]
            panels = [
                {"title": panel.title, "svg": _picture(chart, panel, look, f"{stem}-{number}")}
                for number, panel in enumerate(chart.panels)
            ]
            found.append({"kind": name, "title": chart.title, "caption": caption, "panels": panels})
    return found


def _picture(chart: Chart, panel: Any, look: Look, name: str) -> str:
    """One panel without its title. `name` keeps the names inside apart from names in other pictures on the page."""
    alone = replace(chart, title="", caption=[], panels=[panel])
    file = io.BytesIO()
    with applied(HTML), mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": name}):
        make_figure(alone, look).savefig(file, format="svg", transparent=True, metadata={"Date": None})
    root = ElementTree.fromstring(file.getvalue())
    for unwanted in (f"{{{SVG}}}metadata", f"{{{SVG}}}style"):
        for parent in list(root.iter()):
            for child in parent.findall(unwanted):
                parent.remove(child)
    for element in root.iter():
        kind, *rows = element.get("id", "").split(" ")
        if kind not in ("rows", "points"):
            continue
        del element.attrib["id"]
        element.set("data-rows", " ".join(rows))
        if kind == "points":
            for use, row in zip(element.iter(f"{{{SVG}}}use"), rows, strict=True):
                use.set("data-row", row)
    for text in root.iter(f"{{{SVG}}}text"):
        text.set("style", text.get("style", "").replace("'DejaVu Sans'", FONT))
    root.attrib |= {"role": "img", "aria-label": panel.title}
    for size in ("width", "height"):
        del root.attrib[size]
    ElementTree.register_namespace("", SVG)
    ElementTree.register_namespace("xlink", XLINK)
    return in_css(ElementTree.tostring(root, encoding="unicode"))
