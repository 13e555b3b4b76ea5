"""The report as one HTML page."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from mtabench.charts.embedded import embedded_charts
from mtabench.pages.page import build_page, shown_text
from mtabench.report.data import Report, Row, command_of
from mtabench.results.columns import values_of

MOST_CELLS = 5000  # on the page; a sentence says if there are more
NO_DETAIL = ("schema_version", "reason", "repro")  # columns that the details of a cell leave out, or say otherwise
CHARTS = {"overhead": "Time over that of plain attention", "time": "Time", "speedup": "Speedup"}
SECTION = """
<section id="{name}-section" aria-labelledby="{name}-title">
<h2 id="{name}-title">{title}</h2>
<div id="{name}"></div>
</section>
"""
BODY = "".join(
    [
        '<p id="facts" class="quiet"></p>\n<dl id="figures" class="figures"></dl>\n<div id="notes"></div>\n',
        '<div id="filters" class="filters-sticky"></div>\n',
        *(SECTION.format(name=name, title=title) for name, title in CHARTS.items()),
        *(SECTION.format(name=title.lower(), title=title) for title in ("Summary", "Cells", "Commands")),
    ]
)


def html_page(report: Report) -> str:
    """The page."""
    scripts = ("table.js", "report-charts.js", "report.js")
    return build_page(report.title, BODY, page_data(report), scripts, styles=("report.css",))


def page_data(report: Report) -> dict[str, Any]:
    """What the page shows, in JSON's types."""
    notes, view = list(report.notes), report.view
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
        "charts": embedded_charts(report.cells, tuple(CHARTS)) if len(report.cells) else [],
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
