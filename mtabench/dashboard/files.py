"""The results files below a folder, read one after another; what is no results file is counted, what is broken told."""

import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from mtabench.dashboard.histories import Collector, History, HistoryRun, TooMuchError
from mtabench.errors import UsageError
from mtabench.results.results_file import read_file

MOST_FILES = 20_000
SAMPLES = "files of samples"
OTHER = "other CSV files"
LINKS = "links"
EMPTY = "files without rows"
FOR_OTHERS = "rows of Triton compiled for another GPU"  # no slower code of the same cell


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
    """The rows but for those of Triton's kernels with TRITON_OVERRIDE_ARCH, which are counted."""
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
