"""Histories of the results files below a folder: all times of one cell on one device, in the order of the runs."""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from mtabench.errors import UsageError
from mtabench.results.cell_names import name_of
from mtabench.results.results_file import KEY_COLUMNS, NUMERIC_COLUMNS, read_file

if TYPE_CHECKING:
    from numpy.typing import NDArray

_Point = tuple[tuple[float, ...], tuple[str, str]]

# Times taken elsewhere, or in another way, belong to another history.
CELL_COLUMNS = ("device", *KEY_COLUMNS, "timer", "cache")
VERSIONS = ("driver", "cuda", "torch", "triton", "mtabench")
RUN_COLUMNS = ("run_id", "git_sha", "git_dirty", "device", *VERSIONS)
TIMES = ("median_ms", "ci95_low_ms", "ci95_high_ms")

MOST_POINTS = 1_000_000
MOST_CELLS = 20_000
MOST_FILES = 20_000
SAMPLES = "files of samples"
OTHER = "other CSV files"
LINKS = "links"
EMPTY = "files without rows"
FOR_OTHERS = "rows of Triton compiled for another GPU"  # no slower code of the same cell


@dataclass(frozen=True, slots=True)
class HistoryRun:
    """One run of a sweep: when it started, of which revision (empty if unknown), with which versions."""

    run_id: str
    started_utc: str
    git_sha: str
    git_dirty: str
    device: str
    versions: tuple[str, ...]

    @property
    def revision(self) -> tuple[str, str]:
        """What its code was: the commit and whether it was changed, or where that is unknown the run itself."""
        return (self.git_sha, self.git_dirty) if self.git_sha else ("", self.run_id)


@dataclass(frozen=True, slots=True)
class History:
    """One cell over its runs, the oldest first: places in the list of runs, milliseconds (NaN if it failed), outcomes.

    `cell` has texts under CELL_COLUMNS; `outcomes` are pairs of status and reason.
    """

    cell: Mapping[str, str]
    name: str
    runs: NDArray[np.intp]
    median_ms: NDArray[np.float64]
    ci95_low_ms: NDArray[np.float64]
    ci95_high_ms: NDArray[np.float64]
    outcomes: Sequence[tuple[str, str]]

    @property
    def timed(self) -> NDArray[np.intp]:
        """Places of the points that have a time."""
        return np.flatnonzero(np.isfinite(self.median_ms))


class TooMuchError(UsageError):
    """More results than a page can hold."""


class Collector:
    """Takes results files one after another and sorts their rows into histories."""

    def __init__(self) -> None:
        self.rows = 0
        self.repeated = 0
        self._runs: dict[tuple[str, ...], int] = {}
        self._started: list[str] = []
        self._cells: dict[tuple[str, ...], dict[int, _Point]] = {}

    def add(self, columns: Mapping[str, Sequence[str]], source: str) -> None:
        """Add the rows of a file, the texts of `read_file` by column; a row that an earlier file had is only counted.

        Takes nothing of a file if it raises. Raises UsageError for a row that cannot stand in a history, and
        TooMuchError for more than a page can hold.
        """
        _check(columns, source)
        runs = zip(*(columns[name] for name in RUN_COLUMNS), strict=True)
        cells = zip(*(columns[name] for name in CELL_COLUMNS), strict=True)
        times = zip(*(map(_number, columns[name]) for name in TIMES), strict=True)
        outcomes = zip(columns["status"], columns["reason"], strict=True)
        for run, cell, started, time, outcome in zip(runs, cells, columns["started_utc"], times, outcomes, strict=True):
            place = self._runs.setdefault(run, len(self._runs))
            if place == len(self._started):
                self._started.append(started)
            self._started[place] = min(self._started[place], started)
            points = self._cells.setdefault(cell, {})
            if place in points:
                self.repeated += 1
                continue
            points[place] = (time if outcome[0] == "ok" else (math.nan,) * len(TIMES), outcome)
            self.rows += 1
        if self.rows > MOST_POINTS or len(self._cells) > MOST_CELLS:
            raise TooMuchError(
                f"there are more than {MOST_POINTS:,} rows or {MOST_CELLS:,} cells in it, and no page can show them; "
                "give a folder with fewer"
            )

    def histories(self) -> tuple[list[HistoryRun], list[History]]:
        """All runs in the order in which they started, and all histories in the order of the files."""
        order = sorted(range(len(self._started)), key=self._started.__getitem__)
        rank = np.argsort(order)
        keys = list(self._runs)
        runs = [
            HistoryRun(run_id, self._started[place], sha, dirty, device, tuple(versions))
            for place, (run_id, sha, dirty, device, *versions) in ((place, keys[place]) for place in order)
        ]
        return runs, [_history(cell, points, rank) for cell, points in self._cells.items()]


def _history(key: tuple[str, ...], points: Mapping[int, _Point], rank: NDArray[np.intp]) -> History:
    cell = dict(zip(CELL_COLUMNS, key, strict=True))
    ordered = sorted((int(rank[place]), *point) for place, point in points.items())
    median, low, high = np.array([time for _, time, _ in ordered]).T
    outcomes = [outcome for _, _, outcome in ordered]
    numbers = {name: _number(text) for name, text in cell.items() if name in NUMERIC_COLUMNS}
    name = name_of({**cell, **numbers, "causal": cell["causal"] == "true"})
    return History(cell, name, np.array([run for run, *_ in ordered]), median, low, high, outcomes)


def _number(text: str) -> float:
    return float(text or "nan")


def _check(columns: Mapping[str, Sequence[str]], source: str) -> None:
    """Raise UsageError for a row without what a history needs."""
    if not columns["run_id"]:
        raise UsageError(f"{source} is empty: it has no rows")
    if "" in columns["run_id"]:
        raise UsageError(f"{source} has a row without a run_id")
    for name in TIMES:
        if ("ok", "") in zip(columns["status"], columns[name], strict=True):
            raise UsageError(f"{source} has a row that is ok and has no {name}")


@dataclass(frozen=True, slots=True)
class Archive:
    """All that a folder holds: runs and histories, how many files that is, what was left out, and what is broken.

    `broken` has the path below the folder and the reason of each file that could not be read.
    """

    runs: Sequence[HistoryRun]
    histories: Sequence[History]
    files: int
    rows: int
    repeated: int
    skipped: Counter[str]
    broken: Sequence[tuple[str, str]]


def read_archive(folder: Path) -> Archive:
    """Read every results file below a folder.

    Raises UsageError if there is no such folder, if nothing in it can be read, or if it is too much for a page.
    """
    paths, skipped = _results_files(folder)
    collector = Collector()
    broken = []
    for path in paths:
        name = str(path.relative_to(folder))
        try:
            columns = _without_other_gpus(read_file(path).columns, skipped)
            if columns["run_id"]:
                collector.add(columns, name)
            else:
                skipped[EMPTY] += 1
        except TooMuchError as error:
            raise UsageError(f"{folder} cannot become a page: {error}") from None
        except UsageError as error:
            broken.append((name, str(error).replace(str(path), name)))
    runs, histories = collector.histories()
    if not histories:
        why = f": {broken[0][1]}" if broken else f": {EMPTY}: {skipped[EMPTY]}" if skipped[EMPTY] else ""
        raise UsageError(f"{folder} holds no results file of mtabench that can be read{why}")
    read = len(paths) - len(broken) - skipped[EMPTY]
    return Archive(runs, histories, read, collector.rows, collector.repeated, skipped, broken)


def _without_other_gpus(columns: Mapping[str, list[str]], skipped: Counter[str]) -> Mapping[str, list[str]]:
    """The rows without Triton's kernels under TRITON_OVERRIDE_ARCH, which are counted."""
    cells = list(zip(columns["impl"], columns["triton"], strict=True))
    kept = [i for i, (impl, triton) in enumerate(cells) if not (impl.startswith("triton") and " for " in triton)]
    if len(kept) == len(cells):
        return columns
    skipped[FOR_OTHERS] += len(cells) - len(kept)
    return {name: [texts[i] for i in kept] for name, texts in columns.items()}


def _results_files(folder: Path) -> tuple[list[Path], Counter[str]]:
    """The results files below a folder by name, and how many CSV files are something else. Follows no links."""
    if not folder.is_dir():
        raise UsageError(f"{folder} is not a folder; give the folder that holds the results files")
    found: list[Path] = []
    skipped: Counter[str] = Counter()
    for path in _csv_files(folder):
        if path.is_symlink():
            skipped[LINKS] += 1
        elif path.name.endswith(".samples.csv"):
            skipped[SAMPLES] += 1
        elif not _looks_like_results(path):
            skipped[OTHER] += 1
        else:
            found.append(path)
        if len(found) > MOST_FILES:
            raise UsageError(f"{folder} holds more than {MOST_FILES:,} results files; give a folder with fewer of them")
    return found, skipped


def _csv_files(folder: Path) -> Iterator[Path]:
    for place, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        yield from (Path(place, name) for name in sorted(names) if name.lower().endswith(".csv"))


def _looks_like_results(path: Path) -> bool:
    """Whether the first line names the columns that every version of a results file has.

    One that cannot be opened counts as well, so that it is reported as broken.
    """
    try:
        with path.open("rb") as file:
            names = file.readline(10_000).decode("utf-8", "replace").strip().split(",")
    except OSError:
        return True
    return "schema_version" in names or {"run_id", "median_ms"} <= set(names)
