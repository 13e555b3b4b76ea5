"""The report as one HTML page."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from mtabench.charts.embedded import embedded_charts
from mtabench.errors import UsageError
from mtabench.pages.page import build_page
from mtabench.pages.text import shown_number, shown_text
from mtabench.report.columns import AXES, DETAILS, cell_columns, environment, measured, spread_columns
from mtabench.report.data import Report, Row, Spread, yardstick
from mtabench.report.sentences import Quote, computed, figures, summary

MOST_CELLS = 5000  # on the page; a sentence says if there are more
MOST_REASONS = 200
MOST_LABELS = 100  # of cells that failed for one reason
MOST_SAMPLES = 100_000  # of all cells together
MOST_SAMPLES_A_CELL = 400

CHARTS = ("overhead", "time", "speedup")

BODY = """
<p id="facts" class="quiet"></p>
<dl id="figures" class="figures"></dl>
<div id="notes"></div>

<div id="filters" class="filters-sticky"></div>

<section id="overhead-section" aria-labelledby="overhead-title">
<h2 id="overhead-title">Time over that of plain attention</h2>
<p id="overhead-words" class="quiet"></p>
<div id="overhead"></div>
</section>

<section id="time-section" aria-labelledby="time-title">
<h2 id="time-title">Time</h2>
<div id="time"></div>
</section>

<section id="speedup-section" aria-labelledby="speedup-title">
<h2 id="speedup-title">Speedup</h2>
<p id="speedup-words" class="quiet"></p>
<div id="speedup"></div>
</section>

<section aria-labelledby="summary-title">
<h2 id="summary-title">Summary</h2>
<ul id="summary" class="plain"></ul>
</section>

<section aria-labelledby="cells-title">
<h2 id="cells-title">Cells</h2>
<div id="cells"></div>
</section>

<section aria-labelledby="failed-title">
<h2 id="failed-title">What failed</h2>
<div id="failed"></div>
</section>

<section aria-labelledby="spread-title">
<h2 id="spread-title">Spread of the samples</h2>
<p id="spread-words" class="quiet"></p>
<div id="spread"></div>
</section>

<section aria-labelledby="environment-title">
<h2 id="environment-title">Environment</h2>
<dl id="environment"></dl>
</section>

<section aria-labelledby="repeat-title">
<h2 id="repeat-title">Measure again</h2>
<div id="repeat"></div>
</section>
"""


def html_page(report: Report) -> str:
    """The page."""
    scripts = ("table.js", "strip.js", "report-charts.js", "report.js")
    return build_page(title(report), BODY, page_data(report), scripts, styles=("report.css",))


def title(report: Report) -> str:
    """What the report is of, in a few words."""
    devices = list(dict.fromkeys(row["device"] for row in report.rows if row["device"]))
    where = f" on {', '.join(devices)}" if len(devices) in (1, 2) else ""
    return f"{report.name.removesuffix('.csv')}{where}"


def facts(report: Report, quote: Quote = str) -> str:
    """The file, when it was begun, and with which version; `quote` makes their texts safe."""
    first = min(row["started_utc"] for row in report.rows)
    versions = sorted({row["mtabench"] for row in report.rows if row["mtabench"]})
    named = [f"mtabench {quote(versions[0])}"] if len(versions) == 1 else []
    return " · ".join([quote(report.name), f"started {first[:10]} {first[11:16]} UTC", *named])


def page_data(report: Report) -> dict[str, Any]:
    """What the page shows, in JSON's types."""
    rows = list(report.rows[:MOST_CELLS])
    spreads = report.spreads[: len(rows)]
    a_cell = min(MOST_SAMPLES_A_CELL, max(1, MOST_SAMPLES // max(1, sum(spread is not None for spread in spreads))))
    charts, notes = _charts(report)
    if len(report.rows) > len(rows):
        notes.append(f"The page shows the first {len(rows):,} of {len(report.rows):,} cells; the summary is of all.")
    if any(spread and spread.values["samples"] > a_cell for spread in spreads):
        notes.append(f"Of each cell up to {a_cell:,} samples are drawn; the numbers beside them are of all.")
    return {
        "facts": facts(report),
        "figures": [asdict(one) for one in figures(report)],
        "yardstick": yardstick(report.rows),
        "computed": computed(report.rows),
        "summary": summary(report),
        "notes": notes,
        "columns": [asdict(column) for column in cell_columns(report)],
        "rate": report.rate,
        "spreadColumns": [asdict(column) for column in spread_columns(report)],
        "filters": report.varying(AXES),
        "charts": charts,
        "cells": _by_column([_cell(row, spread, a_cell) for row, spread in zip(rows, spreads, strict=True)]),
        "details": DETAILS,
        "failed": failures(report),
        "environment": environment(report),
        "noSamples": report.no_samples,
    }


def failures(report: Report) -> list[dict[str, Any]]:
    """Cells without a time to be believed, by status and reason, the most frequent first, each with its first cells."""
    groups: dict[tuple[str, str], list[str]] = defaultdict(list)
    for row in report.rows:
        if row["status"] != "ok":
            groups[row["status"], row["reason"]].append(row["label"])
    ordered = sorted(groups.items(), key=lambda group: (-len(group[1]), group[0]))[:MOST_REASONS]
    return [
        {"status": status, "reason": reason, "count": len(labels), "cells": labels[:MOST_LABELS]}
        for (status, reason), labels in ordered
    ]


def _charts(report: Report) -> tuple[list[dict[str, Any]], list[str]]:
    """The charts of the page, or a note that says why there are none."""
    try:
        return embedded_charts(report.path, CHARTS), []
    except UsageError as error:
        return [], [f"There are no charts: {shown_text(error)}."]


def _cell(row: Row, spread: Spread | None, most: int) -> Row:
    """A row of the page: what its tables and the points of its charts show."""
    shown = {"impl": row["impl"], "status": row["status"], "reason": row["reason"], "label": row["label"]}
    shown |= {name: row[name] for name in DETAILS} | measured(row)
    shown |= {name: row[name] for name in ("command", "settled")}
    if spread:
        shown["spread"] = {name: shown_number(value) for name, value in spread.values.items()}
        shown["drawn"] = [_thinned(samples, max(1, most // len(spread.rounds))) for samples in spread.rounds]
        shown["medians"] = spread.medians
    return shown


def _thinned(samples: Sequence[float], most: int) -> list[float]:
    """At most so many samples of a round, evenly among the sorted ones, the ends included."""
    if len(samples) <= most:
        return list(samples)
    ordered = sorted(samples)
    if most == 1:
        return [ordered[len(ordered) // 2]]
    return [ordered[number * (len(ordered) - 1) // (most - 1)] for number in range(most)]


def _by_column(rows: Sequence[Row]) -> dict[str, Any]:
    """Rows as one list of names and a list of values each, which takes a third of the room."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    return {"names": names, "rows": [[row.get(name) for name in names] for row in rows]}
