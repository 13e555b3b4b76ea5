"""Triton's profiler, Proton: the tree of kernels of one call, with times."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mtabench.errors import UsageError
from mtabench.problem.case import Case

TIME = "time (ns)"


def reason_against(device: str) -> str | None:
    """Why Proton cannot be used here, or None."""
    if device != "cuda":
        return "Proton profiles kernels on a GPU"
    try:
        import triton.profiler  # noqa: F401
    except ImportError:
        return "this Triton has no Proton (triton.profiler); Triton 3.1 or later on Linux has it"
    return None


def profile_call(send: Any, case: Case, path: Path, typed: str) -> None:
    """In a process of its own, which no other profiler has hooked into: one warm call, written to `path`.

    `typed` is what --impl takes for the implementation.
    """
    import torch
    import triton.profiler

    from mtabench.profiling.cell import ready
    from mtabench.registry import load_again

    load_again(typed)
    cell = ready(case)
    state = cell.setup() if cell.setup else None
    torch.cuda.synchronize()
    session = triton.profiler.start(str(path.with_suffix("")))
    cell.run(state)
    torch.cuda.synchronize()
    triton.profiler.finalize(session)
    send("done")


def tree_lines(path: Path) -> list[str]:
    """The tree in a .hatchet file: microseconds, launches and name, indented; raises UsageError for another file."""
    try:
        root = json.loads(path.read_text())[0]
        return list(_lines(root, -1))
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise UsageError(f"{path} is not a tree of Proton ({type(error).__name__}: {error})") from error


def _lines(node: dict[str, Any], depth: int) -> Iterator[str]:
    if depth >= 0:
        count = node["metrics"].get("count")
        launches = f"{count:>5} x" if count else " " * 7
        yield f"{_nanoseconds(node) / 1e3:>10.1f} us {launches}  {'  ' * depth}{node['frame']['name']}"
    for child in sorted(node["children"], key=lambda child: -_nanoseconds(child)):
        yield from _lines(child, depth + 1)


def _nanoseconds(node: dict[str, Any]) -> float:
    """Its own time and that of what is below."""
    return float(node["metrics"].get(TIME, 0)) + sum(_nanoseconds(child) for child in node["children"])
