"""Files that commands write: whole or not at all, and never over what somebody may still need."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from mtabench.errors import UsageError
from mtabench.results.lock import FileLock


def check_output(path: Path, inputs: Iterable[Path], overwrite: bool, option: str = "--out") -> None:
    """Raise UsageError if `path` is an input, a folder, being written, or there while `overwrite` is false."""
    if path.is_dir():
        raise UsageError(f"{option} {path} is a folder; give the name of a file")
    check_folder(path, option)
    if not path.exists():
        return
    if any(one.exists() and path.samefile(one) for one in inputs):
        raise UsageError(f"{option} {path} is one of the files that are read; give another name")
    FileLock(path).check()
    if not overwrite:
        raise UsageError(f"{path} already exists; give --overwrite to replace it, or another {option}")


def named(path: Path, suffix: str = ".csv") -> str:
    """The path for a person, with what the file is if its name ends as one of another kind."""
    return str(path) if path.suffix.lower() in ("", suffix) else f"{path} (a {suffix[1:].upper()} file)"


def check_reports(reports: Mapping[str, Path], inputs: Iterable[Path], what: str) -> None:
    """Raise UsageError for a report, by its option, that would overwrite an input or another one, or cannot be written.

    `what` says what the inputs are; any other file may be replaced.
    """
    taken = {path.resolve() for path in inputs}
    for option, path in reports.items():
        if path.is_dir():
            raise UsageError(f"{option} {path} is a folder; give the name of a file")
        if path.resolve() in taken:
            raise UsageError(f"{option} {path} would overwrite {what} or another report; give another name")
        taken.add(path.resolve())
        check_folder(path, option)
        if path.exists() and not os.access(path, os.W_OK):
            raise UsageError(f"cannot write {path}: it is not writable; give another {option}")


def write_report(path: Path, text: str, mode: str = "w") -> None:
    """Write a text, in a folder that is made; raises UsageError if that fails."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open(mode, encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror}; give another name") from error


@contextmanager
def written(path: Path) -> Iterator[BinaryIO]:
    """A file that takes the place of `path` when the block ends, and leaves no trace if it fails.

    Raises UsageError if it cannot be written.
    """
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with part.open("xb") as file:
            try:
                yield file
                file.flush()
                os.fsync(file.fileno())
                part.replace(path)
            except BaseException:
                part.unlink()
                raise
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror or error}; give another --out") from error


def check_folder(path: Path, option: str = "--out") -> None:
    """Raise UsageError if `path` could not be made where it would be; leaves nothing there.

    A file without a name is opened to find out: permissions alone do not tell (root, read-only disks, /proc).
    """
    folder = next(folder for folder in path.absolute().parents if folder.exists())
    if not folder.is_dir():
        raise UsageError(f"cannot write {path}: {folder} is a file, not a folder; give another {option}")
    try:
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise UsageError(
            f"cannot write {path}: {folder} takes no file: {error.strerror}; give another {option}"
        ) from None
