"""Compiled code on disk: a file with its checksum, written whole or not at all, that other users may read.

The checksum is for accidents (a crash, a full disk, a rotten bit), not for malice: a file that another user owns or may
write is ignored.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import secrets
import stat
from pathlib import Path

CHECKSUM_BYTES = hashlib.sha256().digest_size


def cache_folder(kind: str) -> Path:
    """Where things of a kind are kept: in `$MTA_KERNELS_CACHE`, else `$XDG_CACHE_HOME/mta_kernels`, else `~/.cache`."""
    base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(os.environ.get("MTA_KERNELS_CACHE") or os.path.join(base, "mta_kernels")) / kind


def kept_code(path: Path) -> bytes | None:
    """What `keep_code` put there; None if that is nothing, or not what it was, or if others could have put it there."""
    try:
        with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NOFOLLOW)) as file:
            facts = os.fstat(file.fileno())
            if facts.st_uid not in (0, os.geteuid()) or facts.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
                return None
            kept = file.read()
    except OSError:
        return None
    code, checksum = kept[:-CHECKSUM_BYTES], kept[-CHECKSUM_BYTES:]
    return code if checksum == hashlib.sha256(code).digest() else None


def keep_code(path: Path, code: bytes) -> None:
    """Write code and then its checksum, which ELF loaders ignore. Raises OSError if it cannot.

    Nobody else may write the file, whatever the umask.
    """
    write_whole(path, code + hashlib.sha256(code).digest(), mode=0o644)


def write_whole(path: Path, data: bytes, mode: int = 0o666) -> None:
    """Write a file that has its name only once it is complete: several processes may compile the same kernel.

    A link there is replaced, not followed. The umask takes bits off `mode`, as for new folders.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}-{secrets.token_hex(8)}")
    try:
        with open(partial, "xb", opener=lambda name, flags: os.open(name, flags, mode)) as file:
            file.write(data)
        partial.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            partial.unlink()
        raise
