"""Do two timers agree? Measures the same cells with both, in turns, and writes a table of their medians.

    python scripts/crosscheck_timers.py --out results/nvidia-h200/timers.csv

Needs an NVIDIA GPU and the package cuda-bench (pip install -e '.[nvbench]'). Without options it takes ten cells of
10 us to 10 ms, `--repeat` times a timer. Fails if two medians differ by more than 1 %.
"""

from __future__ import annotations

import argparse
import csv
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median

from mtabench.files.results import KEY_COLUMNS, key_of_row, read_file

# Kernels that leave the clock alone: one under a power cap has another clock in every process. As many samples with
# either timer, since it falls with the temperature too.
_FLASH = "fwd --impl sdpa-flash --batch 1 --heads 16 --dtype bf16 --rounds 8"
SWEEPS = (
    f"{_FLASH} --head-dim 64 --seq 1k..32k", f"{_FLASH} --head-dim 128 --seq 4k,16k",
    "fwd --impl triton --batch 1 --heads 16 --dtype bf16 --rounds 8 --head-dim 64 --conv 6x11 --seq 4k,8k",
)  # fmt: skip
ALLOWED = 0.01
SHOWN = ("impl", "seq", "median_1_ms", "median_2_ms", "difference", "reason")
FACTS = ("device", "driver", "cuda", "torch", "triton", "git_sha", "git_dirty")


def main() -> int:
    """Measure, print and write the table; 1 if a difference is larger than allowed, or a cell has no time."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--timers", default="events,nvbench", help="two timers, such as events,graph")
    parser.add_argument("--sweep", action="append", help="PASS and options of a sweep to take instead; may be repeated")
    parser.add_argument("--repeat", type=int, default=3, help="how often each timer measures a cell")
    parser.add_argument("--out", type=Path, required=True, help="the CSV file to write")
    options = parser.parse_args()
    timers = options.timers.split(",")
    if len(timers) != 2 or options.repeat < 1:
        parser.error("--timers expects two names, and --repeat at least 1")
    if options.out.exists():
        parser.error(f"{options.out} already exists; give another --out")
    found: list[dict[tuple[str, ...], list[dict[str, str]]]] = [{}, {}]
    with tempfile.TemporaryDirectory() as folder:
        for turn in range(options.repeat):
            for number in (0, 1) if turn % 2 == 0 else (1, 0):
                path = Path(folder, f"{turn}-{number}.csv")
                for sweep in options.sweep or SWEEPS:
                    measure(sweep, timers[number], path)
                for row in read_file(path).rows():
                    found[number].setdefault(key_of_row(row), []).append(row)
    rows = list(compare(found, timers))
    write(options.out, rows)
    worst = max((abs(float(row["difference"])) for row in rows if row["difference"]), default=0.0)
    failed = [row for row in rows if not row["difference"]]
    print(f"{len(rows)} cells, the largest difference {100 * worst:.2f} %; {len(failed)} without a time; {options.out}")
    return int(bool(failed) or worst > ALLOWED or not rows)


def measure(sweep: str, timer: str, path: Path) -> None:
    """Run a sweep with that timer; its rows are added to those in `path`. NVBench has a process for each cell."""
    words = [*shlex.split(sweep), "--timer", timer, "--no-plot", "--out", str(path), "--resume"]
    done = subprocess.run([sys.executable, "-m", "mtabench", *words])
    if done.returncode not in (0, 4, 5):  # what is wrong or has no time, its row says
        sys.exit(f"mtabench {shlex.join(words)} ended with exit code {done.returncode}")


def compare(
    found: Sequence[dict[tuple[str, ...], list[dict[str, str]]]], timers: Sequence[str]
) -> Iterator[dict[str, str]]:
    """A row a cell: the median of each timer's medians over the repeats, in ms, and how the second differs."""
    for key in found[0] | found[1]:
        sides = [rows.get(key, []) for rows in found]
        first = next(row for rows in sides for row in rows)
        table = dict(zip(KEY_COLUMNS, key, strict=True)) | {name: first[name] for name in FACTS}
        good = [[float(row["median_ms"]) for row in rows if row["status"] == "ok"] for rows in sides]
        for number, (timer, times) in enumerate(zip(timers, good, strict=True), start=1):
            table |= {f"timer_{number}": timer, f"repeats_{number}": str(len(times))}
            table[f"median_{number}_ms"] = f"{median(times):.6g}" if times else ""
        table["difference"] = f"{median(good[1]) / median(good[0]) - 1:.6f}" if all(good) else ""
        reasons = {f"{row['status']}: {row['reason']}" for rows in sides for row in rows if row["status"] != "ok"}
        table["reason"] = "; ".join(sorted(reasons))
        print(*(table[name] for name in SHOWN))
        yield table


def write(path: Path, rows: Sequence[dict[str, str]]) -> None:
    """Write the table."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(rows[0]) if rows else [], lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


if __name__ == "__main__":
    sys.exit(main())
