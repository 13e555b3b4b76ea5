"""The folder of static files: made anew or written over an earlier one of ours, and never over anything else."""

import json
from collections.abc import Mapping
from pathlib import Path

from mtabench.dashboard.data import Json
from mtabench.errors import UsageError
from mtabench.pages.page import build_page
from mtabench.results.outputs import written

MARKER = ".mtabench-dashboard"
SCRIPTS = ("table.js", "history-chart.js", "dashboard-parts.js", "dashboard-news.js", "dashboard.js")
# HTML of ours, without a word from a results file; our scripts fill it from the data.
BODY = """\
<p id="verdict" class="verdict"></p>
<p id="scope" class="quiet"></p>
<div class="columns">
<div class="news">
<section id="slower" aria-labelledby="slower-title">
<h2 id="slower-title">Slower</h2>
<div id="slower-list"></div>
</section>
<section id="failing" aria-labelledby="failing-title" hidden>
<h2 id="failing-title">Failing now</h2>
<div id="failing-list"></div>
</section>
</div>
<aside id="chosen" aria-labelledby="chosen-title">
<h2 id="chosen-title" tabindex="-1" aria-live="polite"></h2>
<p id="chosen-facts" class="quiet"></p>
<p id="chosen-now"></p>
<div id="chosen-chart" class="chart"></div>
<ul id="chosen-changes"></ul>
<details id="chosen-runs"><summary></summary><div></div></details>
</aside>
<div class="rest">
<section id="faster" aria-labelledby="faster-title">
<h2 id="faster-title">Faster</h2>
<div id="faster-list"></div>
</section>
<section id="cells" aria-labelledby="cells-title">
<h2 id="cells-title">All cells</h2>
<div id="cells-table"></div>
</section>
</div>
</div>
<section id="about" aria-labelledby="about-title">
<h2 id="about-title">How to read this</h2>
<p>A cell is one implementation at one shape on one device, timed in one way. Its history is ordered by the time at
which runs started. Times are medians; bands and ± are 95&nbsp;% intervals of the median within a run, and do not hold
what differs from run to run.</p>
<dl id="rules"></dl>
<p>A change lies between the last run before it and the first after it. Any commit between the two may be its cause,
and so may the machine: where versions differ, the change says so. No commit explains a change between two runs of one
commit, nor one that plain attention by other projects shares: those are folded below the others, and in no count of
what got slower or faster. Intervals of time that were not measured cannot be dated more closely.</p>
<div id="broken"></div>
<p id="made" class="quiet"></p>
<p class="no-print">For other tools: <a href="data.json">data.json</a>, <a href="badge.json">badge.json</a>.</p>
</section>
"""


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
        "index.html": build_page(data["title"], BODY, data, SCRIPTS, styles=("dashboard.css",)),
        "data.json": _json(data),
        "badge.json": _json(badge(data["counts"])),
    }


def write_site(folder: Path, files: Mapping[str, str]) -> None:
    """Write the files, each whole or not at all; raises UsageError where that cannot be done."""
    check_site(folder)
    for name, text in {MARKER: "This folder is written by mtabench dashboard.\n", **files}.items():
        with written(folder / name) as file:
            file.write(text.encode())


def _json(content: object) -> str:
    return json.dumps(content, allow_nan=False, separators=(",", ":")) + "\n"


def badge(counts: Mapping[str, int]) -> dict[str, object]:
    """The endpoint of shields.io (https://shields.io/badges/endpoint-badge) for the counts of the dashboard's data."""
    message, colour = ("nothing slower", "brightgreen") if counts["compared"] else ("nothing compared", "lightgrey")
    if counts["maybe_slower"]:
        message, colour = f"{counts['maybe_slower']} maybe slower", "yellow"
    if parts := [f"{counts[name]} {name}" for name in ("slower", "broken") if counts[name]]:
        message, colour = ", ".join(parts), "red"
    return {"schemaVersion": 1, "label": "performance", "message": message, "color": colour}
