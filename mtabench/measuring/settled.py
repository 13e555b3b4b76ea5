"""Whether a time settled: the one definition of how wide its interval is, of the target, and of a time beside a job."""

import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

UNSETTLED = "~"  # before a time that did not settle
CI_TARGETS = {"cuda": 0.005, "cpu": 0.03}  # of a time, by device: cores that others use too know no half percent
CI_TARGET = CI_TARGETS["cuda"]  # of rows that do not name theirs, since no earlier version had another
MUCH_WIDER, FEWEST_TYPICAL = 2.0, 3  # than what is typical of a run, and how many rows show that
ROUNDING = 1e-5  # results files hold six digits
# Share of the rounds for which a thread may wait for a core. An idle machine of two cores shows up to 0.015, one busy
# process beside two threads 0.25 and more.
LONGEST_DELAY = 0.05

Row = Mapping[str, Any]


def half_interval(low: float, high: float) -> float:
    """Half the width of an interval as a share of its middle: the share after "±", and what the target limits."""
    return (high - low) / (high + low)


def half_interval_of(row: Row) -> float | None:
    """The same for the 95 % interval of a row's median; None if the row has none, and for a single sample."""
    low, high = _number(row, "ci95_low_ms"), _number(row, "ci95_high_ms")
    return half_interval(low, high) if low and high and not _is_single(row) else None


def settled(row: Row) -> bool | None:
    """Whether a row's time is known as well as its sweep wanted, and no other job took the cores; None without a time.

    Where most times of a run miss the target, one that is not much wider than the typical interval settled as well. The
    target is the row's, or CI_TARGET in files without that column. A file without the run delay is judged by its
    interval alone.
    """
    half = half_interval_of(row)
    if half is None:
        return False if _is_single(row) else None
    return half <= limit_of(row) + ROUNDING and not was_crowded(row)


def target_of(row: Row) -> float:
    """The share of its middle that half a row's interval should be at most."""
    return _number(row, "ci_target") or CI_TARGET


def limit_of(row: Row) -> float:
    """The same, or MUCH_WIDER than what is typical of its run if most times there missed the target."""
    return max(target_of(row), MUCH_WIDER * _number(row, "ci_typical"))


class TypicalHalf:
    """The median of half the intervals of rows that come one after another; None of few, and within their target."""

    def __init__(self) -> None:
        self._halves: list[float] = []
        self._target = 0.0

    def add(self, rows: Iterable[Row]) -> float | None:
        """The same with these rows."""
        found = [(half, target_of(row)) for row in rows if (half := half_interval_of(row)) is not None]
        self._halves = sorted([*self._halves, *(half for half, _ in found)])  # which is quick for what is sorted
        self._target = max([self._target, *(target for _, target in found)])
        if len(self._halves) < FEWEST_TYPICAL:
            return None
        typical = statistics.median(self._halves)
        return typical if typical > self._target + ROUNDING else None


def was_crowded(row: Row) -> bool:
    """Whether a thread of a row timed on the CPU waited for a core so long that another job must have run."""
    return _number(row, "run_delay") > LONGEST_DELAY


def mark_of(row: Row) -> str:
    """What stands before a row's time: UNSETTLED if it did not settle, else nothing."""
    return UNSETTLED if settled(row) is False else ""


def unsettled(rows: Iterable[Row]) -> list[Row]:
    """The rows with a valid time that did not settle."""
    return [row for row in rows if row["status"] == "ok" and settled(row) is False]


def meaning(rows: Iterable[Row]) -> str:
    """Why the marked ones of these rows are marked, as the end of a sentence; nothing if none is."""
    marked = [row for row in rows if settled(row) is False]
    if not marked:
        return ""
    limits = sorted({f"{100 * limit_of(row):.2g}" for row in marked}, key=float)
    limit = " or ".join(limits) if len(limits) < 3 else f"{limits[0]} to {limits[-1]}"
    words = f"did not settle: the 95 % interval is wider than ±{limit} %"
    words += ", or there is a single sample" if any(map(_is_single, marked)) else ""
    return words + (", or a thread waited for a core" if any(map(was_crowded, marked)) else "")


def unsettled_of(rows: Sequence[Row]) -> str:
    """How many of these rows' times did not settle, and why, as a sentence; nothing if all did."""
    marked = unsettled(rows)
    return f"{len(marked)} of {len(rows)} times {meaning(marked)}" if marked else ""


def _is_single(row: Row) -> bool:
    """Whether a row's time is of one sample, whose interval would have no width."""
    return _number(row, "samples") == 1


def _number(row: Row, name: str) -> float:
    """A number of a row from a file, a frame or a sweep; 0 where it is unknown."""
    value = row.get(name)
    return float(value) if value and value == value else 0.0


THREADS = Path("/proc/self/task")


def run_delays_s() -> dict[str, float]:
    """Of each living thread, by its number, the seconds of run delay until now as Linux counts them; else nothing."""
    found = {}
    for path in THREADS.glob("*/schedstat"):
        try:
            ran, waited, _ = path.read_text().split()
        except (OSError, ValueError):  # a thread that just ended
            continue
        if int(ran):  # zeros stand in a kernel that does not count
            found[path.parent.name] = int(waited) / 1e9
    return found


def longest_wait_s(before: Mapping[str, float], after: Mapping[str, float]) -> float | None:
    """What the thread that waited longest waited between two calls; None where it is unknown.

    Of threads that work together it is the slowest that counts, however many there are.
    """
    return max((waited - before.get(thread, 0.0) for thread, waited in after.items()), default=None)
