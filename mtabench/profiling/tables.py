"""What `profile` writes and prints: what bounds a kernel, CSV files of kernels and of counters, and tables of them."""

import csv
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from pathlib import Path

from mtabench.errors import MtabenchError, UsageError
from mtabench.prediction.predict import Prediction
from mtabench.problem.case import Case
from mtabench.profiling.ncu_report import Counters
from mtabench.profiling.trace import KernelUse
from mtabench.registry import typed_as
from mtabench.results.csv_reading import read_csv
from mtabench.results.results_file import KEY_COLUMNS, Key, key_of, key_of_row, text_of
from mtabench.tables import Column, as_columns

KERNELS_FILE, COUNTERS_FILE = "kernels.csv", "counters.csv"
FACTS = ("device", "driver", "cuda", "torch", "triton", "mtabench", "git_sha", "git_dirty", "repro")
KERNEL_COLUMNS = (*KEY_COLUMNS, "kernel", "calls", "total_ms", "mean_ms", "share", *FACTS)
STALLS_KEPT = 3
_VALUES = tuple(field.name for field in fields(Counters))[3:-1]  # all but the kernel, launches, us and the stalls
COUNTER_COLUMNS = (
    *KEY_COLUMNS, "kernel", "launches", "us", "bound_by", "verdict", *_VALUES,
    "stall_1", "stall_1_share", "stall_2", "stall_2_share", "stall_3", "stall_3_share", *FACTS,
)  # fmt: skip
LONGEST_NAME, MOST_SHOWN = 44, 20
MOST_BYTES, MOST_ROWS = 64 << 20, 100_000
BOUND_PCT = 60.0
LAUNCH_SHARE = 0.5
WORTH_NAMING = 0.1


def append_kernels(path: Path, case: Case, uses: Sequence[KernelUse], here: Mapping[str, object]) -> None:
    """Add the kernels of a cell; `here` says where and with what it was measured, as `environment.describe` does."""
    facts = _facts(case, here)
    _append(path, KERNEL_COLUMNS, [[*key_of(case), *asdict(use).values(), *facts] for use in uses])


def append_counters(
    path: Path, case: Case | None, counters: Sequence[Counters], here: Mapping[str, object] | None = None
) -> None:
    """Add the counters of a cell, measured `here`; of neither if they come from a report, which does not name them."""
    key = key_of(case) if case else ("",) * len(KEY_COLUMNS)
    facts = _facts(case, here) if case and here else ("",) * len(FACTS)
    rows = []
    for one in counters:
        stalls: list[object] = [value for stall in one.stalls[:STALLS_KEPT] for value in stall]
        named = [getattr(one, name) for name in _VALUES]
        stalls += [None] * (2 * STALLS_KEPT - len(stalls))
        rows.append([*key, one.kernel, one.launches, one.us, bound_by(one), verdict(one), *named, *stalls, *facts])
    _append(path, COUNTER_COLUMNS, rows)


def read_memory_bytes(path: Path) -> dict[Key, float]:
    """Bytes through device memory of one call of each cell that a file of counters has whole; raises UsageError."""
    file = read_csv(path, MOST_BYTES, MOST_ROWS)
    if tuple(file.header) != COUNTER_COLUMNS:
        raise UsageError(f"{path} is no file of counters; `mtabench profile` writes {COUNTERS_FILE}")
    found: dict[Key, float] = {}
    incomplete = set()
    for number, record in enumerate(file.records, start=2):
        row = dict(zip(file.header, record, strict=True))
        key = key_of_row(row)
        try:
            found[key] = found.get(key, 0.0) + float(row["memory_bytes"])
        except ValueError:
            if row["memory_bytes"]:
                raise UsageError(f"line {number} of {path} has no number in the column memory_bytes") from None
            incomplete.add(key)
    return {key: value for key, value in found.items() if key not in incomplete}


def kernels_table(uses: Sequence[KernelUse]) -> list[Column]:
    """A row a kernel, the longest first; the least of many are one row."""
    rows = [
        (shortened(use.kernel), f"{use.calls:g}", f"{use.total_ms:.4g}", f"{use.mean_ms:.4g}", f"{use.share:.1%}")
        for use in uses[:MOST_SHOWN]
    ]
    rest = uses[MOST_SHOWN:]
    if rest:
        total, share = sum(use.total_ms for use in rest), sum(use.share for use in rest)
        name = f"{len(rest)} more, in {KERNELS_FILE}"
        rows.append((name, f"{sum(use.calls for use in rest):g}", f"{total:.4g}", "", f"{share:.1%}"))
    return as_columns(("kernel", "calls", "total\nms", "mean\nms", "share"), rows)


def counters_table(counters: Sequence[Counters]) -> list[Column]:
    """A row a kernel, the longest first; percentages of the peak."""
    headings = (
        "kernel", "launches", "us", "tensor\n%", "shared\n%", "L2\n%", "memory\n%", "occupancy\n%", "L2 hits\n%",
        "registers",
    )  # fmt: skip
    rows = []
    for one in counters:
        values = (
            one.tensor_pct, one.shared_pct, one.l2_pct, one.memory_pct, one.occupancy_pct, one.l2_hit_pct, one.registers
        )  # fmt: skip
        numbers = ("" if value is None else f"{value:.0f}" for value in values)
        rows.append([shortened(one.kernel), str(one.launches), f"{one.us:.4g}", *numbers])
    return as_columns(headings, rows)


def verdict_lines(counters: Sequence[Counters]) -> list[str]:
    """A sentence a kernel."""
    return [f"{shortened(one.kernel)}: {verdict(one)}" for one in counters]


def shortened(kernel: str) -> str:
    """A kernel's name as short as a table holds; templates have names of a thousand characters."""
    return kernel if len(kernel) <= LONGEST_NAME else kernel[: LONGEST_NAME - 3] + "..."


def _facts(case: Case, here: Mapping[str, object]) -> list[object]:
    return [
        *(here[name] for name in FACTS[:-1]),
        case.repro(typed_as(case.impl)).replace("mtabench", "mtabench profile", 1),
    ]


def _append(path: Path, columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    try:
        with path.open("a", newline="") as file:
            writer = csv.writer(file, lineterminator="\n")
            if not file.tell():
                writer.writerow(columns)
            writer.writerows([text_of(value) for value in row] for row in rows)
    except OSError as error:
        raise MtabenchError(f"cannot write {path}: {error.strerror}") from error


def bound_by(counters: Counters) -> str:
    """ "tensor cores", "shared memory", "L2", "memory" or "latency"; empty if none of the four was measured.

    The unit with the highest share of its peak bounds the kernel if that share is at least BOUND_PCT. Below, nothing is
    busy enough: the kernel waits, which is called latency.
    """
    units = shares(counters)
    if not units:
        return ""
    name = max(units, key=lambda name: units[name])
    return name if units[name] >= BOUND_PCT else "latency"


def shares(counters: Counters) -> dict[str, float]:
    """Percent of the peak of each unit that was measured."""
    units = {
        "tensor cores": counters.tensor_pct,
        "shared memory": counters.shared_pct,
        "L2": counters.l2_pct,
        "memory": counters.memory_pct,
    }
    return {name: share for name, share in units.items() if share is not None}


def verdict(counters: Counters) -> str:
    """One clause: what bounds the kernel, and by how much; of latency, what its warps wait for most.

    A kernel bound by a unit at 80 % of its peak can get at most 1 / 0.8 = 1.25 times faster without less of that unit.
    """
    name, units = bound_by(counters), shares(counters)
    if not name:
        return "not known: no counter of a unit was measured"
    if name != "latency":
        share = units[name]
        more = f", at most {100 / share:.2f}x faster without less of it" if share < 100 else ""
        return f"bound by {name}: {share:.0f} % of its peak{more}"
    busiest = max(units, key=lambda one: units[one])
    waits = ", ".join(f"{reason} {share:.0%}" for reason, share in counters.stalls[:2] if share >= WORTH_NAMING)
    return f"bound by latency: {busiest} is busiest, at {units[busiest]:.0f} %" + (
        f"; warps wait for {waits}" if waits else ""
    )


def launch_verdict(kernel_ms: float, wall_ms: float) -> str:
    """A clause on a call as a whole: the share of its wall time in which kernels run."""
    share = min(1.0, kernel_ms / wall_ms)
    if share < LAUNCH_SHARE:
        return f"bound by launches: kernels take {share:.0%} of the call's {wall_ms:.4g} ms, the host the rest"
    return f"kernels take {share:.0%} of the call's {wall_ms:.4g} ms"


def least_verdict(prediction: Prediction, kernel_ms: float) -> str:
    """A clause on a call as a whole: the least time of its work beside the time of its kernels."""
    least_ms, by = prediction.seconds * 1e3, prediction.bound_by
    return f"at least {least_ms:.4g} ms, by {by}: {least_ms / kernel_ms:.0%} of the time of its kernels"
