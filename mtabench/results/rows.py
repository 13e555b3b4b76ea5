"""From what was measured of a cell to its row: throughput, roofline, speedup, and what makes a time invalid."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mtabench.measuring.statistics import Summary, summarize
from mtabench.problem.case import Case
from mtabench.problem.work import bytes_moved, only_reads, useful_flops
from mtabench.registry import typed_as
from mtabench.results.columns import TABLE
from mtabench.results.results_file import KEY_COLUMNS, cell_of, key_of

if TYPE_CHECKING:
    from mtabench.measuring.ceilings import Ceilings
    from mtabench.measuring.timing import Measurement

# A time this far above the measured ceilings on a cold cache cannot be right. Below that it can: ceilings carry noise
# of their own.
ROOFLINE_SLACK = 1.1

WITH_TIME = ("ok", "invalid")

Row = dict[str, Any]


def cell_row(case: Case, facts: RunFacts, status: str, reason: str = "", rel_error: float | None = None) -> Row:
    """The row of a cell without a time."""
    cell = CellFacts(case, facts, status, reason, rel_error)
    return {
        **facts.environment,
        **dict(zip(KEY_COLUMNS, key_of(case), strict=True)),
        **{column.name: column.value(cell) for column in TABLE if column.value},
    }


def timed_row(
    case: Case, facts: RunFacts, measurement: Measurement, rel_error: float | None, ceilings: Ceilings | None
) -> Row:
    """The row of a cell that was verified and timed; its speedup is not known yet."""
    timed = TimingFacts(case, measurement, summarize(measurement.rounds), ceilings)
    reason = _invalid(timed)
    row = cell_row(case, facts, "invalid" if reason else "ok", reason, rel_error)
    return row | {column.name: column.timed(timed) for column in TABLE if column.timed}


def add_speedups(rows: Mapping[Case, Row], is_baseline: Callable[[Case], bool]) -> None:
    """Fill `baseline` and `speedup` of cells whose baseline was timed in the same rounds."""
    baselines = [case for case, row in rows.items() if is_baseline(case) and row["status"] == "ok"]
    for case, row in rows.items():
        base = next(filter(case.is_compared_with, baselines), None)
        if base is not None and row["status"] == "ok":
            row["baseline"], row["speedup"] = base.impl, rows[base]["median_ms"] / row["median_ms"]


def sample_lines(case: Case, facts: RunFacts, rounds: Iterable[Iterable[float]]) -> Iterator[tuple[object, ...]]:
    """The lines of the samples file: run, cell, round, sample, milliseconds; counted from 1."""
    cell = cell_of(key_of(case))
    for number, samples in enumerate(rounds, start=1):
        for sample, milliseconds in enumerate(samples, start=1):
            yield facts.run_id, cell, number, sample, milliseconds


def _invalid(timed: TimingFacts) -> str:
    """Why the time is not to be believed, or an empty text."""
    if timed.measurement.throttled:
        return "measured while the GPU was throttled"
    # A CPU's caches are not flushed, and a warm cache is faster than memory: the roofline says nothing there.
    cold_gpu = timed.case.device == "cuda" and timed.measurement.cache == "cold"
    if cold_gpu and timed.fraction is not None and timed.fraction > ROOFLINE_SLACK:
        return f"{timed.fraction:.2f} times as fast as the device's measured ceilings allow"
    return ""


@dataclass(frozen=True, slots=True)
class RunFacts:
    """What all rows of one process share: the columns that say when, where and with what it ran.

    `options` is what a command line that measures a cell again needs beyond the cell itself.
    """

    run_id: str
    started_utc: str
    environment: Mapping[str, Any]
    options: str = ""


@dataclass(frozen=True, slots=True)
class CellFacts:
    """What is known of every cell when its row is made."""

    case: Case
    facts: RunFacts
    status: str
    reason: str
    rel_error: float | None

    @property
    def repro(self) -> str:
        """A command line that measures the cell again."""
        return f"{self.case.repro(typed_as(self.case.impl))} {self.facts.options}".strip()


@dataclass(frozen=True, slots=True)
class TimingFacts:
    """What is known of a cell with a time; `ceilings` is None where they were not measured."""

    case: Case
    measurement: Measurement
    summary: Summary
    ceilings: Ceilings | None

    @property
    def seconds(self) -> float:
        """The median."""
        return self.summary.median_ms / 1e3

    @property
    def fraction(self) -> float | None:
        """The least time that the ceilings allow over the median; None where it is not known."""
        least_s = roofline_seconds(self.case, self.ceilings) if self.ceilings else None
        return least_s / self.seconds if least_s else None


def roofline_seconds(case: Case, ceilings: Ceilings) -> float | None:
    """The least time the useful work can take, at the measured rate of matrix products or of memory.

    The rate of memory is the bandwidth of reading where a cell only reads, else of a copy, which reads and writes.
    None where this rate is not known.
    """
    memory = ceilings.read_gbytes_s if only_reads(case) else ceilings.copy_gbytes_s
    if memory is None:
        return None
    return max(useful_flops(case) / (ceilings.matmul_tflops * 1e12), bytes_moved(case) / (memory * 1e9))
