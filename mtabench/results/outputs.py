"""Files that commands write: whole or not at all, and never over what somebody may still need."""

import os
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from mtabench.errors import UsageError
from mtabench.git import make_folder
from mtabench.results.lock import FileLock

MARK_BYTES = 2000  # at the head of a file, where a report says that it is one


KINDS = {".csv": "a CSV file", ".html": "an HTML page", ".md": "Markdown"}


def named(path: Path, suffix: str = ".csv") -> str:
    """The path for a person, with what the file is if its name ends as one of another kind."""
    return str(path) if path.suffix.lower() in ("", suffix) else f"{path} ({KINDS[suffix]})"


def check_outputs(
    outputs: Mapping[str, Path], inputs: Iterable[Path], overwrite: bool, marks: Mapping[str, str] | None = None
) -> None:
    """Raise UsageError for a file, by its option, that is read, written twice or by another process, or cannot be made.

    One that is there is replaced if `overwrite` says so, or if it is an earlier one of its kind: `marks` has, by
    option, what the head of such a file holds.
    """
    read = list(inputs)
    taken: set[Path] = set()
    for option, path in outputs.items():
        if path.is_dir():
            raise UsageError(f"{option} {path} is a folder; give the name of a file")
        there = path.exists()
        if any(path.resolve() == one.resolve() or (there and one.exists() and path.samefile(one)) for one in read):
            raise UsageError(f"{option} {path} is one of the files that are read; give another name")
        if path.resolve() in taken:
            raise UsageError(f"{option} {path} is the file of another option; give another name")
        taken.add(path.resolve())
        if _is_stream(path):
            continue
        check_folder(path, option)
        if not there:
            continue
        FileLock(path).check()
        mark = (marks or {}).get(option)
        if not overwrite and not (mark and _begins_with(path, mark, option)):
            kind = " and is no report of mtabench" if mark else ""
            raise UsageError(f"{path} already exists{kind}; give --overwrite to replace it, or another {option}")
        if not os.access(path, os.W_OK):
            raise UsageError(f"cannot write {path}: it is not writable; give another {option}")


def _begins_with(path: Path, mark: str, option: str) -> bool:
    try:
        with path.open("rb") as file:
            return mark.encode() in file.read(MARK_BYTES)
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}; give another {option}") from error


def _is_stream(path: Path) -> bool:
    """Whether it is a pipe or a device such as /dev/stdout, which nothing can replace."""
    return path.exists() and not path.is_file()


def write_text(path: Path, text: str) -> None:
    """Write a text to a file that takes the place of `path`, of what it links to, or to a pipe; raises UsageError."""
    if _is_stream(path):
        append_text(path, text)
        return
    with written(path.resolve()) as file:
        file.write(text.encode())


def append_text(path: Path, text: str) -> None:
    """Add a text to the end of a file; raises UsageError if that fails."""
    try:
        with path.open("ab") as file:
            file.write(text.encode())
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror}; give another name") from error


@contextmanager
def written(path: Path) -> Iterator[BinaryIO]:
    """A file that takes the place of `path` when the block ends, and leaves no trace if it fails.

    Raises UsageError if it cannot be written.
    """
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        make_folder(path.parent)
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
