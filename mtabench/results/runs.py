"""A results file and its raw samples, read whole and checked, so that it can be compared with another."""

from __future__ import annotations

import io
import math
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mtabench.errors import UsageError
from mtabench.escaping import quoted
from mtabench.prose import plural
from mtabench.results import fields
from mtabench.results.cell_names import name_of
from mtabench.results.columns import TABLE
from mtabench.results.csv_reading import plain_lines, read_csv
from mtabench.results.results_file import (
    KEY_COLUMNS,
    SAMPLE_COLUMNS,
    cell_of,
    find_samples,
    key_of_row,
    read_file,
    records,
)

if TYPE_CHECKING:
    import pandas as pd

# A line takes about 80 bytes: room for 1000 cells with 200 rounds of 10 samples each.
MOST_BYTES, MOST_SAMPLES = 160 << 20, 2_000_000
TIME_COLUMNS = ("rounds", "samples", "median_ms", "ci95_low_ms", "ci95_high_ms")
JUDGED = (*TIME_COLUMNS, "timer", "cache", "ci_target", "ci_typical", "run_delay")  # of what came out
ROW_COLUMNS = tuple(column.name for column in TABLE if column.role != "measured" or column.name in JUDGED)
SAMPLES_AGREE = 1e-4  # six digits are written

Rounds = tuple[tuple[float, ...], ...]


@dataclass(frozen=True, slots=True)
class Cell:
    """A row of ROW_COLUMNS, and its samples in ms by process and round; none unless its status is ok."""

    row: Mapping[str, Any]
    processes: tuple[Rounds, ...]

    @property
    def name(self) -> str:
        """What a person calls it."""
        return name_of(self.row)

    @property
    def rounds(self) -> Rounds:
        """The samples by round, of one process after the other."""
        return tuple(chain.from_iterable(self.processes))

    @property
    def ok(self) -> bool:
        """Whether it has a time that can be believed."""
        return self.row["status"] == "ok"

    @property
    def outcome(self) -> str:
        """Status and reason."""
        status, reason = self.row["status"], self.row["reason"]
        return f"{status}: {reason}" if reason else status


@dataclass(frozen=True, slots=True)
class Run:
    """A results file; cells by their key, in the order of its rows."""

    path: Path
    cells: Mapping[str, Cell]

    def values(self, column: str) -> set[str]:
        """What stands in a column of text, in any row."""
        return {cell.row[column] for cell in self.cells.values()}


def read_run(path: Path, samples_needed: bool = True) -> Run:
    """Read a results file and the samples beside it; without these only if they are not `samples_needed`.

    Raises UsageError, in one sentence, where anything is missing, cut off, given twice or at odds with the rest. A
    comparison of half a file would pass in silence.
    """
    file = read_file(path, with_rows=True)
    if file.torn:
        raise UsageError(f"{path} ends in the middle of a row; measure its last cells again with --resume")
    rows: dict[str, Mapping[str, Any]] = {}
    keys = zip(*(file.columns[name] for name in KEY_COLUMNS), strict=True)
    for key, record in zip(map(cell_of, keys), records(file.columns, ROW_COLUMNS), strict=True):
        if key in rows and rows[key]["device"] != record["device"]:
            raise UsageError(
                f"{path} has the cell {name_of(rows[key])} of several devices; take one of them: "
                f"mtabench results select {path} --where 'device={rows[key]['device'].replace(',', '*')}' --out ONE.csv"
            )
        if key in rows:
            raise UsageError(f"{path} has the cell {name_of(rows[key])} twice; a results file has one row a cell")
        rows[key] = record
    wanted = samples_needed or find_samples(path).exists()
    samples = read_samples(path) if wanted and any(row["status"] == "ok" for row in rows.values()) else {}
    cells = {}
    for key, row in rows.items():
        timed = row["status"] == "ok"
        ids = process_ids(row["run_id"]) if wanted and timed else []
        cells[key] = Cell(row, tuple(samples.get((run_id, key), ()) for run_id in ids))
        lacking = [name for name in TIME_COLUMNS if timed and not math.isfinite(row[name])]
        if lacking:
            raise UsageError(f"{path} has no number in the column {lacking[0]} for {key}, whose status is ok")
        if ids:
            _check_samples(path, key, row, cells[key].rounds)
    return Run(path, cells)


def process_ids(run_id: str) -> list[str]:
    """The runs of the processes that a row sums up: `mtabench ab` joins them with a plus sign."""
    return list(dict.fromkeys(run_id.split("+")))


def without_samples(results: Path, rows: Sequence[Mapping[str, str]]) -> list[Mapping[str, str]]:
    """The rows, as texts, whose times lack the raw samples beside the results file; raises UsageError."""
    timed = [row for row in rows if row["status"] == "ok"]
    if not timed or not find_samples(results).exists():
        return timed
    counts = {key: sum(map(len, rounds)) for key, rounds in read_samples(results).items()}

    def kept(row: Mapping[str, str]) -> int:
        return sum(counts.get((run_id, cell_of(key_of_row(row))), 0) for run_id in process_ids(row["run_id"]))

    return [row for row in timed if kept(row) != float(row["samples"] or "nan")]


def read_samples(results: Path) -> dict[tuple[str, str], Rounds]:
    """Samples in ms, by round, of each run and cell of a results file; raises UsageError."""
    import numpy as np

    table = _samples_table(results)
    codes = np.stack([table["run_id"].cat.codes, table["cell"].cat.codes, table["round"]])
    order = np.lexsort(codes[::-1])  # whatever lines lie between two parts of a round
    begins = np.diff(codes[:, order], prepend=-1) != 0
    lines = np.flatnonzero(begins.any(axis=0))  # the first of each round
    milliseconds = table["ms"].to_numpy()[order].tolist()
    rounds = [tuple(milliseconds[start:stop]) for start, stop in pairwise([*lines.tolist(), len(table)])]
    firsts = np.flatnonzero(begins[:2, lines].any(axis=0))  # the first round of each cell
    keys = zip(*(table[name].iloc[order[lines[firsts]]] for name in ("run_id", "cell")), strict=True)
    parts = pairwise([*firsts.tolist(), len(rounds)])
    return {key: tuple(rounds[start:stop]) for key, (start, stop) in zip(keys, parts, strict=True)}


def _samples_table(results: Path) -> pd.DataFrame:
    """The samples as pandas reads them, in a tenth of the time, if they are as mtabench writes them, or as checked."""
    import pandas as pd

    path = find_samples(results)
    kinds: dict[str, Any] = dict.fromkeys(SAMPLE_COLUMNS, "category") | {"round": int, "ms": float}
    try:
        text = io.BytesIO(plain_lines(path, MOST_BYTES))
        table = pd.read_csv(text, dtype=kinds, keep_default_na=False, nrows=MOST_SAMPLES + 1)
        in_range = table["ms"].between(fields.LEAST, fields.MOST).all() and (table["round"] > 0).all()
        if in_range and tuple(table) == SAMPLE_COLUMNS and len(table) <= MOST_SAMPLES:
            return table
    except (UsageError, ValueError, KeyError):
        pass
    lines = sample_records(results)  # which says what is wrong
    table = pd.DataFrame(lines, columns=list(SAMPLE_COLUMNS), dtype=str)
    return table.astype({"round": float, "ms": float}).astype(kinds)  # a spreadsheet's round may be 6.0


def sample_records(results: Path) -> Iterator[list[str]]:
    """The lines of the samples file beside a results file: checked texts under SAMPLE_COLUMNS; raises UsageError."""
    path = find_samples(results)
    if not path.exists():
        raise UsageError(
            f"there is no file {path}, the raw samples of {results}; put it there, or measure with --resume"
        )
    file = read_csv(path, MOST_BYTES, MOST_SAMPLES)
    if tuple(file.header) != SAMPLE_COLUMNS:
        raise UsageError(f"{path} is not a samples file of mtabench; expected the columns {', '.join(SAMPLE_COLUMNS)}")
    for number, record in enumerate(file.records, start=2):
        if not _is_sample(record):
            raise UsageError(f"line {number} of {path} is not a sample: {quoted(','.join(record))}")
        yield record


def samples_of(parts: Iterable[tuple[Path, Iterable[Mapping[str, str]]]]) -> Iterator[list[str]]:
    """The lines of the samples that rows of results files sum up, each once; raises UsageError."""
    seen: set[tuple[str, str]] = set()
    for path, rows in parts:
        names = {(one, cell_of(key_of_row(row))) for row in rows for one in process_ids(row["run_id"])} - seen
        seen |= names
        if names:
            yield from (record for record in sample_records(path) if (record[0], record[1]) in names)


def _is_sample(record: Sequence[str]) -> bool:
    try:
        return bool(fields.count(record[2]) and fields.positive(record[4]))
    except ValueError:
        return False


def _check_samples(path: Path, key: str, row: Mapping[str, Any], rounds: Rounds) -> None:
    """Raise UsageError unless the samples are those that the row sums up."""
    samples = list(chain.from_iterable(rounds))
    if (len(rounds), len(samples)) != (row["rounds"], row["samples"]):
        expected = f"{plural(int(row['samples']), 'sample')} in {plural(int(row['rounds']), 'round')}"
        there = f"{plural(len(samples), 'sample')} in {plural(len(rounds), 'round')}"
        raise UsageError(
            f"{find_samples(path)} has {there} of {key}, and {path} {expected}; "
            f"the sweep with --out {path} --resume measures that cell again"
        )
    median = statistics.median(samples)
    if not math.isclose(median, row["median_ms"], rel_tol=SAMPLES_AGREE):
        raise UsageError(
            f"{path} has the median {row['median_ms']:.6g} ms for {key}, and its samples have {median:.6g} ms"
        )
