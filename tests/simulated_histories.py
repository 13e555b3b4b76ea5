"""Results files of many runs with times that are given, for the tests of `mtabench dashboard`."""

import hashlib
from datetime import UTC, datetime, timedelta

import numpy as np
import pandas as pd

from mtabench.results.results_file import COLUMNS

START = datetime(2026, 1, 1, tzinfo=UTC)
DEFAULTS = dict.fromkeys(COLUMNS, "") | {
    "schema_version": "1", "pass": "fwd", "impl": "triton", "op": "conv-attention", "dtype": "bf16", "batch": "1",
    "heads": "16", "kv_heads": "16", "seq": "1024", "head_dim": "64", "conv_q": "6", "conv_k": "11", "causal": "true",
    "status": "ok", "rounds": "10", "samples": "100", "timer": "events", "cache": "cold", "device": "some GPU",
    "driver": "580.1", "cuda": "13.0", "torch": "2.11.0", "triton": "3.6.0", "mtabench": "0.1.0",
    "git_dirty": "false",
}  # fmt: skip


def sha(run):
    """The revision of a run."""
    return hashlib.sha1(str(run).encode()).hexdigest()[:12]


def row(run, ms, width=0.002, **changes):
    """A row of a run, one run a day; `ms` is a median with an interval of `width` to both sides, or a status."""
    started = START + timedelta(days=run)
    found = DEFAULTS | {"run_id": f"run-{run}", "started_utc": f"{started:%Y-%m-%dT%H:%M:%SZ}", "git_sha": sha(run)}
    if isinstance(ms, str):
        return found | {"status": ms, "reason": f"{ms} because"} | changes
    times = {"median_ms": ms, "ci95_low_ms": ms * (1 - width), "ci95_high_ms": ms * (1 + width)}
    return found | {name: f"{value:.6g}" for name, value in times.items()} | changes


def columns(rows):
    """The rows as `read_file` gives a file: texts by column."""
    return {name: [one[name] for one in rows] for name in COLUMNS}


def write(path, rows):
    """Write a results file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    pd.DataFrame(rows, columns=[*COLUMNS]).to_csv(path, index=False)
    return path


def write_histories(folder, histories):
    """Write a file a run: `histories` has, for changes that make a cell, its times (or status, or None) by run."""
    longest = max(len(times) for _, times in histories)
    for run in range(longest):
        rows = [row(run, times[run], **cell) for cell, times in histories if run < len(times) and times[run]]
        if rows:
            write(folder / f"run-{run:04}.csv", rows)
    return folder


def steady(count, ms=1.0, noise=0.003, seed=0):
    """Times around `ms`."""
    return (ms * np.exp(np.random.default_rng(seed).normal(0, noise, count))).tolist()


def stepped(count, at, change, ms=1.0, noise=0.003, seed=0):
    """The same with a change, such as 0.05, from the run `at` on."""
    times = steady(count, ms, noise, seed)
    return times[:at] + [time * (1 + change) for time in times[at:]]


def a_year(folder):
    """Forty runs: a slowdown of 12 cells, one undone, a speedup, a drift, a failure, one that never worked."""
    histories = []
    for number, seq in enumerate((1024, 2048, 4096, 8192)):
        for head_dim in (64, 128):
            cell = {"seq": f"{seq}", "head_dim": f"{head_dim}"}
            seed = 10 * number + head_dim
            slow = stepped(40, 31, 0.07, 2.0**number, seed=seed)
            histories.append((cell, slow if seq > 1024 else steady(40, 1.0, seed=seed)))
            histories.append((cell | {"pass": "bwd"}, stepped(40, 31, 0.05, 3 * 2.0**number, seed=seed + 1)))
            histories.append((cell | {"impl": "eager"}, steady(40, 50 * 2.0**number, seed=seed + 2)))
    cells = [{"impl": "compile", "seq": f"{seq}"} for seq in (1024, 2048, 4096, 8192, 16384)]
    undone = stepped(40, 12, 0.1, 20.0, seed=5)
    undone[20:] = steady(20, 20.0, seed=6)
    drifting = [time * (1 + 0.002 * run) for run, time in enumerate(steady(40, 40.0, seed=7))]
    faster = stepped(40, 25, -0.2, 80.0, seed=8)
    failing = [*steady(36, 160.0, seed=9), *["error"] * 4]
    histories += zip(cells, (undone, drifting, faster, failing, ["oom"] * 40), strict=True)
    return write_histories(folder, histories)
