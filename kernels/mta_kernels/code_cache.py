"""Compiled code on disk: a file with its checksum, written whole or not at all, that other users may read.

The checksum is for accidents (a crash, a full disk, a rotten bit), not for malice: whoever may write to the folder
decides what runs.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import secrets
from pathlib import Path

CHECKSUM_BYTES = hashlib.sha256().digest_size


def cache_folder(kind: str = "") -> Path:
    """Where things of a kind are kept: in `$MTA_KERNELS_CACHE`, else `$XDG_CACHE_HOME/mta_kernels`, else `~/.cache`."""
    base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(os.environ.get("MTA_KERNELS_CACHE") or os.path.join(base, "mta_kernels")) / kind


def kept_code(path: Path) -> bytes | None:
    """What `keep_code` put there; None if that is nothing, or not what it was."""
    try:
        kept = path.read_bytes()
    except OSError:
        return None
    code, checksum = kept[:-CHECKSUM_BYTES], kept[-CHECKSUM_BYTES:]
    return code if checksum == hashlib.sha256(code).digest() else None


def keep_code(path: Path, code: bytes) -> None:
    """Write code and then its checksum, which those who load an ELF file pass over. Raises OSError if it cannot."""
    write_whole(path, code + hashlib.sha256(code).digest())


def write_whole(path: Path, data: bytes) -> None:
    """To a file that has its name only once it is complete: several processes may compile the same kernel.

    Its mode, and that of new folders, is what the umask leaves.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}-{secrets.token_hex(8)}")
    try:
        with partial.open("xb") as file:
            file.write(data)
        partial.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            partial.unlink()
        raise
