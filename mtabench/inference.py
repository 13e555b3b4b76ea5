"""Whether two runs differ: the log ratio of medians, its error by bootstrap over rounds, Holm's correction."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import brentq
from scipy.special import digamma, polygamma, stdtr, stdtrit

RESAMPLES = 1000
FEWEST_TO_POOL = 10
MOST_FREEDOM = 1e6

Rounds = Sequence[Sequence[float]]
Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class LogMedians:
    """Logarithms of medians, the variance that one round alone would give them, and its freedom: `[cells]`."""

    values: Floats
    rounds: Floats
    round_variances: Floats
    freedom: Floats

    @property
    def variances(self) -> Floats:
        """Squared standard errors of the values."""
        return self.round_variances / self.rounds


@dataclass(frozen=True, slots=True)
class LogRatios:
    """Log ratios head / base, 95 % intervals and two-sided p-values against no change: `[cells]`."""

    values: Floats
    low: Floats
    high: Floats
    p_values: Floats


def compare_rounds(base: Sequence[Rounds], head: Sequence[Rounds], resamples: int = RESAMPLES) -> LogRatios:
    """Compare samples (ms by round) of the same cells in two runs; the same samples give the same answer."""
    return log_ratios(*(pooled(log_medians(cells, seed, resamples)) for seed, cells in enumerate((base, head))))


def log_medians(cells: Sequence[Rounds], seed: int, resamples: int = RESAMPLES) -> LogMedians:
    """Medians of all samples of each cell (ms by round), and their variances by bootstrap over whole rounds.

    The cluster bootstrap (Field and Welsh, J. R. Stat. Soc. B 69, 2007) draws rounds again, not samples, since the
    samples of one round share its conditions. From R rounds it gives (R - 1) / R of the variance (Davison and Hinkley,
    Bootstrap Methods and Their Application, 1997, section 2.3), which is put right here. Cells with as many rounds
    share their draws. With one round the variance is infinite. Raises ValueError for a cell without a sample.
    """
    draws: dict[int, NDArray[np.int16]] = {}
    counts = np.array([len(rounds) for rounds in cells], dtype=float)
    values, variances = np.empty(len(cells)), np.full(len(cells), np.inf)
    for i, rounds in enumerate(cells):
        samples = np.concatenate([np.empty(0), *(np.asarray(r, dtype=float) for r in rounds)])
        if not samples.size:
            raise ValueError("a median needs a sample")
        values[i] = np.log(np.median(samples))
        count = len(rounds)
        if count > 1:
            if count not in draws:
                generator = np.random.default_rng((seed, count))
                draws[count] = generator.multinomial(count, np.full(count, 1 / count), resamples).astype(np.int16)
            owners = np.repeat(np.arange(count), [len(r) for r in rounds])
            drawn = np.log(weighted_medians(samples, draws[count], owners))
            variances[i] = drawn.var(ddof=1) * count / (count - 1)
    return LogMedians(values, counts, variances * counts, counts - 1)


def weighted_medians(samples: Floats, weights: NDArray[np.int16], owners: NDArray[np.intp]) -> Floats:
    """Medians of `samples` `[n]`, each taken `weights[:, owner]` times, for every row of weights: `[resamples]`."""
    order = np.argsort(samples)
    ranked = samples[order]
    upto = np.cumsum(weights[:, owners[order]], axis=1, dtype=np.int32)
    total = upto[:, -1:]
    lower, upper = ((upto > middle).argmax(axis=1) for middle in ((total - 1) // 2, total // 2))
    return (ranked[lower] + ranked[upper]) / 2


def pooled(medians: LogMedians) -> LogMedians:
    """Each cell's variance drawn towards what is usual in the run, and the freedom that this adds.

    A variance from five rounds is uncertain, and a cell stops early just when its own came out small; the other cells
    of the run say what is likely: empirical Bayes by moments of the log variance (Smyth, Stat. Appl. Genet. Mol. Biol.
    3, 2004, section 6.2). Runs of fewer than FEWEST_TO_POOL cells stay as they are.
    """
    variances, freedom = medians.round_variances, medians.freedom
    known = np.isfinite(variances) & (variances > 0)
    if known.sum() < FEWEST_TO_POOL:
        return medians
    half = freedom[known] / 2
    logs = np.log(variances[known]) - digamma(half) + np.log(half)
    spread = logs.var(ddof=1) - polygamma(1, half).mean()
    prior = MOST_FREEDOM
    if spread > polygamma(1, MOST_FREEDOM / 2):
        prior = 2 * brentq(lambda x: polygamma(1, x) - spread, 1e-3, MOST_FREEDOM / 2)
    usual = np.exp(logs.mean() + digamma(prior / 2) - np.log(prior / 2))
    drawn = np.isfinite(variances)
    total = prior + freedom
    shrunk = (prior * usual + freedom * np.where(drawn, variances, 0)) / total
    return replace(medians, round_variances=np.where(drawn, shrunk, np.inf), freedom=total)


def log_ratios(base: LogMedians, head: LogMedians) -> LogRatios:
    """Compare runs that were measured apart, so that their variances add.

    Few rounds have too few different resamples for the small p-values that many cells need, so the tails are those of
    Student's t with the bootstrap's variances (Cameron, Gelbach and Miller, Rev. Econ. Stat. 90, 2008) and the
    degrees of freedom of Welch (Biometrika 34, 1947). What has no variance at all differs if its medians do.
    """
    values = head.values - base.values
    total = base.variances + head.variances
    p_values, reach = np.where(values == 0, 1.0, 0.0), np.zeros_like(values)
    unknown = ~np.isfinite(total)
    p_values[unknown], reach[unknown] = 1, np.inf
    some = np.isfinite(total) & (total > 0)
    parts = [run.variances[some] ** 2 / run.freedom[some] for run in (base, head)]
    freedom, errors = total[some] ** 2 / (parts[0] + parts[1]), np.sqrt(total[some])
    p_values[some] = 2 * stdtr(freedom, -np.abs(values[some]) / errors)
    reach[some] = stdtrit(freedom, 0.975) * errors
    return LogRatios(values, values - reach, values + reach, p_values)


def holm(p_values: Floats) -> Floats:
    """Adjusted p-values: held to a level, the chance of any false alarm among all cells stays below that level.

    Holm, Scand. J. Stat. 6, 1979; scipy has only procedures for the false discovery rate.
    """
    count = len(p_values)
    order = np.argsort(p_values, kind="stable")
    adjusted = np.empty(count)
    adjusted[order] = np.minimum(1, np.maximum.accumulate(np.asarray(p_values)[order] * (count - np.arange(count))))
    return adjusted
