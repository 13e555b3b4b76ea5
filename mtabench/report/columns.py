"""The columns of the tables, the same on the page and in Markdown."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace

from mtabench.problem.operations import STEPS
from mtabench.report.data import Report, Row
from mtabench.results.columns import AXES as CELL_AXES
from mtabench.results.columns import TABLE, detail_place

# The cell; those that are the same in every row are left out.
AXES = (CELL_AXES[0], "device", *CELL_AXES[1:])
# In the details of a cell: what the table has no room for.
DETAILS = ("op", *AXES, *(column.name for column in sorted(TABLE, key=detail_place) if detail_place(column)))


@dataclass(frozen=True, slots=True)
class ReportColumn:
    """A column: the name of its value in a row, its header, and how it is shown: `factor` times the value."""

    name: str
    label: str
    unit: str = ""
    kind: str = "number"
    digits: int = 4
    factor: float = 1.0


LABELS = {column.name: column.heading for column in TABLE if column.heading and column.role == "cell"}
LABELS["post_conv"] = "post conv"
KINDS = dict.fromkeys(("pass", "device", "dtype", *STEPS, "causal", "splits"), "text")
IMPLEMENTATION = ReportColumn("impl", "implementation", kind="text")
REPORTED = {one.reported.name or one.name: one.reported for one in TABLE if one.reported}
MEASURED = tuple(ReportColumn(name, one.label, one.unit, digits=one.digits) for name, one in REPORTED.items())
STATUS = ReportColumn("status", "status", kind="text")
SPREAD = (
    ReportColumn("median_ms", "median", "ms"),
    ReportColumn("low_ms", "lowest", "ms"),
    ReportColumn("high_ms", "highest", "ms"),
    ReportColumn("spread_percent", "p10 to p90", "%", digits=2),
    ReportColumn("drift_percent", "between rounds", "%", digits=2),
    ReportColumn("rounds", "rounds"),
    ReportColumn("samples", "samples"),
)

# What tells where and with what a file was measured, and what its cells have in common.
ENVIRONMENT = (
    *(column.name for column in TABLE if column.role == "environment"), "run_id", "timer", "cache", "baseline",
)  # fmt: skip
MOST_VALUES = 20  # of a fact about the environment


def cell_columns(report: Report) -> list[ReportColumn]:
    """The columns of the table of cells, rates in the unit that suits them; what has no value at all is left out."""
    shown, (unit, factor) = [measured(row) for row in report.rows], report.rate
    known = [
        replace(column, label=unit, factor=factor) if column.label == "TFLOP/s" else column
        for column in MEASURED
        if any(row[column.name] is not None for row in shown)
    ]
    return [*_key_columns(report), *known, STATUS]


def spread_columns(report: Report) -> list[ReportColumn]:
    """The columns of the table of spreads."""
    return [*_key_columns(report), *SPREAD]


def _key_columns(report: Report) -> list[ReportColumn]:
    """The columns that say which cell a row is: those in which rows differ, and always the sequence length."""
    varying = report.varying(AXES)
    axes = [axis for axis in AXES if axis in varying or axis == "seq"]
    return [
        IMPLEMENTATION,
        *(ReportColumn(axis, LABELS.get(axis, axis), kind=KINDS.get(axis, "number")) for axis in axes),
    ]


def measured(row: Row) -> Row:
    """The values under MEASURED. Half the 95 % interval of the median, and the roofline, in percent."""
    return {name: one.value(row) if one.value else row[name] for name, one in REPORTED.items()}


def environment(report: Report) -> list[tuple[str, list[tuple[str, int]]]]:
    """Each fact, with its first values and how many cells have them; axes that all cells share come last."""
    varying = report.varying(AXES)
    shared = [axis for axis in AXES if axis not in varying and axis not in (*ENVIRONMENT, "seq")]
    found = []
    for name in (*ENVIRONMENT, *shared):
        counts = Counter(str(row[name]) for row in report.rows if row[name] not in (None, ""))
        if counts:
            values = [(value, 0 if name in shared else count) for value, count in counts.items()]
            more = [(f"and {len(values) - MOST_VALUES:,} more", 0)] if len(values) > MOST_VALUES else []
            found.append((LABELS.get(name, name.replace("_", " ")), values[:MOST_VALUES] + more))
    return found
