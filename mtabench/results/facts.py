"""What is known of a cell when its row is made: the run, how the cell ended, and its time."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mtabench.measuring.statistics import Summary
from mtabench.problem.case import Case
from mtabench.problem.work import bytes_moved, only_reads, useful_flops
from mtabench.registry import typed_as

if TYPE_CHECKING:
    from mtabench.measuring.ceilings import Ceilings
    from mtabench.measuring.timing import Measurement


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

    That of memory is the bandwidth of reading where a cell only reads, else that of a copy, which reads and writes.
    None where the one that applies is not known.
    """
    memory = ceilings.read_gbytes_s if only_reads(case) else ceilings.copy_gbytes_s
    if memory is None:
        return None
    return max(useful_flops(case) / (ceilings.matmul_tflops * 1e12), bytes_moved(case) / (memory * 1e9))
