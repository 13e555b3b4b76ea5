"""From what was measured of a cell to its row: throughput, roofline, speedup, and what makes a time invalid."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mtabench.measuring.statistics import summarize
from mtabench.problem.case import Case
from mtabench.problem.work import bytes_moved, executed_flops, only_reads, tokens, useful_flops
from mtabench.registry import find
from mtabench.results.results_file import KEY_COLUMNS, SCHEMA_VERSION, key_of

if TYPE_CHECKING:
    from mtabench.measuring.ceilings import Ceilings
    from mtabench.measuring.timing import Measurement

# A time this far above the measured ceilings on a cold cache cannot be right. Below that it can: ceilings carry noise
# of their own.
ROOFLINE_SLACK = 1.1

TIMED = ("ok", "invalid")
RAN = (*TIMED, "wrong")

Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class RunFacts:
    """What all rows of one process share: the columns that say when, where and with what it ran.

    `options` is what a command line that measures a cell again needs beyond the cell itself.
    """

    run_id: str
    started_utc: str
    environment: Mapping[str, Any]
    options: str = ""


def cell_row(case: Case, facts: RunFacts, status: str, reason: str = "", rel_error: float | None = None) -> Row:
    """The row of a cell without a time."""
    splits_used = find(case.impl).splits_used if case.splits is not None and status in RAN else None
    return {
        "schema_version": SCHEMA_VERSION,
        "run_id": facts.run_id,
        "started_utc": facts.started_utc,
        **dict(zip(KEY_COLUMNS, key_of(case), strict=True)),
        "splits_used": splits_used(case) if splits_used else None,
        "status": status,
        "reason": reason,
        "rel_error": rel_error,
        **facts.environment,
        "repro": f"{case.repro()} {facts.options}".strip(),
    }


def timed_row(
    case: Case, facts: RunFacts, measurement: Measurement, rel_error: float | None, ceilings: Ceilings | None
) -> Row:
    """The row of a cell that was verified and timed; its speedup is not known yet."""
    summary = summarize(measurement.rounds)
    seconds = summary.median_ms / 1e3
    useful, moved = useful_flops(case), bytes_moved(case)
    least_s = roofline_seconds(case, ceilings) if ceilings else None
    fraction = least_s / seconds if least_s else None
    reason = _invalid(case, measurement, fraction)
    return cell_row(case, facts, "invalid" if reason else "ok", reason, rel_error) | {
        "rounds": summary.rounds,
        "samples": summary.samples,
        "median_ms": summary.median_ms,
        "p10_ms": summary.p10_ms,
        "p90_ms": summary.p90_ms,
        "ci95_low_ms": summary.ci95_low_ms,
        "ci95_high_ms": summary.ci95_high_ms,
        "useful_tflops": useful / seconds / 1e12,
        "executed_tflops": executed_flops(case, find(case.impl).work) / seconds / 1e12,
        "gbytes_s": moved / seconds / 1e9,
        "fraction_of_roofline": fraction,
        "peak_memory_mb": measurement.peak_memory_mb,
        "timer": measurement.timer,
        "cache": measurement.cache,
        "sm_clock_mhz": measurement.sm_clock_mhz,
        "throttled": measurement.throttled,
        "energy_j": measurement.energy_j,
        "tokens_per_joule": tokens(case) / measurement.energy_j if measurement.energy_j else None,
        "ci_target": measurement.ci_target,
        "run_delay": measurement.run_delay,
        "read_gbytes_s": ceilings.read_gbytes_s if ceilings and only_reads(case) else None,
    }


def roofline_seconds(case: Case, ceilings: Ceilings) -> float | None:
    """The least time the useful work can take, at the measured rate of matrix products or of memory.

    That of memory is the bandwidth of reading where a cell only reads, else that of a copy, which reads and writes.
    None where the one that applies is not known.
    """
    memory = ceilings.read_gbytes_s if only_reads(case) else ceilings.copy_gbytes_s
    if memory is None:
        return None
    return max(useful_flops(case) / (ceilings.matmul_tflops * 1e12), bytes_moved(case) / (memory * 1e9))


def add_speedups(rows: Mapping[Case, Row], is_baseline: Callable[[Case], bool]) -> None:
    """Fill `baseline` and `speedup` of conv-attention cells whose baseline was timed in the same rounds."""
    baselines = {
        case.problem_key: (case.impl, row["median_ms"])
        for case, row in rows.items()
        if is_baseline(case) and row["status"] == "ok"
    }
    for case, row in rows.items():
        if case.problem_key in baselines and row["status"] == "ok":
            row["baseline"], base_ms = baselines[case.problem_key]
            row["speedup"] = base_ms / row["median_ms"]


def sample_lines(case: Case, facts: RunFacts, rounds: Iterable[Iterable[float]]) -> Iterator[tuple[object, ...]]:
    """The lines of the samples file: run, cell, round, sample, milliseconds; counted from 1."""
    cell = "/".join(key_of(case))
    for number, samples in enumerate(rounds, start=1):
        for sample, milliseconds in enumerate(samples, start=1):
            yield facts.run_id, cell, number, sample, milliseconds


def _invalid(case: Case, measurement: Measurement, fraction: float | None) -> str:
    """Why the time is not to be believed, or an empty text."""
    if measurement.throttled:
        return "measured while the GPU was throttled"
    # A CPU's caches are not flushed, and a warm cache is faster than memory: the roofline says nothing there.
    cold_gpu = case.device == "cuda" and measurement.cache == "cold"
    if cold_gpu and fraction is not None and fraction > ROOFLINE_SLACK:
        return f"{fraction:.2f} times as fast as the device's measured ceilings allow"
    return ""
