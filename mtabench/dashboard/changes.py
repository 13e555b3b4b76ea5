"""What changed in a history, and when: steps, drifts, and what the last runs alone say.

Steps are found in the logarithms of the medians. PELT (Killick, Fearnhead and Eckley, J. Am. Stat. Assoc. 107, 2012;
from ruptures) proposes where levels begin. All proposals are tested together, and the weakest is dropped until all that
are left pass, as Hunter does (Fleming et al., ICPE 2023). A step passes if

- it is at least the threshold in size, between the medians of both sides,
- it is significant at LEVEL, divided by the number of places where a step could be,
- it explains the data on top of a straight line through all of them, so that a slow drift is no step, and
- it goes on in the same direction, or lasts: for FEW runs, or for FEWEST_RUNS that all lie far from the levels around.

The noise is the history's own, from run to run, and never below what the intervals within the runs say. The tests take
it for a random walk with noise around it, whose share the history decides: see `_p_values`. Fewer than FEW times say
too little about noise from run to run. Neighbours then differ if their 95 % intervals do not overlap and FEW_LEAST is
reached, which is weaker evidence.
"""

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.fft import dst
from scipy.special import stdtr

from mtabench.errors import UsageError

FEW = 6
FEW_LEAST = 0.05  # of a change in a history of fewer times
FEWEST_FOR_NOISE = 4  # of which one change is no noise
FEWEST_RUNS = 3  # of a level
FEWEST_FOR_DRIFT = 10
PENALTY = 3.0  # times log(runs), in units of the noise; the tests below decide
LEVEL = 0.004
REACH = 6.0  # times the noise: so far from the level, the last runs are reported although they are too few
FIRST_REACH = 10.0  # of the first runs: more, since one outlier would pass for a level that ended
LEAST_NOISE = 1e-3
INTERVAL_WIDTH = 2 * 1.96  # of a 95 % interval, in standard errors
WANDER = np.concatenate([[0.0], np.geomspace(1e-4, 1e2, 13)])  # variance of a walk's steps, in units of the noise's

Floats = NDArray[np.floating]


@dataclass(frozen=True, slots=True)
class Change:
    """A change between the points `good` and `bad`: 0.05 is 5 % slower. `evidence` is the rule that found it.

    "step": a new level that held for at least FEWEST_RUNS runs, or changed further. "latest": the last few runs lie
    apart, which is not yet confirmed. "few": two neighbours of a short history. "drift": gradual, all the way from
    `good` to `bad`. `before_ms` and `after_ms` are the levels.
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
    latest = _latest_start(logs, cuts[-1], max(least, REACH * noise))
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
    least = np.log1p(max(threshold, FEW_LEAST))
    if len(logs) >= FEWEST_FOR_NOISE:
        least = max(least, REACH * _noise(logs, np.log(high_ms / low_ms)))
    return [
        _change(i, i + 1, logs[i], logs[i + 1], "few")
        for i in range(len(logs) - 1)
        if (high_ms[i] < low_ms[i + 1] or high_ms[i + 1] < low_ms[i]) and abs(logs[i + 1] - logs[i]) >= least
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
    search = KernelCPD(kernel="linear", min_size=1).fit((logs / noise)[:, None])
    cuts = [int(cut) for cut in search.predict(pen=PENALTY * np.log(len(logs)))[:-1]]
    cuts = [cut for cut in cuts if cut <= len(logs) - FEWEST_RUNS]
    while cuts:
        doubts = _doubts(logs, cuts, noise, least)
        weakest = int(np.argmax(doubts))
        if doubts[weakest] <= 1:
            break
        del cuts[weakest]
    return cuts


def _doubts(logs: Floats, cuts: list[int], noise: float, least: float) -> list[float]:
    """How unsure each step is: it passes at 1 or less; above 2, it is smaller than what counts, or was soon undone.

    While any is above 2, the others are 0: the weakest step does not depend on them, and their tests take long.
    """
    bounds = [0, *cuts, len(logs)]
    levels = [logs[a:b] for a, b in pairwise(bounds)]
    sizes = np.diff([np.median(level) for level in levels])
    small = np.abs(sizes) < least
    doubts = np.where(small, 2 + 1 / np.maximum(np.abs(sizes), 1e-9), 0.0)
    for i, cut in enumerate(cuts):
        if cut < FEWEST_RUNS and abs(sizes[i]) < FIRST_REACH * noise:
            doubts[i] = max(doubts[i], 3)
        short = levels[i] if i else logs
        if len(short) < FEW and sizes[i - 1] * sizes[i] < 0:
            reach = REACH * max(noise, short.std()) if len(short) >= FEWEST_RUNS else np.inf
            if min(abs(sizes[i - 1 : i + 1])) < reach:
                doubts[i - 1 : i + 1] = np.maximum(doubts[i - 1 : i + 1], 3)
    if doubts.any():
        return doubts.tolist()
    runs = np.arange(len(logs))
    columns = [runs >= cut for cut in cuts]
    p_values = _p_values(logs, columns, noise)
    if len(logs) >= FEWEST_FOR_DRIFT + len(cuts):
        p_values = np.maximum(p_values, _p_values(logs, [runs, *columns], noise, sizes)[1:])
    return np.minimum(p_values * len(logs) / LEVEL, 2).tolist()


def _drift(logs: Floats, start: int, end: int, noise: float, least: float) -> list[Change]:
    """The last level if it slopes: surely, and so much that its first third is apart from its last."""
    level = logs[start:end]
    if len(level) < FEWEST_FOR_DRIFT:
        return []
    third = len(level) // 3
    before, after = float(np.median(level[:third])), float(np.median(level[-third:]))
    if abs(after - before) < least or _p_values(level, [np.arange(len(level))], noise)[0] > LEVEL:
        return []
    return [_change(start, end - 1, before, after, "drift")]


def _p_values(logs: Floats, columns: list[NDArray[Any]], noise: float, signs: Floats | None = None) -> Floats:
    """How likely the coefficient of each of `columns` is so far from zero by chance; 1 if it has not its sign.

    `signs` are the last columns' expected ones. The logs are a level, the columns, noise, and a random walk (Harvey,
    Forecasting, Structural Time Series Models and the Kalman Filter, 1989: the local level model). The walk's share of
    the variance is the likeliest of WANDER, by restricted likelihood. A sine transform of the differences makes them
    independent: their covariance is tridiagonal.
    """
    count = len(logs)
    y, *x = dst(np.diff(np.array([logs, *columns], dtype=float)), type=1, norm="ortho")
    variances = 4 * np.sin(np.pi * np.arange(1, count) / (2 * count)) ** 2 + WANDER[:, None]
    weighted = np.array(x) / variances[:, None]
    gram, products = weighted @ np.array(x).T, weighted @ y
    inverse = np.linalg.inv(gram)
    coefficients = (inverse @ products[..., None])[..., 0]
    freedom = count - 1 - len(x)
    squares = (y**2 / variances).sum(1) - (coefficients * products).sum(1)
    scale = np.maximum(squares / freedom, noise**2 / (1 + WANDER / 2))
    likelihood = -np.log(variances).sum(1) - np.linalg.slogdet(gram)[1] - freedom * np.log(scale) - squares / scale
    best = int(np.argmax(likelihood))
    found = coefficients[best]
    p_values = 2 * stdtr(freedom, -np.abs(found) / np.sqrt(scale[best] * np.diagonal(inverse[best])))
    if signs is not None:
        p_values[-len(signs) :][found[-len(signs) :] * signs < 0] = 1
    return p_values
