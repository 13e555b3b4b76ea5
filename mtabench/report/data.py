"""A results file made ready to be shown: the view of its rows, the cells of its charts, commands that can be trusted.

A results file may come from a stranger. No path in it is opened, and a command in it is offered for measuring a cell
again only if it is one that mtabench itself writes.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pandas as pd

from mtabench.charts.data import read_cells
from mtabench.errors import UsageError
from mtabench.pages.page import MOST_CHARACTERS, shown_text
from mtabench.report.findings import Figure, figures, summary
from mtabench.results.result_view import View, make_view, up_to_rank
from mtabench.results.results_file import read_file

HIGHEST_RANK = 10  # of the columns shown
COMMAND = re.compile(
    r"mtabench (fwd|bwd|decode|model)"
    r"( --impl ([A-Za-z0-9_][A-Za-z0-9_.:+-]*=)?(\.{0,2}/)?[A-Za-z0-9_][A-Za-z0-9_./+-]*(\.py:[A-Za-z0-9_]+)?"
    r"| --(seq|head-dim|batch|heads|kv-heads|dtype|device|op|mix|conv|post-conv|norm|gate|splits|page-size"
    r"|timer|cache|rounds|time-limit|cell-timeout|seed|mode|layers|dim|attention) [A-Za-z0-9][A-Za-z0-9_.+/-]*"
    r"| --(causal|no-causal|isolate))*"
)

Row = Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Report:
    """The results file at `path` as it is shown.

    `rows` are texts by column, `view` is their table, and `cells` are what charts are drawn from, empty where charts
    cannot hold them; `figures` and `summary` say what they show. `notes` say what is not shown, and why.
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
