"""The folder of static files: made anew or written over an earlier one of ours, and never over anything else."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from mtabench.dashboard.badge import badge, badge_svg
from mtabench.dashboard.data import Json
from mtabench.dashboard.feed import feed
from mtabench.dashboard.page import page
from mtabench.errors import UsageError
from mtabench.results.outputs import written

MARKER = ".mtabench-dashboard"


def check_site(folder: Path) -> None:
    """Raise UsageError unless a site may be written to `folder`: it is empty, ours, or not there yet."""
    if folder.is_symlink() or (folder.exists() and not folder.is_dir()):
        raise UsageError(f"--out {folder} is not a folder; give the name of a folder for the site")
    try:
        foreign = folder.is_dir() and not (folder / MARKER).is_file() and any(folder.iterdir())
    except OSError as error:
        raise UsageError(f"cannot read {folder}: {error.strerror}; give another folder as --out") from error
    if foreign:
        raise UsageError(
            f"--out {folder} holds files that mtabench dashboard did not make; give an empty folder or a new name"
        )


def site_files(data: Json) -> Mapping[str, str]:
    """The files of a site by name."""
    return {
        "index.html": page(data),
        "data.json": _json(data),
        "feed.json": _json(feed(data), indent=1),
        "badge.json": _json(badge(data["counts"])),
        "badge.svg": badge_svg(data["counts"]),
    }


def write_site(folder: Path, files: Mapping[str, str]) -> None:
    """Write the files, each whole or not at all; raises UsageError where that cannot be done."""
    check_site(folder)
    for name, text in {MARKER: "This folder is written by mtabench dashboard.\n", **files}.items():
        with written(folder / name) as file:
            file.write(text.encode())


def _json(content: object, indent: int | None = None) -> str:
    separators = (",", ":") if indent is None else None
    return json.dumps(content, allow_nan=False, indent=indent, separators=separators) + "\n"
