"""What the same code, measured in pairs of fresh processes, says of a machine: false alarms, and what can be seen."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations, permutations, product
from typing import Any

import numpy as np

from mtabench.comparing.compare import LEVEL, judge
from mtabench.comparing.inference import (
    POWER,
    Estimates,
    Floats,
    LogRatios,
    Processes,
    by_rounds,
    least_found,
    location,
    log_ratios,
    paired_ratios,
    pooled,
)

MOST_COMPARISONS = 1000


@dataclass(frozen=True, slots=True)
class Alarms:
    """How many comparisons of the same code called each cell slower, and how many called any cell slower."""

    cells: tuple[int, ...]
    any: int
    comparisons: int


@dataclass(frozen=True, slots=True)
class Noise:
    """The noise of a machine, cell by cell; shares of the time, 0.01 is 1 %.

    `pair_noise` is the standard deviation of the log ratio of two processes of a pair, `smallest_change` the slowdown
    that `ab` finds in a share POWER of comparisons; `single` are the alarms of `compare` of one run each, `paired`
    those of `ab`.
    """

    pair_noise: Floats
    smallest_change: Floats
    single: Alarms
    paired: Alarms


def find_noise(base: Sequence[Processes], head: Sequence[Processes], pairs: int, threshold: float) -> Noise:
    """The noise in samples (ms) of cells from N processes of the same code called base and N called head, in pairs.

    What `ab` does is counted over comparisons that take `pairs` of the N pairs (all, if there are fewer) and call
    either process of each the base: every choice, or MOST_COMPARISONS drawn from them. What `compare` of one run each
    does is counted over all ordered pairings of the 2 N processes. Either uses the same samples many times: the shares
    are estimates, and those of rare alarms rough ones.
    """
    differences = _locations(head) - _locations(base)
    comparisons = list(_of_pairs(differences, min(pairs, len(differences))))
    needed = np.array([_needed(estimates, threshold) for estimates in comparisons])
    return Noise(
        differences.std(axis=0, ddof=1),
        np.expm1(np.quantile(needed, POWER, axis=0, method="higher")),
        _alarms(_of_single_runs(base, head), threshold),
        _alarms(map(paired_ratios, comparisons), threshold),
    )


def _needed(estimates: Estimates, threshold: float) -> Floats:
    """The log ratio that, planted in a cell of a comparison without changes, is just found: `[cells]`."""
    errors = np.sqrt(estimates.variances)
    return least_found(errors, estimates.freedom, math.log1p(threshold), LEVEL) - estimates.values


def _locations(cells: Sequence[Processes]) -> Floats:
    """Logarithms of times: `[processes, cells]`."""
    return np.array([[location(rounds) for rounds in processes] for processes in cells]).T


def _alarms(comparisons: Iterable[LogRatios], threshold: float) -> Alarms:
    slower = np.array([[verdict == "slower" for verdict in judge(ratios, threshold)] for ratios in comparisons])
    return Alarms(tuple(slower.sum(axis=0).tolist()), int(slower.any(axis=1).sum()), len(slower))


def _of_pairs(differences: Floats, count: int) -> Iterator[Estimates]:
    """Comparisons of `count` of the pairs `[pairs, cells]`, in each of which either process may be the base."""
    total = len(differences)
    choices: Iterable[tuple[Any, Any]] = product(combinations(range(total), count), product((1, -1), repeat=count))
    if math.comb(total, count) * 2**count > MOST_COMPARISONS:
        generator = np.random.default_rng(0)
        choices = [
            (generator.choice(total, count, replace=False), generator.choice((1, -1), count))
            for _ in range(MOST_COMPARISONS)
        ]
    for chosen, signs in choices:
        values = differences[list(chosen)] * np.array(signs)[:, None]
        clusters = np.full(values.shape[1], float(count))
        yield pooled(Estimates(values.mean(axis=0), clusters, values.var(axis=0, ddof=1), clusters - 1))


def _of_single_runs(base: Sequence[Processes], head: Sequence[Processes]) -> Iterator[LogRatios]:
    """Comparisons of one process with another, for every two of them in either order."""
    runs = [[[cell[i]] for cell in side] for side in (base, head) for i in range(len(side[0]))]
    for one, other in permutations([pooled(by_rounds(run)) for run in runs], 2):
        yield log_ratios(one, other)
