"""Files that commands write: whole or not at all, and never over what somebody may still need."""

import errno
import fcntl
import json
import os
import platform
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import BinaryIO

from mtabench.errors import UsageError
from mtabench.git import make_folder

# What file systems without locks answer: Lustre as it is mounted by default, and some NFS.
NO_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP)
MARK_BYTES = 2000  # at the head of a file, where a report says that it is one


KINDS = {".csv": "a CSV file", ".html": "an HTML page", ".md": "Markdown"}


class FileLock:
    """The right to write `path`: an exclusive lock on `.NAME.lock` beside it, which says who holds it.

    The kernel drops it when its holder ends, however that happens. Where the file system has no locks, that a process
    of this name runs is taken for one.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        real = Path(os.path.realpath(path))
        self._side_file = real.with_name(f".{real.name}.lock")
        self._descriptor: int | None = None

    def check(self) -> None:
        """Raise UsageError, touching nothing, if another process holds the lock."""
        itself = partial(os.open, self._path)
        for opened, take in ((self._open, self._take), (itself, self.take_itself)):
            try:
                descriptor = opened(os.O_RDONLY | os.O_NONBLOCK)
            except OSError:  # no such file, or no such folder: nobody holds it
                continue
            try:
                take(descriptor, fcntl.LOCK_SH)
            finally:
                os.close(descriptor)

    def take_itself(self, descriptor: int, kind: int = fcntl.LOCK_EX) -> None:
        """Lock the file itself, which is the same under each of its names; raises UsageError if it is held."""
        try:
            fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UsageError(
                f"{self._path} is being written by another process, which may call it by another name; wait for it to "
                "end, or give another --out"
            ) from None
        except OSError:  # a file system without locks
            pass

    def _open(self, flags: int) -> int:
        """Open the side file, never the file that a link in its place leads to."""
        try:
            return os.open(self._side_file, flags | os.O_NOFOLLOW, 0o644)
        except OSError as error:
            if error.errno != errno.ELOOP:
                raise
            raise UsageError(f"{self._side_file} is a link, and a lock would overwrite its file; remove it") from None

    def acquire(self, command: str) -> None:
        """Take the lock or raise UsageError, naming its holder; OSError if the side file can't be made."""
        while self._descriptor is None:
            descriptor = self._open(os.O_RDWR | os.O_CREAT)
            try:
                self._take(descriptor, fcntl.LOCK_EX)
                if self._is_current(descriptor):
                    self._descriptor = descriptor
            finally:
                if self._descriptor is None:
                    os.close(descriptor)
        holder = {
            "pid": os.getpid(),
            "host": platform.node(),
            "command": command,
            "since": f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ}",
        }
        os.ftruncate(self._descriptor, 0)
        os.pwrite(self._descriptor, json.dumps(holder).encode(), 0)

    def release(self) -> None:
        """Give the lock back and remove its file."""
        if self._descriptor is not None:
            self._side_file.unlink(missing_ok=True)
            os.close(self._descriptor)
            self._descriptor = None

    def _take(self, descriptor: int, kind: int) -> None:
        try:
            fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
        except OSError as error:
            if not isinstance(error, BlockingIOError) and error.errno not in NO_LOCKS:
                raise
            locks = isinstance(error, BlockingIOError)
            if not locks and not _may_be_held(descriptor):
                return
            ended = "" if locks else f" (this file system has no locks: if it has ended, remove {self._side_file})"
            raise UsageError(
                f"{self._path} is being written by {_holder(descriptor)}; wait for it to end{ended}, or give "
                "another --out"
            ) from None

    def _is_current(self, descriptor: int) -> bool:
        """Whether the side file is still the one opened: its last holder removes it on the way out."""
        try:
            return os.path.samestat(os.fstat(descriptor), os.stat(self._side_file))
        except FileNotFoundError:
            return False


def _may_be_held(descriptor: int) -> bool:
    """Where a file system has no locks: whether the side file names a process that may still run."""
    try:
        holder = json.loads(os.pread(descriptor, 4096, 0))
        if holder["host"] != platform.node():
            return True
        os.kill(holder["pid"], 0)
        return bool(holder["pid"] != os.getpid())
    except PermissionError:  # a process of another account
        return True
    except (ValueError, KeyError, TypeError, ProcessLookupError):  # an empty file: nobody wrote into it yet
        return False


def _holder(descriptor: int) -> str:
    try:
        holder = json.loads(os.pread(descriptor, 4096, 0))
        return f"process {holder['pid']} ({holder['command']}) since {holder['since']}"
    except (ValueError, KeyError, TypeError):
        return "another process"


def named(path: Path, suffix: str = ".csv") -> str:
    """The path for a person, with what the file is if its name ends as one of another kind."""
    return str(path) if path.suffix.lower() in ("", suffix) else f"{path} ({KINDS[suffix]})"


def check_outputs(
    outputs: Mapping[str, Path], inputs: Iterable[Path], overwrite: bool, marks: Mapping[str, str] | None = None
) -> None:
    """Raise UsageError for a file, by its option, that is read, written twice or by another process, or cannot be made.

    An existing one is replaced if `overwrite` says so, or if it is an earlier one of its kind. `marks` has, by option,
    what the head of such a file holds.
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

    A file without a name is opened to find out: permissions alone do not show it (root, read-only disks, /proc).
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
