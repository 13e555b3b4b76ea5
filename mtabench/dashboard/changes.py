"""What changed in a history, and when: steps, drifts, and what the last runs alone say.

Steps are found in the logarithms of the medians. PELT (Killick, Fearnhead and Eckley, J. Am. Stat. Assoc. 107, 2012;
from ruptures) proposes where levels begin; each proposal is then tested against the levels on both sides, and the
weakest is dropped until all that are left pass, as Hunter does (Fleming et al., ICPE 2023). A step passes if

- it is at least the threshold in size, between the medians of both sides,
- Welch's t is significant at LEVEL, divided by the number of places where a step could be, and
- a step explains the data on top of a straight line through both sides, so that a slow drift is no step.

The noise is that of the history itself, from run to run, and never below what the intervals within the runs say. Runs
that resemble their neighbours tell less than independent ones: variances grow by (1 + r) / (1 - r), where r is the
correlation of neighbouring residuals. Fewer than FEW times say too little about noise from run to run: neighbours
then differ if their 95 % intervals do not overlap and the threshold is reached, which is weaker evidence.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray
from scipy.special import stdtr

from mtabench.errors import UsageError

FEW = 6
FEWEST_RUNS = 3  # of a level
FEWEST_FOR_DRIFT = 10
FEWEST_FOR_CORRELATION = 20
PENALTY = 3.0  # times log(runs), in units of the noise; the tests below decide
LEVEL = 0.001
LATEST_REACH = 5.0  # times the noise: so far from the level, the last runs are told although they are too few
LEAST_NOISE = 1e-3
INTERVAL_WIDTH = 2 * 1.96  # of a 95 % interval, in standard errors

Floats = NDArray[np.floating]


@dataclass(frozen=True, slots=True)
class Change:
    """A change between the points `good` and `bad`: 0.05 is 5 % slower. `evidence` is the rule that found it.

    "step": a new level that held for at least FEWEST_RUNS runs. "latest": the last few runs lie apart, which is not yet
    confirmed. "few": two neighbours of a short history. "drift": gradual, all the way from `good` to `bad`.
    `before_ms` and `after_ms` are the levels.
    """

    good: int
    bad: int
    change: float
    before_ms: float
    after_ms: float
    evidence: str


def find_changes(median_ms: Floats, low_ms: Floats, high_ms: Floats, threshold: float) -> list[Change]:
    """The changes of at least `threshold` (0.02 is 2 %) in a history of times and their 95 % intervals, in order.

    Raises UsageError if ruptures is not installed.
    """
    if len(median_ms) < FEW:
        return _few(median_ms, low_ms, high_ms, threshold)
    logs = np.log(median_ms)
    noise = _noise(logs, np.log(high_ms / low_ms))
    least = float(np.log1p(threshold))
    cuts = [0, *_steps(logs, noise, least)]
    latest = _latest_start(logs, cuts[-1], max(least, LATEST_REACH * noise))
    bounds = [*cuts, latest]
    levels = [np.median(logs[a:b]) for a, b in pairwise(bounds)]
    found = [
        _change(cut - 1, cut, before, after, "step")
        for cut, before, after in zip(bounds[1:-1], levels, levels[1:], strict=False)
    ]
    found += _drift(logs, bounds[-2], latest, noise, least)
    if latest < len(logs):
        found.append(_change(latest - 1, latest, levels[-1], np.median(logs[latest:]), "latest"))
    return found


def _change(good: int, bad: int, before: float, after: float, evidence: str) -> Change:
    return Change(good, bad, float(np.expm1(after - before)), float(np.exp(before)), float(np.exp(after)), evidence)


def _few(median_ms: Floats, low_ms: Floats, high_ms: Floats, threshold: float) -> list[Change]:
    logs = np.log(median_ms)
    return [
        _change(i, i + 1, logs[i], logs[i + 1], "few")
        for i in range(len(logs) - 1)
        if (high_ms[i] < low_ms[i + 1] or high_ms[i + 1] < low_ms[i])
        and abs(logs[i + 1] - logs[i]) >= np.log1p(threshold)
    ]


def _noise(logs: Floats, widths: Floats) -> float:
    """Standard deviation of one run's log median: from run to run, steps aside, or within runs if that is more."""
    between = 1.4826 * np.median(np.abs(np.diff(logs))) / np.sqrt(2)
    return float(max(between, np.median(widths) / INTERVAL_WIDTH, LEAST_NOISE))


def _latest_start(logs: Floats, start: int, reach: float) -> int:
    """Where the last few runs begin that all lie beyond `reach` of the runs just before, on one side; else the end."""
    for count in range(1, FEW):
        begin = len(logs) - count
        before = logs[max(start, begin - FEW) : begin]
        if len(before) < FEWEST_RUNS:
            break
        level = np.median(before)
        away = logs[begin:] - level
        at_home = np.all(np.abs(before[-FEWEST_RUNS:] - level) < reach)
        if at_home and (np.all(away > reach) or np.all(away < -reach)):
            return begin
    return len(logs)


def _steps(logs: Floats, noise: float, least: float) -> list[int]:
    """First places of new levels."""
    try:
        from ruptures import KernelCPD
    except ImportError as error:
        raise UsageError(
            "a dashboard needs the package ruptures, which is not installed; "
            "install it with: pip install 'mtabench[report]'"
        ) from error
    search = KernelCPD(kernel="linear", min_size=FEWEST_RUNS).fit((logs / noise)[:, None])
    cuts = [int(cut) for cut in search.predict(pen=PENALTY * np.log(len(logs)))[:-1]]
    while cuts:
        bounds = [0, *cuts, len(logs)]
        inflation = _inflation(logs, bounds)
        doubts = [
            _doubt(logs[bounds[i] : cut], logs[cut : bounds[i + 2]], noise, inflation, least, len(logs))
            for i, cut in enumerate(cuts)
        ]
        weakest = int(np.argmax(doubts))
        if doubts[weakest] <= 1:
            break
        del cuts[weakest]
    return cuts


def _inflation(logs: Floats, bounds: list[int]) -> float:
    """How many times larger the variance of a mean is than that of independent runs; 1 in short histories."""
    if len(logs) < FEWEST_FOR_CORRELATION:
        return 1.0
    residuals = np.concatenate([logs[a:b] - logs[a:b].mean() for a, b in pairwise(bounds)])
    total = residuals @ residuals
    correlation = np.clip(residuals[1:] @ residuals[:-1] / total, 0, 0.9) if total else 0.0
    return float((1 + correlation) / (1 - correlation))


def _doubt(left: Floats, right: Floats, noise: float, inflation: float, least: float, places: int) -> float:
    """How unsure a step between two levels is: it passes at 1 or less; above 2, it is smaller than what counts."""
    size = float(np.median(right) - np.median(left))
    if abs(size) < least:
        return 2 + 1 / max(abs(size), 1e-9)
    variances = [max(side.var(ddof=1), noise**2) / len(side) for side in (left, right)]
    t = (right.mean() - left.mean()) / np.sqrt(sum(variances) * inflation)
    p_value = 2 * stdtr(len(left) + len(right) - 2, -abs(t)) * places
    if len(left) + len(right) >= FEWEST_FOR_DRIFT:
        p_value = max(p_value, _beyond_drift(left, right, np.sign(size), noise, inflation))
    return float(min(p_value / LEVEL, 2))


def _beyond_drift(left: Floats, right: Floats, sign: float, noise: float, inflation: float) -> float:
    """The p-value of a step on top of a straight line through both sides; 1 if it goes the other way."""
    logs = np.concatenate([left, right])
    time = np.arange(len(logs)) - (len(logs) - 1) / 2
    _, step = _fit(time, (np.arange(len(logs)) >= len(left)) - len(right) / len(logs))
    _, around = _fit(time, logs - logs.mean())
    size, residuals = _fit(step, around)
    if sign * size <= 0:
        return 1.0
    return _p_value(size, step, residuals, len(logs) - 3, noise, inflation)


def _drift(logs: Floats, start: int, end: int, noise: float, least: float) -> list[Change]:
    """The last level if it slopes: surely, and so much that its first third is apart from its last."""
    level = logs[start:end]
    if len(level) < FEWEST_FOR_DRIFT:
        return []
    time = np.arange(len(level)) - (len(level) - 1) / 2
    slope, residuals = _fit(time, level - level.mean())
    inflation = _inflation(residuals, [0, len(residuals)])
    p_value = _p_value(slope, time, residuals, len(level) - 2, noise, inflation)
    third = len(level) // 3
    before, after = float(np.median(level[:third])), float(np.median(level[-third:]))
    if p_value > LEVEL or abs(after - before) < least:
        return []
    return [_change(start, end - 1, before, after, "drift")]


def _fit(x: Floats, y: Floats) -> tuple[float, Floats]:
    """The slope of the line through the origin that fits best, and what it leaves of `y`."""
    slope = float(x @ y / (x @ x))
    return slope, y - slope * x


def _p_value(slope: float, x: Floats, residuals: Floats, freedom: int, noise: float, inflation: float) -> float:
    """How likely a slope is at least so far from zero by chance, both sides counted."""
    variance = max(float(residuals @ residuals) / freedom, noise**2) * inflation
    return float(2 * stdtr(freedom, -abs(slope) * np.sqrt((x @ x) / variance)))
