"""Answers that take seconds, since PyTorch is imported for them, kept on disk until what they depend on changes.

They are for commands that show what is here. What measures asks anew: an answer that is out of date costs no number.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from mta_kernels.code_cache import cache_folder, write_whole

KEPT_S = 24 * 3600.0  # for what is not among the facts below
# What PyTorch, a compiler or a kernel looks at, by how the names of the variables begin.
VARIABLES = (
    "CC", "CONDA", "CUDA", "CXX", "LD_", "MTA", "NVIDIA", "PATH", "PYTHON", "PYTORCH", "TORCH", "TRITON", "VIRTUAL_ENV",
)  # fmt: skip
FILES = ("/proc/driver/nvidia/version", "/proc/sys/kernel/random/boot_id")
DEVICES = (("/dev", "nvidia*"), ("/dev", "dxg"), ("/dev", "kfd"), ("/proc/driver/nvidia/gpus", "*"))


def cached_answer(question: str, ask: Callable[[], dict[str, Any]], anew: bool = False) -> dict[str, Any]:
    """What `ask` returns, of values that JSON has: kept under the name `question`, and asked `anew` if that is wished.

    An answer is kept a day at most, and while device files, driver, environment, installed packages and the code of
    this project are the same. One that cannot be read or kept is asked for again.
    """
    path, of = cache_folder("answers") / f"{question}.json", _state()
    if not anew:
        with suppress(OSError, ValueError, KeyError, TypeError):
            kept = json.loads(path.read_text())
            if kept["of"] == of and 0 <= time.time() - kept["asked"] < KEPT_S:
                return dict(kept["answer"])
    answer = ask()
    with suppress(OSError):
        write_whole(path, json.dumps({"of": of, "asked": time.time(), "answer": answer}).encode())
    return answer


def _state() -> str:
    """A digest of what answers depend on."""
    digest = hashlib.sha256()
    for fact in _facts():
        digest.update(f"{fact}\0".encode(errors="replace"))
    return digest.hexdigest()


def _facts() -> Iterator[str]:
    yield sys.version
    yield from (f"{name}={value}" for name, value in sorted(os.environ.items()) if name.startswith(VARIABLES))
    for path in map(Path, FILES):
        with suppress(OSError):
            yield path.read_text()
    for folder, names in DEVICES:
        yield from (str(path) for path in sorted(Path(folder).glob(names)))
    # A folder changes with every package or compiler that is put into it; this one does so for other reasons too.
    yield from (_stamp(Path(name)) for name in (*sys.path, *os.get_exec_path()) if name not in ("", os.getcwd()))
    yield from map(_stamp, sorted(cache_folder().glob("*.json")))  # tuned tile sizes
    for package in ("mtabench", "mta_kernels", "mta_ladder"):
        spec = find_spec(package)
        for root in map(Path, spec.submodule_search_locations or ()) if spec else ():
            yield from (_stamp(path) for path in sorted(root.rglob("*.*")) if path.suffix != ".pyc")


def _stamp(path: Path) -> str:
    """A path, and when it changed."""
    try:
        return f"{path} {path.stat().st_mtime_ns}"
    except OSError:
        return f"{path} is not there"
