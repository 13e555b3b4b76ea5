"""All that the page shows and `data.json` holds, in JSON's types; docs/dashboard.md describes it field by field.

Texts from results files are printable and bounded; numbers have five significant digits, and None stands for unknown.
"""

import hashlib
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import mtabench
from mtabench.dashboard.changes import FEW, FEW_LEAST, FEWEST_RUNS, REACH
from mtabench.dashboard.files import Archive
from mtabench.dashboard.findings import Event, Findings, Found
from mtabench.dashboard.histories import CELL_COLUMNS, VERSIONS, History
from mtabench.pages.page import shown_text
from mtabench.problem.operations import PLAIN, STEPS, taps_text
from mtabench.results.results_file import LATER_COLUMNS

FORMAT, VERSION = "mtabench-dashboard", 1
MOST_BROKEN = 100
# What tells cells apart in a short label, in this order; those that may follow from the rest are then left out.
LABEL_COLUMNS = (
    "pass", "impl", "seq", "head_dim", *STEPS, "layers", "dtype", "batch", "heads", "kv_heads", "causal", "splits",
    "timer", "cache", "device",
)  # fmt: skip
FOLLOWING = ("cache", "timer", "batch")
WORDS = {"seq": "{}", "head_dim": "d{}", "batch": "batch {}", "heads": "heads {}", "kv_heads": "KV {}",
         "splits": "splits {}", "mix": "mix {}", "post_conv": "post conv {}", "norm": "norm {}", "gate": "gate {}",
         "conv_every": "conv every {}", "page_size": "page size {}", "layers": "{} layers"}  # fmt: skip

Json = dict[str, Any]


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
    """Each cell in the few words that tell it from the others here."""
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
    told = [name for name in LABEL_COLUMNS if name in ("pass", "impl", "seq", *several)]
    for spare in FOLLOWING:
        without = [name for name in told if name != spare]
        if len({tuple(row[name] for name in without) for row in rows}) == len(rows):
            told = without
    return [" ".join(WORDS.get(name, "{}").format(row[name]) for name in told if row[name]) for row in rows]


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
