"""Do our timer and NVIDIA's agree? Measures the same cells with CUDA events and with NVBench, and writes a table.

    python scripts/crosscheck_timers.py --out results/nvidia-h200/timers.csv

Needs an NVIDIA GPU and the package cuda-bench (pip install -e '.[nvbench]'). Twenty cells of 8 us to 10 ms run, each in
a process of its own, since processes differ by more than the timers do. Both timers alternate round by round on the
same tensors. Fails if two medians of 10 us or more differ by more than 1 %.
"""

from __future__ import annotations

import argparse
import csv
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

from nvbench_timer import check_nvbench, measure_beside_nvbench

from mtabench.checking.oracle import Oracle
from mtabench.environment import describe, resolve_device
from mtabench.errors import UsageError
from mtabench.measuring import timing
from mtabench.measuring.statistics import summarize
from mtabench.problem.case import Case
from mtabench.problem.inputs import make_inputs
from mtabench.registry import implementation_of
from mtabench.results.results_file import KEY_COLUMNS, key_of, text_of
from mtabench.sweeps.plan import Options, make_plan

# Kernels that leave the clock alone: one under a power cap has another clock in every round.
CELLS = (
    Options(
        "fwd", impl="hopper,sdpa-cudnn,sdpa-flash", heads="16", head_dim="64", dtype="bf16", batch="1", seq="128..2k"
    ),
    Options("fwd", impl="sdpa-flash", heads="16", head_dim="64", dtype="bf16", batch="16", seq="512..8k"),
)
ROUNDS = 20
ALLOWED = 0.01
SHORTEST_MS = 0.01  # of cells that have to agree
FACTS = ("device", "driver", "cuda", "torch", "triton", "git_sha", "git_dirty")


def main() -> int:
    """Measure, print and write the table; 1 if a difference is larger than allowed, or a cell has no time."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="the CSV file to write")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="of ten samples, with each timer")
    options = parser.parse_args()
    if options.rounds < 2:
        parser.error(f"--rounds {options.rounds} is too few; give at least 2")
    if options.out.exists():
        parser.error(f"{options.out} already exists; give another --out")
    try:
        resolve_device("cuda")
        check_nvbench()
    except UsageError as error:
        parser.error(str(error))
    rows = [measured(case, options.rounds) for case in cells()]
    write(options.out, rows)
    long = [row for row in rows if row["difference"] and float(row["events_ms"]) >= SHORTEST_MS]
    worst = max((abs(float(row["difference"])) for row in long), default=0.0)
    failed = [row for row in rows if row["reason"]]
    found = (
        f"{len(long)} of {len(rows)} cells take 10 us or more, of these the largest difference is {100 * worst:.2f} %"
    )
    print(f"{found}; {len(failed)} without a time; {options.out}")
    return int(bool(failed) or worst > ALLOWED)


def cells() -> list[Case]:
    """The cells to measure."""
    return [case for part in CELLS for case in make_plan(part, "cuda").cases]


def measured(case: Case, rounds: int) -> dict[str, str]:
    """The row of a cell: the median of each timer in ms, and how NVBench's differs."""
    row = dict(zip(KEY_COLUMNS, key_of(case), strict=True))
    row |= dict.fromkeys((*FACTS, "rounds", "events_ms", "nvbench_ms", "difference", "reason"), "")
    try:
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as process:
            facts, events_ms, nvbench_ms = process.submit(medians, case, rounds).result()
    except Exception as error:  # whatever it is, the other cells are measured
        row["reason"] = " ".join(f"{type(error).__name__}: {error}".split())
    else:
        row |= {name: text_of(facts[name]) for name in FACTS}
        row |= {"rounds": str(rounds), "events_ms": f"{events_ms:.6g}", "nvbench_ms": f"{nvbench_ms:.6g}"}
        row["difference"] = f"{nvbench_ms / events_ms - 1:.6f}"
    print(*(row[name] for name in ("impl", "batch", "seq", "events_ms", "nvbench_ms", "difference", "reason")))
    return row


def medians(case: Case, rounds: int) -> tuple[dict[str, object], float, float]:
    """In a process for one cell: check it, time it, and say where; raises ValueError for a wrong result."""
    inputs = make_inputs(case)
    build = implementation_of(case).build
    check = Oracle(case, inputs).check(build(case, inputs)())
    if not check.ok:
        raise ValueError(check.reason)
    cell = timing.timed(case, build, inputs)
    settings = timing.Settings(timer="events", min_rounds=rounds)
    found = measure_beside_nvbench(cell, case.device, settings)
    events_ms, nvbench_ms = (summarize(rounds).median_ms for rounds in found)
    return dict(describe(case.device)), events_ms, nvbench_ms


def write(path: Path, rows: Sequence[dict[str, str]]) -> None:
    """Write the table."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


if __name__ == "__main__":
    sys.exit(main())
