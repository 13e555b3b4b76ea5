"""The changes of a dashboard in a sentence each, and the address of the repository whose commits they name."""

from __future__ import annotations

import re

from mtabench.dashboard.data import Json
from mtabench.dashboard.findings import SURE
from mtabench.errors import UsageError

_URL = re.compile(r"https?://[A-Za-z0-9.\-]+(:\d{1,5})?(/[A-Za-z0-9._~/\-]*)?")


def headline(data: Json, event: Json) -> str:
    """An event in a sentence."""
    changes = [data["changes"][number] for number in event["changes"]]
    cells = {change["cell"] for change in changes}
    what = f"{len(cells)} cells" if len(cells) > 1 else data["cells"]["name"][changes[0]["cell"]]
    mean = " on average" if len(cells) > 1 else ""
    size = f"{abs(event['change']):.1%}".replace("%", " %") + (" slower" if event["slower"] else " faster")
    shas, ids = data["runs"]["git_sha"], data["runs"]["run_id"]
    good, bad = (shas[run][:12] or f"run {ids[run]}" for run in (event["good"], event["bad"]))
    doubt = ""
    if event["unexplained"]:
        doubt = ", which no commit explains"
    elif not any(change["evidence"] in SURE for change in changes):
        doubt = ", not confirmed yet"
    return f"{what} {size}{mean}: {good}..{bad}{doubt}"


def parse_repo_url(url: str) -> str:
    """The address without a slash or `.git` at its end; raises UsageError for what is no plain http(s) address."""
    address = url.strip().rstrip("/").removesuffix(".git")
    if not _URL.fullmatch(address):
        raise UsageError(
            f"--repo-url {url!r} is not an address of a repository; expected one such as https://github.com/owner/name"
        )
    return address
