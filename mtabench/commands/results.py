"""The commands `mtabench results merge` and `select`: results files, and their samples, made of other ones."""

import gzip
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from mtabench.console import make_console, say
from mtabench.errors import UsageError
from mtabench.prose import plural
from mtabench.results.cell_names import name_of
from mtabench.results.outputs import check_outputs, written
from mtabench.results.results_file import (
    COLUMNS,
    SAMPLE_COLUMNS,
    ResultsFile,
    find_samples,
    key_of_row,
    read_file,
    records,
    samples_path,
    samples_paths,
)
from mtabench.results.row_filter import parse_where, select
from mtabench.results.runs import samples_of
from mtabench.results.writer import csv_text

MOST_PLAIN = 1 << 20  # bytes of samples that are written as they are; more are compressed

Row = dict[str, str]


@dataclass(frozen=True, slots=True)
class FilePart:
    """Rows of one file that go into the new one."""

    path: Path
    rows: Sequence[Row]


def merge(paths: Sequence[Path], out: Path, latest: bool, overwrite: bool) -> int:
    """Write the rows of several results files into one, and their samples; raises UsageError.

    A cell of one device that several files have with different rows is refused, or with `latest` the row that
    started last is taken.
    """
    if not len(paths) == len({path.resolve() for path in paths}) > 1:
        raise UsageError("results merge takes two results files or more, each once")
    _check_outputs(out, paths, overwrite)
    files = [_read(path) for path in paths]
    chosen: dict[tuple[str, ...], tuple[int, Row]] = {}
    twice: dict[tuple[str, ...], list[int]] = {}
    for number, file in enumerate(files):
        for row in file.rows():
            key = (*key_of_row(row), row["device"])
            if key in chosen:
                other, before = chosen[key]
                if row == before:
                    continue
                if other == number:
                    raise UsageError(f"{file.path} has the cell {_named(row)} twice; a results file has one row a cell")
                twice.setdefault(key, [other]).append(number)
                if latest and row["started_utc"] == before["started_utc"]:
                    raise UsageError(
                        f"{files[other].path} and {file.path} have different rows of {_named(row)} that started at the "
                        f"same time, {row['started_utc']}; leave one out with mtabench results select"
                    )
                if row["started_utc"] < before["started_utc"]:
                    continue
            chosen[key] = number, row
    if twice and not latest:
        key, (first, second, *_) = next(iter(twice.items()))
        more = f" and {plural(len(twice) - 1, 'more cell')}" if len(twice) > 1 else ""
        raise UsageError(
            f"{files[first].path} and {files[second].path} both have {_named(chosen[key][1])}{more}; give "
            "--latest to keep the row that started last, or choose rows first with mtabench results select"
        )
    parts = [
        FilePart(file.path, [row for number, row in chosen.values() if number == i]) for i, file in enumerate(files)
    ]
    _write(out, parts)
    if twice:
        say(make_console(), f"{plural(len(twice), 'cell')} in several files: the row that started last was taken")
    return 0


def select_rows(path: Path, where: Sequence[str], out: Path, overwrite: bool) -> int:
    """Write the rows of a results file for which `where` holds, and their samples; raises UsageError."""
    conditions = parse_where(where)
    _check_outputs(out, [path], overwrite)
    _write(out, [FilePart(path, select(_read(path).rows(), conditions, path))])
    return 0


def _check_outputs(out: Path, paths: Sequence[Path], overwrite: bool) -> None:
    if out.suffix != ".csv" or out.name.endswith(".samples.csv"):
        raise UsageError(f"--out {out} is not the name of a results file; expected NAME.csv")
    inputs = [one for path in paths for one in (path, *samples_paths(path))]
    for path in (out, *samples_paths(out)):
        check_outputs({"--out": path}, inputs, overwrite)


def _read(path: Path) -> ResultsFile:
    file = read_file(path, with_rows=True)
    more = [name for name in file.columns if name not in COLUMNS]
    if more:
        raise UsageError(f"{path} has the column {more[0]!r}, which this mtabench does not know and would lose")
    if file.torn:
        say(make_console(), f"{path} ends in the middle of a row, which is left out")
    return file


def _write(out: Path, parts: Sequence[FilePart]) -> None:
    """Write rows and samples; the samples first, so that every row has its own. Many samples are compressed."""
    rows = [[row[name] for name in COLUMNS] for part in parts for row in part.rows]
    with_samples = [part for part in parts if part.rows and find_samples(part.path).exists()]
    plain, compressed = samples_paths(out)
    with written(out) as results:
        results.write(csv_text([COLUMNS, *rows]).encode())
        stale = {plain, compressed}  # the samples of a file that is replaced
        if with_samples:
            lines = csv_text([SAMPLE_COLUMNS, *samples_of((part.path, part.rows) for part in with_samples)]).encode()
            target = compressed if len(lines) > MOST_PLAIN else plain
            with written(target) as samples:
                samples.write(gzip.compress(lines, mtime=0) if target == compressed else lines)
            stale.remove(target)
        for path in stale:
            path.unlink(missing_ok=True)
    console = make_console()
    say(console, f"{out}: {plural(len(rows), 'cell')}")
    for part in parts:
        timed = any(row["status"] == "ok" for row in part.rows)
        if timed and part not in with_samples:
            samples_name = samples_path(part.path).name
            say(console, f"{part.path} has no {samples_name} beside it: compare needs samples of every cell")


def _named(row: Row) -> str:
    (values,) = records({name: [text] for name, text in row.items()})
    return f"{name_of(values)} of {row['device'] or 'an unnamed device'}"
