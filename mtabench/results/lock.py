"""One writer a file: an exclusive lock on `.NAME.lock` beside it, which says who holds it.

Where the file system has no locks, that a process of this name runs is taken for one.
"""

import errno
import fcntl
import json
import os
import platform
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

from mtabench.errors import UsageError

# What file systems without locks answer: Lustre as it is mounted by default, and some NFS.
NO_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP)


class FileLock:
    """The right to write `path`. The kernel drops it when its holder ends, however that happens."""

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
