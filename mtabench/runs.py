"""A results file and its raw samples, read whole and checked, so that it can be compared with another."""

from __future__ import annotations

import csv
import io
import math
import statistics
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mtabench.errors import UsageError
from mtabench.results import KEY_COLUMNS, SAMPLE_COLUMNS, STATUSES, read_results, samples_path, text_of

COUNTS = ("batch", "heads", "kv_heads", "seq", "head_dim")
TIMED = ("rounds", "samples", "median_ms", "ci95_low_ms", "ci95_high_ms")
SAMPLES_AGREE = 1e-4  # six digits are written

Rounds = tuple[tuple[float, ...], ...]


@dataclass(frozen=True, slots=True)
class Cell:
    """A row, what a person calls it, and its samples in ms by round; none unless its status is ok."""

    name: str
    row: Mapping[str, Any]
    rounds: Rounds

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


def read_run(path: Path) -> Run:
    """Read a results file and the samples beside it.

    Raises UsageError, in one sentence, where anything is missing, cut off, given twice or at odds with the rest: a
    comparison of half a file would pass in silence.
    """
    table = read_results(path)
    if not path.read_bytes().endswith(b"\n"):
        raise UsageError(f"{path} ends in the middle of a row; measure its last cells again with --resume")
    rows: dict[str, Mapping[str, Any]] = {}
    for record in table.to_dict("records"):
        row: Mapping[str, Any] = {str(name): value for name, value in record.items()}
        key = _key(path, row)
        if key in rows:
            raise UsageError(f"{path} has the cell {key} twice; a results file has one row a cell")
        if row["status"] not in STATUSES:
            raise UsageError(f"{path} has the status {row['status']!r} for {key}; expected {', '.join(STATUSES)}")
        rows[key] = row
    samples = _read_samples(path) if any(row["status"] == "ok" for row in rows.values()) else {}
    cells = {}
    for key, row in rows.items():
        found = samples.get((row["run_id"], key)) or samples.get((row["run_id"], _without_splits(key)), ())
        rounds = found if row["status"] == "ok" else ()
        if row["status"] == "ok":
            _check_samples(path, key, row, rounds)
        cells[key] = Cell(name_of(row), row, rounds)
    return Run(path, cells)


def name_of(row: Mapping[str, Any]) -> str:
    """A cell in words, the same in every report."""
    heads, kv_heads = int(row["heads"]), int(row["kv_heads"])
    grouped = f" (KV {kv_heads})" if kv_heads != heads else ""
    taps = "" if math.isnan(row["conv_q"]) else f" conv {int(row['conv_q'])}x{int(row['conv_k'])}"
    causal = "" if row["causal"] else " not causal"
    splits = f" splits {row['splits']}" if row["splits"] else ""
    return (
        f"{row['pass']} {row['impl']}{splits} {row['dtype']} batch {int(row['batch'])} heads {heads}{grouped} "
        f"seq {int(row['seq'])} head dim {int(row['head_dim'])}{taps}{causal}"
    )


def _key(path: Path, row: Mapping[str, Any]) -> str:
    """What the samples file calls the cell."""
    for name in COUNTS:
        if not (math.isfinite(row[name]) and row[name] > 0):
            raise UsageError(f"{path} has a row without a number in the column {name}")
    texts = []
    for name in KEY_COLUMNS:
        value = row[name]
        whole = isinstance(value, float) and math.isfinite(value)
        texts.append(text_of(int(value) if whole else value))
    return "/".join(texts)


def _without_splits(key: str) -> str:
    """The key of a cell in files from before splits could be swept."""
    return key.rpartition("/")[0] + "/"


def _read_samples(results: Path) -> dict[tuple[str, str], Rounds]:
    """Samples in ms, by round, of each run and cell."""
    path = samples_path(results)
    if not path.exists():
        raise UsageError(f"there is no file {path}, the raw samples of {results}; compare needs both, side by side")
    try:
        text = path.read_bytes().decode()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"cannot read {path} as a CSV file: {error}") from error
    lines = csv.reader(io.StringIO(text[: text.rfind("\n") + 1], newline=""))
    if tuple(next(lines, ())) != SAMPLE_COLUMNS:
        raise UsageError(f"{path} is not a samples file of mtabench; expected the columns {', '.join(SAMPLE_COLUMNS)}")
    found: dict[tuple[str, str], dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    for number, line in enumerate(lines, start=2):
        try:
            run_id, cell, round_, _, milliseconds = line
            sample = float(milliseconds)
            if not (math.isfinite(sample) and sample > 0):
                raise ValueError
            found[run_id, cell][int(round_)].append(sample)
        except ValueError:
            raise UsageError(f"line {number} of {path} is not a sample: {','.join(line)!r}") from None
    return {key: tuple(tuple(rounds[i]) for i in sorted(rounds)) for key, rounds in found.items()}


def _check_samples(path: Path, key: str, row: Mapping[str, Any], rounds: Rounds) -> None:
    """Raise UsageError unless the samples are those that the row sums up."""
    for name in TIMED:
        if not math.isfinite(row[name]):
            raise UsageError(f"{path} has no number in the column {name} for {key}, whose status is ok")
    samples = [sample for one in rounds for sample in one]
    if (len(rounds), len(samples)) != (row["rounds"], row["samples"]):
        expected = f"{row['samples']:g} samples in {row['rounds']:g} rounds"
        raise UsageError(
            f"{samples_path(path)} has {len(samples)} samples in {len(rounds)} rounds of {key}, and {path} {expected}"
        )
    median = statistics.median(samples)
    if not math.isclose(median, row["median_ms"], rel_tol=SAMPLES_AGREE):
        raise UsageError(
            f"{path} has the median {row['median_ms']:.6g} ms for {key}, and its samples have {median:.6g} ms"
        )
