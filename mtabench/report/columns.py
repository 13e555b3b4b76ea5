"""The columns of the tables, the same on the page and in Markdown."""

from __future__ import annotations

from dataclasses import dataclass

from mtabench.report.data import Report, Row, Spread
from mtabench.results.columns import AXES as CELL_AXES
from mtabench.results.columns import TABLE, detail_place
from mtabench.results.shown import percent

# The cell; those that are the same in every row are left out.
AXES = (CELL_AXES[0], "device", *CELL_AXES[1:])
# In the details of a cell: what the table has no room for.
DETAILS = ("op", *AXES, *(column.name for column in sorted(TABLE, key=detail_place) if detail_place(column)))


@dataclass(frozen=True, slots=True)
class Column:
    """A column: the name of its value in a row, its header, and how it is shown."""

    name: str
    label: str
    unit: str = ""
    kind: str = "number"
    digits: int = 4


LABELS = {column.name: column.heading for column in TABLE if column.heading and column.role == "cell"}
TEXTS = ("pass", "device", "dtype", "conv", "causal", "splits")
IMPLEMENTATION = Column("impl", "implementation", kind="text")
REPORTED = {one.reported.name or one.name: one.reported for one in TABLE if one.reported}
MEASURED = tuple(Column(name, one.label, one.unit, digits=one.digits) for name, one in REPORTED.items())
STATUS = Column("status", "status", kind="text")
SPREAD = (
    Column("median_ms", "median", "ms"),
    Column("low_ms", "lowest", "ms"),
    Column("high_ms", "highest", "ms"),
    Column("spread_percent", "p10 to p90", "%", digits=2),
    Column("drift_percent", "between rounds", "%", digits=2),
    Column("rounds", "rounds"),
    Column("samples", "samples"),
)

# What tells where and with what a file was measured, and what its cells have in common.
ENVIRONMENT = (
    *(column.name for column in TABLE if column.role == "environment"), "run_id", "timer", "cache", "baseline",
)  # fmt: skip
MOST_VALUES = 20  # of a fact about the environment


def axis_columns(report: Report) -> list[Column]:
    """The columns that say which cell a row is: those in which rows differ, and always the sequence length."""
    varying = report.varying(AXES)
    return [
        Column(axis, LABELS.get(axis, axis), kind="text" if axis in TEXTS else "number")
        for axis in AXES
        if axis in varying or axis == "seq"
    ]


def measured_columns(report: Report) -> list[Column]:
    """The columns of what was measured, those without any value left out."""
    shown = [measured(row) for row in report.rows]
    return [column for column in MEASURED if any(row[column.name] is not None for row in shown)]


def measured(row: Row) -> Row:
    """The values under MEASURED. Half the 95 % interval of the median, and the roofline, in percent."""
    return {name: one.value(row) if one.value else row[name] for name, one in REPORTED.items()}


def spread_values(row: Row, spread: Spread) -> Row:
    """The values under SPREAD."""
    return {
        "median_ms": row["median_ms"],
        "low_ms": spread.low,
        "high_ms": spread.high,
        "spread_percent": percent(spread.spread),
        "drift_percent": percent(spread.drift),
        "rounds": len(spread.rounds),
        "samples": spread.count,
    }


def environment(report: Report) -> list[tuple[str, list[tuple[str, int]]]]:
    """Each fact, with its first values and how many cells have them; axes that all cells share come last."""
    varying = report.varying(AXES)
    shared = [axis for axis in AXES if axis not in varying and axis not in (*ENVIRONMENT, "seq")]
    found = []
    for name in (*ENVIRONMENT, *shared):
        counts: dict[str, int] = {}
        for row in report.rows:
            if row[name] not in (None, ""):
                counts[str(row[name])] = counts.get(str(row[name]), 0) + (name not in shared)
        if counts:
            values = list(counts.items())
            more = [(f"and {len(values) - MOST_VALUES:,} more", 0)] if len(values) > MOST_VALUES else []
            found.append((LABELS.get(name, name.replace("_", " ")), values[:MOST_VALUES] + more))
    return found
