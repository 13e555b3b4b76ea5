"""A comparison as `--json` prints it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mtabench.comparing.across import Ratios
from mtabench.comparing.compare import VERDICTS, ComparedCell, Comparison
from mtabench.comparing.comparison_reports import conclusions, outcome
from mtabench.results.results_file import KEY_COLUMNS, NUMERIC_COLUMNS
from mtabench.results.runs import Cell, Run


def comparison_data(found: Comparison) -> dict[str, Any]:
    """Every cell with its verdict, and what the build makes of them."""
    return {
        "across_devices": False,
        "base": _run(found.base),
        "head": _run(found.head),
        "threshold": found.threshold,
        "fail_on": found.fail_on,
        "exit_code": found.exit_code,
        "outcome": outcome(found),
        "notes": list(conclusions(found))[:-1],
        "counts": {verdict: found.counts[verdict] for verdict in VERDICTS},
        "cells": [_compared(found, cell) for cell in found.cells],
    }


def ratios_data(found: Ratios) -> dict[str, Any]:
    """Every cell that both devices have a time of, with the ratio of the times."""
    return {
        "across_devices": True,
        "base": _run(found.base),
        "head": _run(found.head),
        "notes": found.notes,
        "means": [{"impl": impl, "ratio": mean, "cells": count} for impl, (mean, count) in found.means().items()],
        "cells": [
            {
                "name": one.base.name, "problem": _problem(one.base), "base_ms": one.base_ms, "head_ms": one.head_ms,
                "ratio": one.ratio, "ratio_low": one.low, "ratio_high": one.high,
            }
            for one in found.cells
        ],
    }  # fmt: skip


def _run(run: Run) -> dict[str, Any]:
    return {"file": run.path, "devices": sorted(run.values("device"))}


def _compared(found: Comparison, cell: ComparedCell) -> dict[str, Any]:
    base, head = (side.row["status"] if side else None for side in (cell.base, cell.head))
    return {
        "name": cell.name, "problem": _problem(cell.sides[-1]), "verdict": cell.verdict, "fails": found.fails(cell),
        "reason": cell.reason or None, "base_status": base, "head_status": head, "base_ms": cell.base_ms,
        "head_ms": cell.head_ms, "change": cell.change, "change_low": cell.low, "change_high": cell.high,
        "detectable": cell.detectable,
    }  # fmt: skip


def _problem(cell: Cell) -> dict[str, Any]:
    """What identifies the cell, by column, null where it has no such thing."""
    row: Mapping[str, Any] = cell.row
    values = {name: row[name] if row[name] != "" else None for name in KEY_COLUMNS}
    return {
        name: int(value) if name in NUMERIC_COLUMNS and value is not None and value == value else value
        for name, value in values.items()
    }
