"""The changes as JSON Feed 1.1 (https://www.jsonfeed.org/version/1.1/), the newest first, with links to their commits.

Links are those of GitHub, and of what has the same addresses: Gitea, Forgejo.
"""

from __future__ import annotations

import hashlib
import re
from collections import Counter

from mtabench.dashboard.data import Json
from mtabench.dashboard.findings import SURE
from mtabench.errors import UsageError

MOST_ITEMS = 200
MOST_CELLS = 20  # named in the text of an item
EXTENSION = "_mtabench"

_SHA = re.compile(r"[0-9a-f]{7,64}")
_URL = re.compile(r"https?://[A-Za-z0-9.\-]+(:\d{1,5})?(/[A-Za-z0-9._~/\-]*)?")


def feed(data: Json) -> Json:
    """An item for each event of the dashboard's data; under `_mtabench` its numbers, for programs."""
    events = sorted(data["events"], key=lambda event: -event["bad"])[:MOST_ITEMS]
    return {
        "version": "https://jsonfeed.org/version/1.1",
        "title": data["title"],
        "description": "Changes of measured times, found by mtabench dashboard",
        "language": "en",
        "items": [_item(data, event) for event in events],
    }


def headline(data: Json, event: Json) -> str:
    """An event in a sentence."""
    cells = len({data["changes"][number]["cell"] for number in event["changes"]})
    mean = " on average" if cells > 1 else ""
    what = f"{cells} cells" if cells > 1 else _cells(data, event)[0]["name"]
    doubt = ""
    if event["unexplained"]:
        doubt = ", which no commit explains"
    elif not any(data["changes"][number]["evidence"] in SURE for number in event["changes"]):
        doubt = ", not confirmed yet"
    return f"{what} {percent(event['change'])}{mean}: {revisions(data, event)}{doubt}"


def revisions(data: Json, event: Json) -> str:
    """The last good and the first bad revision; runs, where revisions are unknown."""
    shas, ids = data["runs"]["git_sha"], data["runs"]["run_id"]
    good, bad = (shas[run][:12] or f"run {ids[run]}" for run in (event["good"], event["bad"]))
    return f"{good}..{bad}"


def percent(change: float) -> str:
    """A change in words."""
    return f"{abs(change):.1%} {'slower' if change > 0 else 'faster'}".replace("%", " %")


def _item(data: Json, event: Json) -> Json:
    runs = data["runs"]
    cells = _cells(data, event)
    lines = [
        f"{cell['name']}: {cell['before_ms']:g} ms to {cell['after_ms']:g} ms, {percent(cell['change'])}"
        for cell in cells
    ]
    if len(lines) > MOST_CELLS:
        lines = [*lines[:MOST_CELLS], f"and {len(lines) - MOST_CELLS} more"]
    good, bad = runs["git_sha"][event["good"]], runs["git_sha"][event["bad"]]
    link = compare_url(data["repo_url"], good, bad)
    return {
        "id": _identity(data, event),
        "title": headline(data, event),
        "content_text": "\n".join([*lines, *(f"Note: {note}" for note in event["notes"])]),
        "date_published": runs["started_utc"][event["bad"]],
        "tags": ["slower" if event["slower"] else "faster", event["device"]],
        **({"external_url": link} if link else {}),
        EXTENSION: {
            "change": event["change"],
            "good_sha": good,
            "bad_sha": bad,
            "lasting": event["lasting"],
            "unexplained": event["unexplained"],
            "evidence": dict(Counter(cell["evidence"] for cell in cells)),
            "notes": event["notes"],
            "cells": cells,
        },
    }


def _cells(data: Json, event: Json) -> list[Json]:
    cells = data["cells"]
    return [
        {
            "id": cells["id"][one["cell"]],
            "name": cells["name"][one["cell"]],
            **{name: one[name] for name in ("change", "before_ms", "after_ms", "evidence", "lasting")},
        }
        for one in (data["changes"][number] for number in event["changes"])
    ]


def _identity(data: Json, event: Json) -> str:
    """The same for the same event in the next dashboard, so that readers do not see it twice."""
    runs = data["runs"]
    ends = [runs["git_sha"][run] or runs["run_id"][run] for run in (event["good"], event["bad"])]
    kind = "slower" if event["slower"] else "faster"
    parts = (kind, event["device"], *ends, *(["unexplained"] if event["unexplained"] else []))
    digest = hashlib.sha256("\n".join(parts).encode()).hexdigest()
    return f"urn:mtabench:{kind}:{digest[:16]}"


def parse_repo_url(url: str) -> str:
    """The address without a slash or `.git` at its end; raises UsageError for what is no plain http(s) address."""
    address = url.strip().rstrip("/").removesuffix(".git")
    if not _URL.fullmatch(address):
        raise UsageError(
            f"--repo-url {url!r} is not an address of a repository; expected one such as https://github.com/owner/name"
        )
    return address


def compare_url(repo_url: str, good_sha: str, bad_sha: str) -> str:
    """The page of the commits after `good_sha` up to `bad_sha`; empty without a repository or revisions."""
    if not repo_url or not _SHA.fullmatch(bad_sha):
        return ""
    if not _SHA.fullmatch(good_sha) or good_sha == bad_sha:
        return f"{repo_url}/commit/{bad_sha}"
    return f"{repo_url}/compare/{good_sha}...{bad_sha}"
