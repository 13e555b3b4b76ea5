"""The command `mtabench dashboard`: read a folder of results, look for changes, write the site, say what was found."""

import re
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

from mtabench.console import make_console, say
from mtabench.dashboard.data import DashboardSettings, Json, check_site, dashboard_data, site_files, write_site
from mtabench.dashboard.findings import SURE, find
from mtabench.dashboard.histories import Archive, read_archive
from mtabench.errors import UsageError
from mtabench.problem.axes import parse_percent
from mtabench.prose import plural

MOST_SHOWN = 5
MOST_DAYS = 36_500

_URL = re.compile(r"https?://[A-Za-z0-9.\-]+(:\d{1,5})?(/[A-Za-z0-9._~/\-]*)?")


def run(results: Path, out: Path, repo_url: str | None, title: str | None, threshold: str, days: int) -> int:
    """Make a site of static files from the results below a folder. Raises UsageError; then nothing is written."""
    share = parse_percent(threshold, "--threshold")
    if not 1 <= days <= MOST_DAYS:
        raise UsageError(f"--days {days} is no time to look back on; expected 1 to {MOST_DAYS}")
    address = _repo_url(repo_url) if repo_url else ""
    check_site(out)
    console = make_console()
    with console.status("reading files"):
        archive = read_archive(results)
    with console.status("looking for changes"):
        findings = find(archive.runs, archive.histories, share, days)
    made = f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ}"
    data = dashboard_data(
        archive, findings, DashboardSettings(title or "Performance history", share, days, address, made)
    )
    write_site(out, site_files(data))
    for text in (*_read_lines(archive), *_slowdowns(data)):
        say(console, text)
    if broken := data["counts"]["broken"]:
        say(console, f"{plural(broken, 'cell')} {'fails' if broken == 1 else 'fail'} that did not before")
    say(console, f"site: {out / 'index.html'}")
    return 0


def _read_lines(archive: Archive) -> Iterator[str]:
    cells, runs = plural(len(archive.histories), "cell"), plural(len(archive.runs), "run")
    revisions = plural(len({run.git_sha for run in archive.runs} - {""}), "revision")
    files, rows = plural(archive.files, "file"), plural(archive.rows, "row")
    yield f"read {files}: {runs} of {revisions}, {cells}, {rows}"
    if archive.skipped:
        yield "left out: " + ", ".join(f"{what}: {count}" for what, count in archive.skipped.items())
    if archive.repeated:
        yield f"left out: {plural(archive.repeated, 'row')} that another file had already"
    for name, reason in archive.broken:
        yield f"broken: {name}: {reason}" if name not in reason else f"broken: {reason}"


def _slowdowns(data: Json) -> Iterator[str]:
    """The recent slowdowns that last: a line for each that a commit may explain, and how many others there are."""
    found = [event for event in data["events"] if event["slower"] and event["recent"] and event["lasting"]]
    explained = [event for event in found if not event["unexplained"]]
    yield from (_headline(data, event) for event in explained[:MOST_SHOWN])
    if len(explained) > MOST_SHOWN:
        yield f"and {plural(len(explained) - MOST_SHOWN, 'more change')} to slower"
    if len(found) > len(explained):
        if not explained:
            yield "nothing got slower that a commit may explain"
        others = plural(len(found) - len(explained), f"{'other ' * bool(explained)}change")
        yield (
            f"{others} to slower, probably the machine: "
            "the same commit before and after, or plain attention changed alike"
        )


def _headline(data: Json, event: Json) -> str:
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


def _repo_url(url: str) -> str:
    """The address without a slash or `.git` at its end; raises UsageError for what is no plain http(s) address."""
    address = url.strip().rstrip("/").removesuffix(".git")
    if not _URL.fullmatch(address):
        raise UsageError(
            f"--repo-url {url!r} is not an address of a repository; expected one such as https://github.com/owner/name"
        )
    return address
