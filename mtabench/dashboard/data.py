"""The folder of a dashboard: all that its page shows and `data.json` holds; docs/dashboard.md has each field.

Texts from results files are printable and bounded; numbers have five significant digits, and None stands for unknown.
"""

import hashlib
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import mtabench
from mtabench.dashboard.changes import FEW, FEW_LEAST, FEWEST_RUNS, REACH
from mtabench.dashboard.findings import Event, Findings, Found
from mtabench.dashboard.histories import CELL_COLUMNS, VERSIONS, Archive, History
from mtabench.errors import UsageError
from mtabench.git import SITE_MARKER
from mtabench.pages.page import build_page, shown_text
from mtabench.problem.operations import PLAIN, STEPS, taps_text
from mtabench.results.outputs import written
from mtabench.results.results_file import LATER_COLUMNS

FORMAT, VERSION = "mtabench-dashboard", 1
MOST_BROKEN = 100
# Columns that distinguish cells in a short label, in this order; those that may follow from the rest are then left out.
LABEL_COLUMNS = (
    "pass", "impl", "seq", "head_dim", *STEPS, "layers", "dtype", "batch", "heads", "kv_heads", "causal", "splits",
    "timer", "cache", "device",
)  # fmt: skip
FOLLOWING = ("cache", "timer", "batch")
WORDS = {"seq": "{}", "head_dim": "d{}", "batch": "batch {}", "heads": "heads {}", "kv_heads": "KV {}",
         "splits": "splits {}", "mix": "mix {}", "post_conv": "post conv {}", "norm": "norm {}", "gate": "gate {}",
         "conv_every": "conv every {}", "page_size": "page size {}", "layers": "{} layers"}  # fmt: skip

Json = dict[str, Any]
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


@dataclass(frozen=True, slots=True)
class DashboardSettings:
    """What a dashboard is made with; `repo_url` is empty without a repository, `made_utc` when it was made."""

    title: str
    threshold: float
    days: int
    repo_url: str
    made_utc: str


def dashboard_data(archive: Archive, findings: Findings, settings: DashboardSettings) -> Json:
    """The data of a dashboard."""
    environments = list(dict.fromkeys((run.device, *run.versions) for run in archive.runs))
    timelines: dict[tuple[int, ...], int] = {}
    changes = [found for of_cell in findings.changes for found in of_cell]
    numbers = {id(found): number for number, found in enumerate(changes)}
    return {
        "format": FORMAT,
        "version": VERSION,
        "title": shown_text(settings.title),
        "made_utc": settings.made_utc,
        "mtabench": mtabench.__version__,
        "repo_url": settings.repo_url,
        "rules": {
            "threshold": settings.threshold,
            "few": FEW,
            "few_least": FEW_LEAST,
            "reach": REACH,
            "fewest_runs": FEWEST_RUNS,
            "days": settings.days,
        },
        "read": {
            "files": archive.files,
            "rows": archive.rows,
            "repeated": archive.repeated,
            "skipped": dict(archive.skipped),
            "broken": [
                {"file": shown_text(name), "reason": shown_text(why)} for name, why in archive.broken[:MOST_BROKEN]
            ],
            "broken_files": len(archive.broken),
        },
        "counts": findings.counts,
        "environments": [
            dict(zip(("device", *VERSIONS), map(shown_text, values), strict=True)) for values in environments
        ],
        "runs": {
            "run_id": [shown_text(run.run_id) for run in archive.runs],
            "started_utc": [run.started_utc for run in archive.runs],
            "git_sha": [shown_text(run.git_sha) for run in archive.runs],
            "git_dirty": [run.git_dirty == "true" for run in archive.runs],
            "environment": [environments.index((run.device, *run.versions)) for run in archive.runs],
        },
        "cells": _cells(archive.histories, findings.states),
        "histories": [_history(history, timelines) for history in archive.histories],
        "timelines": [list(runs) for runs in timelines],
        "changes": [_change(found) for found in changes],
        "events": [_event(event, numbers) for event in findings.events],
        "failures": [
            {**asdict(failure), "reason": shown_text(failure.reason), "broken": failure.broken}
            for failure in findings.failures
        ],
    }


def cell_id(cell: Mapping[str, str]) -> str:
    """A short name of a cell that stays the same from one dashboard to the next, for links."""
    # A column that older files lack is in the names of cells that have it alone.
    named = [cell[name] for name in CELL_COLUMNS if cell[name] or name not in LATER_COLUMNS]
    return hashlib.sha256("\n".join(named).encode()).hexdigest()[:12]


def _cells(histories: Sequence[History], states: Sequence[str]) -> Json:
    return {
        "id": [cell_id(history.cell) for history in histories],
        "name": [shown_text(history.name) for history in histories],
        "label": list(map(shown_text, _labels([history.cell for history in histories]))),
        "state": list(states),
        **{name: [shown_text(history.cell[name]) for history in histories] for name in CELL_COLUMNS},
    }


def _labels(cells: Sequence[Mapping[str, str]]) -> list[str]:
    """Each cell in the few words that distinguish it from the others here."""
    rows = [
        {
            **cell,
            **{name: taps_text(cell[f"{name}_q"], cell[f"{name}_k"]) for name in ("conv", "post_conv")},
            "causal": "" if cell["causal"] == "true" else "not causal",
            "kv_heads": "" if cell["kv_heads"] == cell["heads"] else cell["kv_heads"],
        }
        for cell in cells
    ]
    several = [
        name
        for name in LABEL_COLUMNS
        if len({row[name] for row in rows if name not in STEPS or row["op"] != PLAIN}) > 1
    ]
    shown = [name for name in LABEL_COLUMNS if name in ("pass", "impl", "seq", *several)]
    for spare in FOLLOWING:
        without = [name for name in shown if name != spare]
        if len({tuple(row[name] for name in without) for row in rows}) == len(rows):
            shown = without
    return [" ".join(WORDS.get(name, "{}").format(row[name]) for name in shown if row[name]) for row in rows]


def _history(history: History, timelines: dict[tuple[int, ...], int]) -> Json:
    """Times by run; cells that were measured in the same runs share a timeline."""
    failed = {
        str(i): [status, shown_text(reason)] for i, (status, reason) in enumerate(history.outcomes) if status != "ok"
    }
    return {
        "timeline": timelines.setdefault(tuple(map(int, history.runs)), len(timelines)),
        "median_ms": _rounded(history.median_ms),
        "ci95_low_ms": _rounded(history.ci95_low_ms),
        "ci95_high_ms": _rounded(history.ci95_high_ms),
        **({"failed": failed} if failed else {}),
    }


def _rounded(values: Iterable[float]) -> list[float | None]:
    return [None if math.isnan(value) else float(f"{value:.5g}") for value in values]


def _change(found: Found) -> Json:
    change = found.change
    before, after = _rounded((change.before_ms, change.after_ms))
    return {
        "cell": found.cell,
        "good": found.good,
        "bad": found.bad,
        "change": float(f"{change.change:.4g}"),
        "before_ms": before,
        "after_ms": after,
        "evidence": change.evidence,
        "lasting": found.lasting,
    }


def _event(event: Event, numbers: Mapping[int, int]) -> Json:
    return {
        "slower": event.slower,
        "device": shown_text(event.device),
        "good": event.good,
        "bad": event.bad,
        "change": float(f"{event.change:.4g}"),
        "recent": event.recent,
        "lasting": event.lasting,
        "unexplained": event.unexplained,
        "notes": [shown_text(note) for note in event.notes],
        "changes": [numbers[id(found)] for found in event.found],
    }


def check_site(folder: Path) -> None:
    """Raise UsageError unless a site may be written to `folder`: it is empty, ours, or not there yet."""
    if folder.is_symlink() or (folder.exists() and not folder.is_dir()):
        raise UsageError(f"--out {folder} is not a folder; give the name of a folder for the site")
    try:
        foreign = folder.is_dir() and not (folder / SITE_MARKER).is_file() and any(folder.iterdir())
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
    for name, text in {SITE_MARKER: "This folder is written by mtabench dashboard.\n", **files}.items():
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
