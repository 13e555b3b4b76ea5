"""How well auto chose the splits of a decode step: its time beside the best of the numbers measured."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from mtabench.results.results_file import KEY_COLUMNS, Row, text_of


@dataclass(frozen=True, slots=True)
class Choice:
    """Of one implementation on one problem: the row of auto, and that of the fastest number of splits measured."""

    auto: Row
    best: Row

    @property
    def slowdown(self) -> float:
        """The part of the best's time that auto took longer; 0 if it took that number or none was faster."""
        if text_of(self.auto["splits_used"]) == text_of(self.best["splits"]):
            return 0.0
        return max(0.0, float(self.auto["median_ms"]) / float(self.best["median_ms"]) - 1)


def choices(rows: Iterable[Row]) -> Iterator[Choice]:
    """What auto chose wherever it and at least one number have a valid time, in the order of the rows."""
    problems: dict[tuple[str, ...], dict[str, Row]] = {}
    for row in rows:
        splits = text_of(row["splits"])
        if splits and row["status"] == "ok":
            problem = tuple(text_of(row[name]) for name in KEY_COLUMNS if name != "splits")
            problems.setdefault(problem, {})[splits] = row
    for timed in problems.values():
        auto = timed.pop("auto", None)
        if auto and timed:
            yield Choice(auto, min(timed.values(), key=lambda row: float(row["median_ms"])))
