"""Start times: how long a person waits for commands that measure nothing, each in a process of its own.

    PYTHONPATH=.:kernels python3 scripts/start_times.py --out results/cpu/start-times.csv

The time on a core changes less than the others if other jobs run.
"""

from __future__ import annotations

import argparse
import csv
import os
import resource
import subprocess
import sys
from pathlib import Path
from statistics import median
from time import perf_counter

from mtabench import environment

COMMANDS = ("--version", "--help", "fwd --help", "list", "env", "fwd --seq 4k..1k")


def main() -> int:
    """Measure, print, and write the table if `--out` is given."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=7)
    parser.add_argument("--out", type=Path, help="the CSV file to write")
    options = parser.parse_args()
    if options.out and options.out.exists():
        parser.error(f"{options.out} already exists; give another --out")
    rows = []
    for command in COMMANDS:
        seconds(command)  # whatever the first one compiles
        times, cpu_times = zip(*(seconds(command) for _ in range(options.runs)), strict=True)
        row = {"median_s": median(times), "least_s": min(times), "least_cpu_s": min(cpu_times)}
        rows.append({"command": command} | {name: f"{value:.3f}" for name, value in row.items()})
        print("  ".join(f"{key} {value}" for key, value in rows[-1].items()), flush=True)
    if options.out:
        facts = environment.describe()
        options.out.parent.mkdir(parents=True, exist_ok=True)
        with options.out.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, [*rows[0], "runs", "cores", *facts], lineterminator="\n")
            writer.writeheader()
            writer.writerows(row | {"runs": options.runs, "cores": os.cpu_count()} | facts for row in rows)
    return 0


def seconds(command: str) -> tuple[float, float]:
    """From the start of `mtabench COMMAND` to its end, and of them on a core; its exit code does not matter."""
    started, used = perf_counter(), cpu_seconds()
    subprocess.run([sys.executable, "-m", "mtabench", *command.split()], capture_output=True, check=False)
    return perf_counter() - started, cpu_seconds() - used


def cpu_seconds() -> float:
    """What the processes that this one waited for have used of the cores."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


if __name__ == "__main__":
    sys.exit(main())
