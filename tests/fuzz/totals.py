"""How many cases passed, by operation, backend and pass: counted, printed and kept in a CSV file."""

from __future__ import annotations

import csv
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fuzz.families import family, source_hashes
from fuzz.workers import Ended
from mtabench.errors import UsageError

COLUMNS = (
    "date", "device", "torch", "triton", "cuda", "driver", "git_sha", "git_dirty", "seed", "op", "backend", "pass",
    "cases", "refused", "failures", "seconds", "kernels", "sources",
)  # fmt: skip


@dataclass
class Count:
    """Cases of one operation, backend and pass; `seconds` that they took, of all workers; the kernels that ran."""

    cases: int = 0
    refused: int = 0
    failures: int = 0
    seconds: float = 0.0
    close_looks: int = 0  # whose errors were compared with what rounding may leave
    marginal: int = 0  # just beyond a bound, and within it with other values
    kernels: set[str] = field(default_factory=set)


class Totals:
    """Counts by operation, backend and pass."""

    def __init__(self) -> None:
        self.counts: dict[tuple[str, str, str], Count] = {}

    def add(self, ended: Ended) -> None:
        """One more case."""
        count = self.counts.setdefault((ended.op, ended.backend, ended.pass_), Count())
        count.cases += 1
        count.refused += ended.refused
        count.failures += bool(ended.wrong)
        count.seconds += ended.seconds
        count.close_looks += ended.close_look
        count.marginal += ended.marginal
        count.kernels |= {*ended.kernels}

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
        form = "{:<14} {:<8} {:<7} {:>8} {:>8} {:>9} {:>9} {:>9} {:>8} {:>12}"
        numbers = "cases", "refused", "failures", "marginal", "seconds", "kernels", "close looks"
        yield form.format("op", "backend", "pass", *numbers)
        for key, count in sorted(self.counts.items()):
            found = count.cases, count.refused, count.failures, count.marginal, f"{count.seconds:.0f}"
            yield form.format(*key, *found, len(count.kernels), count.close_looks)

    def append_to(self, path: Path, facts: Mapping[str, Any]) -> None:
        """A row an operation, backend and pass at the end of the file, which `check_totals_file` has seen."""
        is_new = not path.exists()
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, COLUMNS, extrasaction="ignore", lineterminator="\n")
            if is_new:
                writer.writeheader()
            for (op, backend, pass_), count in sorted(self.counts.items()):
                own = {"op": op, "backend": backend, "pass": pass_, "sources": source_hashes()[family(op, pass_)]}
                numbers = {"cases": count.cases, "refused": count.refused, "failures": count.failures}
                numbers |= {"seconds": f"{count.seconds:.1f}", "kernels": len(count.kernels)}
                writer.writerow({**facts, **own, **numbers})


def check_totals_file(path: Path) -> None:
    """Raise UsageError for a file that is there and holds no totals of a fuzz."""
    if path.is_dir():
        raise UsageError(f"--out {path} is a folder; give a CSV file, new or one of an earlier fuzz")
    if path.exists():
        with path.open(encoding="utf-8", errors="replace") as file:
            header = file.readline().rstrip("\n")
        if header != ",".join(COLUMNS):
            raise UsageError(f"--out {path} holds no totals of a fuzz; give a new file, or one of an earlier fuzz")
