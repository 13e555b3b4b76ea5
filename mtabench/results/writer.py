"""Writes a results file: rows appended whole and flushed to disk after their samples, by one process at a time."""

from __future__ import annotations

import csv
import io
import os
import shlex
from collections.abc import Collection, Iterable, MutableMapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

from mtabench.errors import MtabenchError, UsageError
from mtabench.git import make_folder
from mtabench.measuring.settled import TypicalHalf
from mtabench.results.csv_reading import is_whole, read_csv
from mtabench.results.outputs import FileLock, check_folder, written
from mtabench.results.results_file import (
    COLUMNS,
    SAMPLE_COLUMNS,
    Key,
    key_of_row,
    read_file,
    samples_path,
    samples_paths,
    text_of,
)
from mtabench.results.runs import MOST_BYTES, MOST_SAMPLES


def to_resume(path: Path) -> str:
    """How one goes on with a sweep into this file, as a shell takes it."""
    return f"the same command with --out {shlex.quote(str(path))} --resume"


def check_destination(path: Path, resume: bool) -> list[dict[str, str]]:
    """The rows that a sweep to `path` will find there; raises UsageError if it may not write. Touches nothing."""
    if path.is_dir():
        raise UsageError(f"{path} is a folder; give the name of a CSV file in it")
    FileLock(path).check()
    rows = _check_file(path, resume)
    samples, compressed = samples_paths(path)
    if compressed.exists():
        raise UsageError(f"{compressed} has the samples of {path}, and a sweep adds to a plain file; `gunzip` it first")
    if samples.exists() and not read_csv(samples, MOST_BYTES, MOST_SAMPLES).begins(SAMPLE_COLUMNS):
        raise UsageError(f"{samples} is not a samples file of mtabench; give another --out")
    for one in (path, samples):
        if one.is_symlink() and not one.exists():
            raise UsageError(f"{one} is a link to a file that is not there; remove the link, or give another --out")
    other = path.with_suffix("") if path.suffix == ".csv" else path.with_name(f"{path.name}.csv")
    if other.is_file() and _begins_as_a_run(other):
        raise UsageError(f"{path} would share {samples} with the run {other}; give another --out")
    if path.exists() and not os.access(path, os.W_OK):
        raise UsageError(f"cannot write {path}: it is not writable; give another --out")
    check_folder(path)
    return rows


class Writer:
    """Appends whole rows to one results file, held by an exclusive lock until `close`.

    `done` maps the key of each cell the file already has to its row, but for those to measure `again`, whose rows are
    replaced. Raises UsageError if another process writes the file, if it has another schema, or if it cannot be
    written. So it does for an existing file if `resume` is false.
    """

    def __init__(
        self, path: Path, *, resume: bool = False, command: str = "", again: Iterable[Key] = ()
    ) -> None:  # fmt: skip
        check_destination(path, resume)
        self.path = path
        self.samples_path = samples_path(path)
        try:
            make_folder(path.parent)
            self._lock = FileLock(path)
            self._lock.acquire(command)
        except OSError as error:
            raise UsageError(f"cannot write {path}: {error.strerror}; give another --out") from error
        self._files = {one: _Appended(one, to_resume(path)) for one in (path, self.samples_path)}
        try:
            for file in self._files.values():
                file.open()
            self._again = set(again)
            self.done = {key: row for row in _check_file(path, resume) if (key := key_of_row(row)) not in self._again}
            self._typical = TypicalHalf()
            self._typical.add(self.done.values())
            for file, columns in zip(self._files.values(), (COLUMNS, SAMPLE_COLUMNS), strict=True):
                _prepare(file.real, columns)
                file.begin(columns)
        except BaseException:
            self.close()
            raise

    def write(self, rows: Sequence[MutableMapping[str, Any]], samples: Iterable[Sequence[object]] = ()) -> None:
        """Append rows (values by column name) and their samples (SAMPLE_COLUMNS); on disk when it returns.

        Rows that were just measured get what is typical of the run by then.
        """
        typical = self._typical.add(rows)
        for row in rows:
            if typical is not None and "median_ms" in row and "ci_typical" not in row:
                row["ci_typical"] = typical
        if lines := csv_text(samples):  # before the rows, so that every row in the file has its samples
            self._files[self.samples_path].append(lines)
        texts = [{name: text_of(row.get(name)) for name in COLUMNS} for row in rows]
        found = {key_of_row(row): row for row in texts}
        if replaced := self._again & found.keys():
            self._files[self.path].check()
            _remove(self._files[self.path].real, replaced)
            self._files[self.path].open()
            self._again -= replaced
        self._files[self.path].append(csv_text(row.values() for row in texts))
        self.done |= found

    def close(self) -> None:
        """Give the file back."""
        for file in self._files.values():
            file.close()
        self._lock.release()

    def __enter__(self) -> Writer:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        try:
            if kind is None:
                for file in self._files.values():
                    file.check()
        finally:
            self.close()


class _Appended:
    """A file that this process alone adds lines to, and that no process removes or shortens unnoticed.

    `path` is what a person calls it; what it is does not change with the current folder.
    """

    def __init__(self, path: Path, to_resume: str) -> None:
        self.path, self.real, self._to_resume = path, Path(os.path.realpath(path)), to_resume
        self._file: BinaryIO | None = None
        self._size = 0

    def open(self) -> None:
        """Open the file as it is now, or an empty one; raises UsageError if another process writes it."""
        self.close()
        try:
            self._file = self.real.open("ab", buffering=0)
        except OSError as error:
            raise UsageError(f"cannot write {self.path}: {error.strerror}; give another --out") from error
        FileLock(self.path).take_itself(self._file.fileno())
        self._size = os.fstat(self._file.fileno()).st_size

    def begin(self, columns: Sequence[str]) -> None:
        """Start with a header if the file is empty; what is in it by now is to stay there."""
        assert self._file is not None
        self._size = os.fstat(self._file.fileno()).st_size
        if not self._size:
            self.append(csv_text([columns]))

    def check(self) -> None:
        """Raise MtabenchError if the file is no longer that which was written."""
        assert self._file is not None
        try:
            there = self.real.stat()
        except OSError:
            fault = "removed"
        else:
            whole = os.path.samestat(there, os.fstat(self._file.fileno()))
            fault = "" if whole and there.st_size >= self._size else "shortened" if whole else "replaced"
        if fault:
            raise MtabenchError(
                f"{self.path} was {fault} while it was being written: what it lacks now is lost, and "
                f"{self._to_resume} measures it again"
            )

    def append(self, text: str) -> None:
        """Append a text in one write and wait for the disk; on a failure the file is as it was."""
        assert self._file is not None
        self.check()
        try:
            size = self._file.seek(0, os.SEEK_END)
            try:
                data = text.encode()
                if self._file.write(data) != len(data):
                    raise OSError(0, "no room left for a whole row")
                os.fsync(self._file.fileno())
            except OSError:
                self._file.truncate(size)
                raise
        except OSError as error:
            raise MtabenchError(f"cannot write {self.path}: {error.strerror}; the rows before are kept") from error
        self._size = size + len(data)
        self.check()

    def close(self) -> None:
        """Let go of the file."""
        if self._file is not None:
            self._file.close()
            self._file = None


def _begins_as_a_run(path: Path) -> bool:
    begin = ",".join(COLUMNS).encode()
    with suppress(OSError), path.open("rb") as file:
        return file.read(len(begin)) == begin
    return False


def _check_file(path: Path, resume: bool) -> list[dict[str, str]]:
    """The rows that a sweep to `path` finds there; UsageError if it may not add to them."""
    if not path.exists() or (path.is_file() and not path.stat().st_size):
        return []
    if not path.is_file():
        raise UsageError(f"{path} is no regular file, and a sweep adds rows to one; give another --out")
    if not resume:
        raise UsageError(f"{path} already exists; give --resume to complete it, or another --out")
    file = read_file(path)
    if tuple(file.columns) != COLUMNS:
        raise UsageError(f"{path} has other columns than this mtabench writes; give another --out")
    return file.rows()


def _remove(path: Path, keys: Collection[Key]) -> None:
    """Rewrite a results file without these cells, whole or not at all."""
    rows = [row for row in read_file(path).rows() if key_of_row(row) not in keys]
    with written(path) as file:
        file.write(csv_text([COLUMNS, *([row[name] for name in COLUMNS] for row in rows)]).encode())


def _prepare(path: Path, columns: Sequence[str]) -> None:
    """Cut off a torn last line and empty ones."""
    try:
        with path.open("ab+") as file:
            file.seek(0)
            content = file.read()
            kept = content if columns is COLUMNS and is_whole(content) else content[: content.rfind(b"\n") + 1]
            kept = kept.rstrip(b"\r\n")
            if content != kept + b"\n":  # cut off, or saved by an editor
                file.truncate(len(kept))
                file.write(b"\n" if kept else b"")
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror}; give another --out") from error


def csv_text(lines: Iterable[Iterable[object]]) -> str:
    """Lines of a CSV file, of values as `text_of` writes them."""
    text = io.StringIO(newline="")
    csv.writer(text, lineterminator="\n").writerows([text_of(value) for value in line] for line in lines)
    return text.getvalue()
