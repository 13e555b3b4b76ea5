"""Results files of processes measured in pairs, put together into one of the base and one of the head.

Each cell has one row, over the samples of all its processes; its `run_id` joins theirs with plus signs, by which the
samples, which keep theirs, are found and told apart.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mtabench.measuring.statistics import geometric_mean, summarize
from mtabench.results.results_file import MEASURED_COLUMNS, NUMERIC_COLUMNS, Key, key_of_row, read_file, samples_path
from mtabench.results.runs import Run, cell_names, name_of, process_ids, read_run, sample_records
from mtabench.results.writer import Writer

FEWEST = 2  # pairs without which nothing is known of the noise between them
FAILED = ("wrong", "error", "oom", "timeout", "unsupported")  # the gravest first
SUMMARY = ("median_ms", "p10_ms", "p90_ms", "ci95_low_ms", "ci95_high_ms")
PER_TIME = ("useful_tflops", "executed_tflops", "gbytes_s", "fraction_of_roofline")
# How the other numbers of processes become one; those that are not here become their median.
COMBINED: Mapping[str, Callable[[list[float]], float]] = {
    "rounds": sum,
    "samples": sum,
    "speedup": geometric_mean,
    "peak_memory_mb": max,
    "run_delay": max,
    "rel_error": max,
}
OTHERS = tuple(name for name in MEASURED_COLUMNS if name in NUMERIC_COLUMNS and name not in (*SUMMARY, *PER_TIME))

Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class _Process:
    """The results file of a process: its rows as texts, and its run."""

    path: Path
    rows: Mapping[Key, Row]
    run: Run


def merge(pairs: Sequence[tuple[Path, Path]], base: Path, head: Path) -> list[str]:
    """Write the results files of pairs of processes as one at `base` and one at `head`, with their samples.

    Files that are there are replaced: they are what a call with fewer pairs wrote. A cell that failed in any process of
    a side has failed. Pairs in which a cell was `invalid` on either side are left out of it, which the sentences
    returned say, and if that leaves fewer than two the cell is `invalid`.
    """
    sides = [[_read(path) for path in paths] for paths in zip(*pairs, strict=True)]
    keys = dict.fromkeys(key for side in sides for process in side for key in process.rows)
    merged: list[dict[Key, Row]] = [{}, {}]
    notes = []
    for key in keys:
        measured = [two for two in zip(*sides, strict=True) if any(key in process.rows for process in two)]
        kept = [two for two in measured if "invalid" not in [_status(process, key) for process in two]]
        for number, rows in enumerate(merged):
            row = _merged_row([two[number] for two in measured], [two[number] for two in kept], key)
            if row is not None:
                rows[key] = row
        if len(kept) < len(measured) and any(rows[key]["status"] == "ok" for rows in merged if key in rows):
            name = next(name_of(process.run.cells["/".join(key)].row) for process in measured[0] if key in process.rows)
            notes.append(f"{name}: invalid in {len(measured) - len(kept)} of {len(measured)} pairs, which are left out")
    for path, side, rows in zip((base, head), sides, merged, strict=True):
        for old in (path, samples_path(path)):
            old.unlink(missing_ok=True)
        with Writer(path) as writer:
            writer.write(list(rows.values()), _samples(side, rows))
    return notes


def _read(path: Path) -> _Process:
    return _Process(path, {key_of_row(row): row for row in read_file(path).rows()}, read_run(path))


def _status(process: _Process, key: Key) -> str:
    return process.rows[key]["status"] if key in process.rows else ""


def _merged_row(measured: Sequence[_Process], kept: Sequence[_Process], key: Key) -> Row | None:
    """The row of a cell on one side, from the processes that measured it and those that may count."""
    rows = [process.rows[key] for process in measured if key in process.rows]
    for status in FAILED:
        if any(row["status"] == status for row in rows):
            return _in_some(status, rows)
    kept = [process for process in kept if key in process.rows]
    if len(kept) >= FEWEST:
        return _summed(kept, key)
    if any(row["status"] == "invalid" for row in rows):
        return _in_some("invalid", rows)
    # On the other side it was, in too many pairs.
    return {**rows[0], "status": "invalid", "reason": "too few pairs have a time in both"} if rows else None


def _in_some(status: str, rows: Sequence[Row]) -> Row:
    """The first row of that status, saying in how many processes it was so if not in all."""
    chosen = [row for row in rows if row["status"] == status]
    share = "" if len(chosen) == len(rows) else f"in {len(chosen)} of {len(rows)} processes: "
    return {**chosen[0], "reason": share + chosen[0]["reason"]}


def _summed(processes: Sequence[_Process], key: Key) -> Row:
    """One row for a cell with a time in several processes; its interval is by bootstrap over whole processes."""
    rows = [process.rows[key] for process in processes]
    cells = [process.run.cells["/".join(key)] for process in processes]
    summary = summarize([[ms for samples in cell.rounds for ms in samples] for cell in cells])
    found: Row = {
        **rows[0],
        "run_id": "+".join(row["run_id"] for row in rows),
        "started_utc": min(row["started_utc"] for row in rows),
        **{name: getattr(summary, name) for name in SUMMARY},
    }
    for name in PER_TIME:
        if rows[0][name]:
            found[name] = float(rows[0][name]) * float(rows[0]["median_ms"]) / summary.median_ms
    for name in OTHERS:
        numbers = [float(row[name]) for row in rows if row[name]]
        if numbers:
            found[name] = COMBINED.get(name, statistics.median)(numbers)
    return found


def _samples(processes: Sequence[_Process], rows: Mapping[Key, Row]) -> Iterator[list[str]]:
    """The lines of the samples that the merged rows sum up."""
    used = {
        (run_id, name)
        for key, row in rows.items()
        if row["status"] == "ok"
        for run_id in process_ids(row["run_id"])
        for name in cell_names("/".join(key))
    }
    for process in processes:
        if any(run_id in process.run.values("run_id") for run_id, _ in used):
            yield from (record for record in sample_records(process.path) if (record[0], record[1]) in used)
