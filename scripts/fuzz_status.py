"""Says for each family of kernels how many random cases its sources, as they are, have had on an H200.

    python3 scripts/fuzz_status.py

The exit code is 1 if a family's newest row in results/nvidia-h200/fuzz.csv is of other sources, or has a failure. A
wheel is not built then. docs/fuzzing.md says how to fuzz a family.
"""

from __future__ import annotations

import csv
import sys
from pathlib import Path

sys.path.insert(1, str(Path(__file__).parents[1] / "tests"))

from fuzz.families import family, source_hashes

ROOT = Path(__file__).parents[1]
TOTALS = ROOT / "results/nvidia-h200/fuzz.csv"
LINE = "{:<22} {:<10} {:<14} {:>8} {:>8} {:>8}"


def main(totals: Path = TOTALS) -> int:
    """Print a line a family, and a sentence on standard error for each that may not be released."""
    with totals.open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    print(LINE.format("family", "newest", "commit", "kernels", "cases", "failures"))
    stale = False
    for name, sources in source_hashes().items():
        of_family = [row for row in rows if family(row["op"], row["pass"]) == name]
        newest = max(of_family, key=lambda row: row["date"], default=None)
        current = [row for row in of_family if row["sources"] == sources]
        cases, failures = (sum(int(row[column]) for row in current) for column in ("cases", "failures"))
        is_current = newest is not None and newest["sources"] == sources
        date, sha = (newest["date"][:10], newest["git_sha"]) if newest else ("never", "")
        print(LINE.format(name, date, sha, "as now" if is_current else "others", cases, failures))
        newest_run = [row for row in current if newest and row["date"] == newest["date"]]
        if is_current and (failed := sum(int(row["failures"]) for row in newest_run)):
            print(f"{name} failed in {failed} cases of its fuzz of {date}: mend it, and fuzz it again", file=sys.stderr)
            stale = True
        if not is_current:
            op, _, pass_ = name.partition(" ")
            command = f"scripts/fuzz_kernels.py --op {op} --pass {pass_ or 'bwd'} --jobs 14 --out {_shown(totals)}"
            state = f"has changed since its fuzz of {date}" if newest else "was never fuzzed"
            print(f"{name} {state}: run {command} on a GPU and commit that file", file=sys.stderr)
            stale = True
    return int(stale)


def _shown(path: Path) -> str:
    return str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else str(path)


if __name__ == "__main__":
    sys.exit(main())
