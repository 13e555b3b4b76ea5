"""Results files of processes measured in pairs, put together into one of the base and one of the head.

Each cell has one row, over the samples of all its processes; its `run_id` joins theirs with plus signs, by which the
samples, which keep theirs, are found and told apart.
"""

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mtabench.measuring.statistics import Summary, geometric_mean, summarize
from mtabench.results.columns import TABLE, Merged
from mtabench.results.results_file import Key, cell_of, key_of_row, read_file, samples_path
from mtabench.results.runs import Run, process_ids, read_run, samples_of
from mtabench.results.writer import Writer

FEWEST = 2  # pairs without which nothing is known of the noise between them
FAILED = ("wrong", "error", "oom", "timeout", "unsupported")  # the gravest first
# How the numbers of processes become one.
COMBINED: Mapping[Merged, Callable[[list[float]], float]] = {
    "sum": sum, "geometric mean": geometric_mean, "largest": max, "median": statistics.median,
}  # fmt: skip

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
    sides = [
        [_Process(path, {key_of_row(row): row for row in read_file(path).rows()}, read_run(path)) for path in paths]
        for paths in zip(*pairs, strict=True)
    ]
    keys = dict.fromkeys(key for side in sides for process in side for key in process.rows)
    merged: list[dict[Key, Row]] = [{}, {}]
    notes = []
    for key in keys:
        measured = [two for two in zip(*sides, strict=True) if any(key in process.rows for process in two)]
        kept = [two for two in measured if not any(one.rows.get(key, {}).get("status") == "invalid" for one in two)]
        for number, rows in enumerate(merged):
            row = _merged_row([two[number] for two in measured], [two[number] for two in kept], key)
            if row is not None:
                rows[key] = row
        if len(kept) < len(measured) and any(rows[key]["status"] == "ok" for rows in merged if key in rows):
            name = next(process.run.cells[cell_of(key)].name for process in measured[0] if key in process.rows)
            notes.append(f"{name}: invalid in {len(measured) - len(kept)} of {len(measured)} pairs, which are left out")
    for path, side, rows in zip((base, head), sides, merged, strict=True):
        for old in (path, samples_path(path)):
            old.unlink(missing_ok=True)
        with Writer(path) as writer:
            timed = {key: process_ids(row["run_id"]) for key, row in rows.items() if row["status"] == "ok"}
            parts = [
                (process.path, [row for key, row in process.rows.items() if row["run_id"] in timed.get(key, ())])
                for process in side
            ]
            writer.write(list(rows.values()), samples_of(parts))
    return notes


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
    cells = [process.run.cells[cell_of(key)] for process in processes]
    summary = summarize([[ms for samples in cell.rounds for ms in samples] for cell in cells])
    found = dict(rows[0])
    for column in TABLE:
        how = column.merged or ("median" if column.role == "measured" and column.field.numeric else "first")
        found[column.name] = _merged(column.name, how, rows, summary)
    return found


def _merged(name: str, how: Merged, rows: Sequence[Row], summary: Summary) -> Any:
    """What stands in a column of the one row that takes the place of several."""
    known = [row[name] for row in rows if row[name]]
    match how:
        case "summary":
            return getattr(summary, name)
        case "joined":
            return "+".join(row[name] for row in rows)
        case "least":
            return min(row[name] for row in rows)
        case "per time" if rows[0][name]:
            return float(rows[0][name]) * float(rows[0]["median_ms"]) / summary.median_ms
        case _ if how in COMBINED and known:
            return COMBINED[how](list(map(float, known)))
    return rows[0][name]
