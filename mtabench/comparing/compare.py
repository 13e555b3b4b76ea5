"""Compares two runs cell by cell: what got slower, what got faster, what broke, and what stays unclear."""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from mtabench.comparing.inference import LogRatios, compare_samples, detectable, holm
from mtabench.errors import MtabenchError, UsageError
from mtabench.measuring.settled import was_crowded
from mtabench.measuring.statistics import geometric_mean
from mtabench.prose import plural
from mtabench.results.results_file import find_samples
from mtabench.results.runs import Cell, Run, process_ids

VERDICTS = ("broken", "slower", "gone", "unclear", "new", "faster", "same")  # the most urgent first
FAIL_ON = ("broken", "slower", "gone")  # unless --fail-on says otherwise
# Of comparisons of the same code, 1 % may find anything slower, and 1 % anything faster.
LEVEL = 0.02
FAR = 2.0  # times what noise and waiting explain, in logarithms: another job does not bring about so large a change
MOST_DELAY = 0.99  # of a run delay, whose logarithm is taken
MUST_AGREE = ("device", "timer", "cache")
SHOULD_AGREE = ("driver", "cuda", "torch", "triton")

REGRESSION, UNCLEAR, WRONG, NOTHING = 1, 3, 4, 5


class NotComparableError(MtabenchError):
    """Two runs that were measured on different devices, or in different ways."""

    exit_code = NOTHING


@dataclass(frozen=True, slots=True)
class ComparedCell:
    """A cell of two runs. `change` and its 95 % interval are parts of the base's time: 0.03 is 3 % slower.

    `base_ms` and `head_ms` are the times that were compared, `change` is from the first to the second. `detectable` is
    the smallest slowdown that the comparison finds in a share POWER of cases. None where there is nothing to compare;
    `reason` then says why.
    """

    key: str
    verdict: str
    base: Cell | None
    head: Cell | None
    base_ms: float | None = None
    head_ms: float | None = None
    change: float | None = None
    low: float | None = None
    high: float | None = None
    detectable: float | None = None
    reason: str = ""

    @property
    def sides(self) -> list[Cell]:
        """The cell in the runs that have it, base and head."""
        return [side for side in (self.base, self.head) if side]

    @property
    def name(self) -> str:
        """The cell in words."""
        return self.sides[-1].name

    @property
    def outcome(self) -> str:
        """Verdict and reason."""
        return f"{self.verdict}: {self.reason}" if self.reason else self.verdict

    @property
    def wrong(self) -> bool:
        """Whether the second run's result is wrong."""
        return self.head is not None and self.head.row["status"] == "wrong"


@dataclass(frozen=True, slots=True)
class Comparison:
    """All cells of two runs, the most urgent first; `notes` are sentences on how far to trust them.

    `fail_on` are the verdicts that fail a build. Runs of two devices, compared `across_devices`, have no verdicts.
    """

    base: Run
    head: Run
    threshold: float
    fail_on: tuple[str, ...]
    cells: tuple[ComparedCell, ...]
    notes: tuple[str, ...]
    across_devices: bool = False

    @property
    def counts(self) -> Counter[str]:
        """How many cells have each verdict."""
        return Counter(cell.verdict for cell in self.cells)

    @property
    def nothing_compared(self) -> bool:
        """Whether no cell has a time in both runs, nor one that broke."""
        return all(cell.change is None and cell.verdict != "broken" for cell in self.cells)

    @property
    def undecided(self) -> bool:
        """Whether no cell has a verdict that says of both runs more than `unclear`; all others stand at the ends."""
        return self.cells[0].verdict in ("gone", "unclear") and self.cells[-1].verdict in ("unclear", "new")

    def fails(self, cell: ComparedCell) -> bool:
        """Whether a cell fails the build; a wrong result does, whatever `fail_on` says, and so do none but unclear."""
        return cell.wrong or cell.verdict in self.fail_on or (cell.verdict == "unclear" and self.undecided)

    @property
    def exit_code(self) -> int:
        """0, or the gravest finding's code: a wrong result, nothing compared, a regression, an unclear cell."""
        if any(cell.wrong for cell in self.cells):
            return WRONG
        if self.nothing_compared:
            return NOTHING
        failing = {cell.verdict for cell in self.cells if self.fails(cell)}
        if failing - {"unclear"}:
            return REGRESSION
        return UNCLEAR if failing else 0


def parse_fail_on(text: str) -> tuple[str, ...]:
    """The verdicts in a list such as "slower,gone", in the order of VERDICTS; raises UsageError."""
    words = {word.strip() for word in text.split(",")}
    known = [verdict for verdict in VERDICTS if verdict != "same"]
    for word in sorted(words - set(known)):
        raise UsageError(f"--fail-on {text!r}: {word!r} is not a verdict; expected some of {','.join(known)}")
    return tuple(verdict for verdict in known if verdict in words)


def compare(base: Run, head: Run, threshold: float, fail_on: tuple[str, ...] = FAIL_ON, looks: int = 1) -> Comparison:
    """Pair the cells of two runs and judge each; changes below `threshold` (0.02 is 2 %) do not count.

    Cells may be judged several times, `looks` at most. Each look gets its share of the level, so that looking again
    finds no more false alarms (Bonferroni). Raises UsageError for one run given twice, NotComparableError for runs of
    different devices, timers or caches.
    """
    if base.path.resolve() == head.path.resolve() or _processes(base) & _processes(head):
        raise UsageError(f"{base.path} and {head.path} hold the same run; give the results of two runs")
    _check_comparable(base, head)
    cells = list(_paired(base, head))
    both = [cell for cell in cells if cell.verdict == "unclear" and not cell.reason]
    judged = {cell.key: cell for cell in _judged(both, threshold, LEVEL / looks)} if both else {}
    decided = [judged.get(cell.key, cell) for cell in cells]
    decided.sort(key=lambda cell: VERDICTS.index(cell.verdict))
    return Comparison(base, head, threshold, fail_on, tuple(decided), tuple(_notes(base, head)))


def compare_devices(base: Run, head: Run) -> Comparison:
    """The changes of cells that runs of two devices both have a time of, without verdicts.

    Where a run has no samples, changes are of the medians, without intervals. Raises NotComparableError if no
    cell has a time in both.
    """
    cells = [cell for cell in _paired(base, head) if cell.verdict == "unclear" and not cell.reason]
    if not cells:
        raise NotComparableError(
            f"{base.path} and {head.path} have no cell with a time in common; measure the same shapes, dtype and "
            "implementations, as the column repro of either says"
        )
    lacking = [run.path for run in (base, head) if not any(cell.processes for cell in run.cells.values())]
    if lacking:
        medians = [[float(side.row["median_ms"]) for side in cell.sides] for cell in cells]
        found = [
            replace(cell, base_ms=one, head_ms=other, change=other / one - 1)
            for cell, (one, other) in zip(cells, medians, strict=True)
        ]
    else:
        found = [replace(cell, detectable=None) for cell in _judged(cells, 0.0, LEVEL)]
    notes = _device_notes(base, head, found, lacking)
    bare = tuple(replace(cell, verdict="", reason="") for cell in found)
    return Comparison(base, head, 0.0, (), bare, tuple(notes), across_devices=True)


def unclear_cells(comparison: Comparison) -> list[ComparedCell]:
    """Those that more measuring may decide: too noisy, or not believable in one of the runs."""
    return [cell for cell in comparison.cells if cell.verdict == "unclear"]


def _processes(run: Run) -> set[str]:
    return {one for ids in run.values("run_id") for one in process_ids(ids)}


def _check_comparable(base: Run, head: Run) -> None:
    """Raise NotComparableError unless the common cells were measured on one device, in one way."""
    common = [(cell, head.cells[key]) for key, cell in base.cells.items() if key in head.cells]
    if not common and not (there := base.values("device")) & (here := head.values("device")):
        raise NotComparableError(
            f"{base.path} and {head.path} cannot be compared: they have no cell in common, and their devices differ, "
            f"{' and '.join(sorted(there))}, and {' and '.join(sorted(here))}"
        )
    for column in MUST_AGREE:
        for before, after in common:
            there, here = before.row[column], after.row[column]
            if there != here and (column == "device" or (before.ok and after.ok)):
                raise NotComparableError(
                    f"{base.path} and {head.path} cannot be compared: their {column} differs, {there} and {here}"
                )


def _paired(base: Run, head: Run) -> Iterator[ComparedCell]:
    """Every cell of either run that has a time or a wrong result; those with two times are still to be judged."""
    for key in dict.fromkeys((*head.cells, *base.cells)):
        before, after = base.cells.get(key), head.cells.get(key)
        cell = ComparedCell(key, "unclear", before, after)
        was, now = (side.outcome if side else "" for side in (before, after))
        match before and before.row["status"], after and after.row["status"]:
            case "ok", "ok":
                yield cell
            case "ok", None:
                yield replace(cell, verdict="gone", reason="not in the second run")
            case "invalid", None:
                yield replace(cell, verdict="gone", reason=f"not in the second run, and the first run's is {was}")
            case "ok" | "invalid", "invalid":
                yield replace(cell, reason=now)
            case ("ok", _) | (_, "wrong"):
                yield replace(cell, verdict="broken", reason=now)
            case "invalid", "ok":
                yield replace(cell, reason=f"the first run's is {was}")
            case _, "ok":
                yield replace(cell, verdict="new", reason=f"the first run's is {was}" if was else "")


def judge(ratios: LogRatios, threshold: float, level: float = LEVEL) -> list[str]:
    """The verdict of each cell: a change counts if it is sure and at least `threshold`."""
    least, most = np.log1p((-threshold, threshold))
    found = []
    columns = np.column_stack((ratios.values, ratios.low, ratios.high, holm(ratios.p_values)))
    for value, low, high, p_value in columns.tolist():
        if p_value <= level and not least < value < most:
            found.append("slower" if value > 0 else "faster")
        else:
            found.append("same" if least < low and high < most else "unclear")
    return found


def _judged(cells: Sequence[ComparedCell], threshold: float, level: float) -> Iterator[ComparedCell]:
    """Cells with samples in both runs, with their verdicts."""
    found = compare_samples(
        [cell.base.processes for cell in cells if cell.base], [cell.head.processes for cell in cells if cell.head]
    )
    ratios = found.ratios
    smallest = detectable(ratios.errors, ratios.freedom, np.log1p(threshold), level)
    changes = map(np.expm1, (ratios.values, ratios.low, ratios.high, smallest))
    numbers = np.column_stack((found.base_ms, found.head_ms, *changes)).tolist()
    for i, (cell, verdict) in enumerate(zip(cells, judge(ratios, threshold, level), strict=True)):
        known = bool(np.isfinite(ratios.low[i]))
        hidden = "the noise is too large to tell" if known else "one round says nothing of the noise"
        doubt = _doubt(cell, ratios.values[i], smallest[i]) if verdict in ("slower", "faster") else ""
        reason = doubt or (hidden if verdict == "unclear" else "")
        sure = numbers[i] if known else [*numbers[i][:3], None, None, None]
        yield ComparedCell(cell.key, "unclear" if doubt else verdict, cell.base, cell.head, *[*sure, reason])


def _doubt(cell: ComparedCell, log_ratio: float, detectable: float) -> str:
    """Why a change is not to be believed although it is significant: opposite medians, another job; else empty.

    Of several processes the noise between them shows what another job did. Of one process only the run delay does: a
    thread that waited for half of the time may take twice as long.
    """
    before, after = (side.row["median_ms"] for side in cell.sides)
    if np.sign(after - before) * np.sign(log_ratio) < 0:
        return f"the medians changed the other way, {before:.4g} to {after:.4g} ms"
    delays = [side.row["run_delay"] for side in cell.sides if len(side.processes) == 1 and was_crowded(side.row)]
    if delays and abs(log_ratio) <= FAR * (detectable - np.log1p(-min(max(delays), MOST_DELAY))):
        return "threads waited for a core, so another job ran"
    return ""


def _device_notes(base: Run, head: Run, cells: Sequence[ComparedCell], lacking: Sequence[Path]) -> Iterator[str]:
    """How many times as long the head takes, what is missing, and what differs besides the device."""
    ratios: dict[str, list[float]] = {}
    for cell in cells:
        ratios.setdefault(str(cell.sides[0].row["impl"]), []).append(1 + (cell.change or 0.0))
    for impl, found in ratios.items():
        mean = f"{geometric_mean(found):.4g}x as long on the head's device"
        yield f"{impl}: {mean}, the geometric mean of {plural(len(found), 'cell')}"
    if lacking:
        files = " and ".join(str(find_samples(path)) for path in lacking)
        yield f"no intervals, and changes of medians: raw samples are missing, there is no file {files}"
    yield from _differing(base, head, (*MUST_AGREE, *SHOULD_AGREE))
    for run, name in ((base, "base"), (head, "head")):
        if alone := sum(cell.ok for cell in run.cells.values()) - len(cells):
            yield f"{plural(alone, 'cell')} of {name} without a time in the other file"


def _differing(base: Run, head: Run, columns: Iterable[str]) -> Iterator[str]:
    for column in columns:
        there, here = (run.values(column) - {""} or {""} for run in (base, head))  # a row that failed has no timer
        if there != here:
            yield f"{column} differs, {_listed(there)} and {_listed(here)}: it may be what changed the times"


def _notes(base: Run, head: Run) -> Iterator[str]:
    yield from _differing(base, head, SHOULD_AGREE)
    if min(base.values("started_utc")) > max(head.values("started_utc")):
        yield f"{base.path} was measured after {head.path}: the first file is the base, the second what is judged"
    several = [any(len(cell.processes) > 1 for cell in run.cells.values()) for run in (base, head)]
    if several[0] != several[1]:
        one = head if several[0] else base
        yield f"{one.path} is of one process, which does not show what differs from process to process"


def _listed(values: set[str]) -> str:
    return ", ".join(sorted(value or "(none)" for value in values))
