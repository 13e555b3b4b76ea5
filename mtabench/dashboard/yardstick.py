"""What plain attention did meanwhile: where it changed alike, the machine is the cause and no commit of ours."""

from collections import defaultdict
from collections.abc import Iterable, Sequence

import numpy as np

from mtabench import registry
from mtabench.dashboard.changes import FEWEST_RUNS, Change
from mtabench.dashboard.histories import CELL_COLUMNS, History
from mtabench.problem.operations import OPERATION_COLUMNS

ALIKE = 0.5  # of a change: a yardstick that changed by so much of it, or more, changed alike
# A cell is held against yardsticks of its shape; where there is none, against all of its device and pass.
SHAPE = tuple(name for name in CELL_COLUMNS if name not in ("impl", "op", "splits", *OPERATION_COLUMNS))
LOOSELY = ("device", "pass")


class Yardsticks:
    """The histories of plain attention by other projects, whose times no commit of ours changes."""

    def __init__(self, histories: Iterable[History]) -> None:
        self._by_shape: dict[tuple[str, ...], list[History]] = defaultdict(list)
        self._by_pass: dict[tuple[str, ...], list[History]] = defaultdict(list)
        self._of_pass: dict[tuple[object, ...], list[float]] = {}
        for history in filter(is_yardstick, histories):
            self._by_shape[_values(history, SHAPE)].append(history)
            self._by_pass[_values(history, LOOSELY)].append(history)

    def changed_alike(self, history: History, change: Change, good: int, bad: int) -> bool:
        """Whether plain attention changed as a cell did between the runs `good` and `bad`, if they measured both.

        The same way, and at least by a share ALIKE of the log ratio, in the median of the yardsticks. A yardstick's
        own change is one of plain attention.
        """
        if is_yardstick(history):
            return True
        ratios = _ratios(self._by_shape[_values(history, SHAPE)], change.evidence, good, bad)
        if not ratios:
            key = _values(history, LOOSELY)
            runs = (*key, change.evidence, good, bad)
            if runs not in self._of_pass:
                self._of_pass[runs] = _ratios(self._by_pass[key], change.evidence, good, bad)
            ratios = self._of_pass[runs]
        return bool(ratios) and bool(np.median(ratios) / np.log1p(change.change) >= ALIKE)


def is_yardstick(history: History) -> bool:
    """Whether a history is of plain attention by another project."""
    return any(entry.yardstick and entry.name == history.cell["impl"] for entry in registry.IMPLEMENTATIONS)


def _values(history: History, names: Sequence[str]) -> tuple[str, ...]:
    return tuple(history.cell[name] for name in names)


def _ratios(histories: Iterable[History], evidence: str, good: int, bad: int) -> list[float]:
    """The log ratios of times around the runs `good` and `bad`, of the histories that have times in both.

    Times are medians of as many runs as a level must have, on the far sides of a step and inside a drift; of one run
    where the history is too short for levels.
    """
    count = 1 if evidence == "few" else FEWEST_RUNS
    found = []
    for history in histories:
        runs = history.runs[history.timed]
        first, last = np.searchsorted(runs, [good, bad])
        if last >= len(runs) or (runs[first], runs[last]) != (good, bad):
            continue
        logs = np.log(history.median_ms[history.timed])
        ends = logs[max(0, first - count + 1) : first + 1], logs[last : last + count]
        if evidence == "drift":
            ends = logs[first : first + count], logs[max(0, last - count + 1) : last + 1]
        found.append(float(np.median(ends[1]) - np.median(ends[0])))
    return found
