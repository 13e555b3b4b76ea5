"""How many cases passed, by operation, backend and pass: counted, printed and kept in a CSV file."""

from __future__ import annotations

import csv
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from mtabench.errors import UsageError

COLUMNS = (
    "date", "device", "torch", "triton", "cuda", "driver", "git_sha", "git_dirty", "seed", "op", "backend", "pass",
    "cases", "refused", "failures", "seconds",
)  # fmt: skip


@dataclass
class Count:
    """Cases of one operation, backend and pass; `seconds` that they took, of all workers."""

    cases: int = 0
    refused: int = 0
    failures: int = 0
    seconds: float = 0.0


class Totals:
    """Counts by operation, backend and pass."""

    def __init__(self) -> None:
        self.counts: dict[tuple[str, str, str], Count] = {}

    def add(self, op: str, backend: str, pass_: str, *, refused: bool, failed: bool, seconds: float) -> None:
        """One more case."""
        count = self.counts.setdefault((op, backend, pass_), Count())
        count.cases += 1
        count.refused += refused
        count.failures += failed
        count.seconds += seconds

    @property
    def cases(self) -> int:
        """Of all."""
        return sum(count.cases for count in self.counts.values())

    @property
    def failures(self) -> int:
        """Of all."""
        return sum(count.failures for count in self.counts.values())

    def lines(self) -> Iterator[str]:
        """A table, as text."""
        form = "{:<14} {:<8} {:<7} {:>8} {:>8} {:>9} {:>9}"
        yield form.format("op", "backend", "pass", "cases", "refused", "failures", "seconds")
        for key, count in sorted(self.counts.items()):
            yield form.format(*key, count.cases, count.refused, count.failures, f"{count.seconds:.0f}")

    def append_to(self, path: Path, facts: Mapping[str, Any]) -> None:
        """A row an operation, backend and pass at the end of the file, which `check_totals_file` has seen."""
        is_new = not path.exists()
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, COLUMNS, extrasaction="ignore", lineterminator="\n")
            if is_new:
                writer.writeheader()
            for (op, backend, pass_), count in sorted(self.counts.items()):
                own = {"op": op, "backend": backend, "pass": pass_, "seconds": f"{count.seconds:.1f}"}
                writer.writerow({**facts, **asdict(count), **own})


def check_totals_file(path: Path) -> None:
    """Raise UsageError for a file that is there and holds no totals of a fuzz."""
    if path.is_dir():
        raise UsageError(f"--out {path} is a folder; give a CSV file, new or one of an earlier fuzz")
    if path.exists():
        with path.open(encoding="utf-8", errors="replace") as file:
            header = file.readline().rstrip("\n")
        if header != ",".join(COLUMNS):
            raise UsageError(f"--out {path} holds no totals of a fuzz; give a new file, or one of an earlier fuzz")
