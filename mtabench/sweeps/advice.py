"""What a person may type after a sweep, chosen by what it measured."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mtabench.registry import typed_as
from mtabench.results.results_file import of_gpu

Row = Mapping[str, Any]


def next_command(rows: Sequence[Row], path: Path, charts: bool) -> str:
    """The command that looks closer at these rows, which are in the file at `path`; `charts` were drawn of it or not.

    First what is wrong with them, then pictures, then all of them on a page, or the one beside its roof.
    """
    of = {status: [row for row in rows if row["status"] == status] for status in ("wrong", "oom", "ok")}
    if of["wrong"]:
        return f"mtabench verify --impl {_names(of['wrong'])}"
    if of["oom"] and all(map(of_gpu, of["oom"])):
        return f"mtabench memory --pass {of['oom'][0]['pass']} --impl {_names(of['oom'])}"
    file = shlex.quote(str(path))
    if not charts:
        return f"mtabench plot {file}"
    if len(of["ok"]) > 1:
        return f"mtabench report {file}"
    if any(row.get("fraction_of_roofline") for row in of["ok"]):
        return f"mtabench roofline {file}"
    return f"mtabench show {file}"


def _names(rows: Sequence[Row]) -> str:
    """What --impl takes: of a function of a person's own, its file as well."""
    return shlex.quote(",".join(dict.fromkeys(typed_as(str(row["impl"])) for row in rows)))
