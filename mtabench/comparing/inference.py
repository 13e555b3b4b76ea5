"""Whether two runs differ: the log ratio of their times, its error by clusters, Holm's correction.

A cluster is what was measured apart from the others: a process where a run has several, a round where it has one.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import chain

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import brentq
from scipy.special import digamma, polygamma, stdtr, stdtrit

CUT = 0.25
POWER = 0.95  # how often a change counts as found
FEWEST_TO_POOL = 10
MOST_FREEDOM = 1e6

Rounds = Sequence[Sequence[float]]
Processes = Sequence[Rounds]
Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Estimates:
    """Logarithms of times or of their ratios, from so many clusters: `[cells]`.

    `cluster_variances` are those that one cluster alone would give, infinite if there is only one; `freedom` says how
    well they are known.
    """

    values: Floats
    clusters: Floats
    cluster_variances: Floats
    freedom: Floats

    @property
    def variances(self) -> Floats:
        """Squared standard errors of the values."""
        return self.cluster_variances / self.clusters


@dataclass(frozen=True, slots=True)
class LogRatios:
    """Log ratios head / base, 95 % intervals and two-sided p-values against no change: `[cells]`.

    `errors` are their standard errors, infinite where nothing is known of the noise, and `freedom` says how well they
    are known.
    """

    values: Floats
    low: Floats
    high: Floats
    p_values: Floats
    errors: Floats
    freedom: Floats


@dataclass(frozen=True, slots=True)
class Compared:
    """The times of the same cells in two runs, in ms, and the log ratios of just these times: `[cells]`."""

    base_ms: Floats
    head_ms: Floats
    ratios: LogRatios


def compare_samples(base: Sequence[Processes], head: Sequence[Processes]) -> Compared:
    """Compare samples (ms by process and round) of the same cells in two runs.

    If every cell has as many processes in both runs, two or more, they are pairs in their order. `mtabench ab` measures
    these next to each other. Pairing unrelated processes costs certainty and is not wrong. With other numbers of
    processes the runs stand apart. Where a cell has one process only, rounds are the clusters, and what differs from
    process to process is not seen.
    """
    several = all(len(cell) > 1 for cell in (*base, *head))
    before, after = map(by_processes if several else by_rounds, (base, head))
    if several and (before.clusters == after.clusters).all():
        ratios = paired_ratios(pooled(by_pairs(base, head)))
    else:
        ratios = log_ratios(pooled(before), pooled(after))
    return Compared(np.exp(before.values), np.exp(after.values), ratios)


def detectable(errors: Floats, freedom: Floats, least: float, level: float) -> Floats:
    """The log ratio of the smallest slowdown that a comparison finds in a share POWER of cases: `[cells]`.

    Assume that only one of m cells changed. It is called slower from an estimate of at least `least` on, if its
    two-sided p-value passes Holm's strictest step, `level` / m. To that comes the minimum detectable effect (Bloom,
    Evaluation Review 19, 1995): t(POWER) standard errors. In a share POWER of cases the estimate falls short of the
    true change by no more.
    """
    sure = stdtrit(freedom, 1 - level / (2 * len(errors))) * errors
    return np.maximum(sure, least) + stdtrit(freedom, POWER) * errors


def location(rounds: Rounds) -> float:
    """The logarithm of a time: the mean of the middle half of the logarithms of all samples (ms).

    The interquartile mean. Outliers do not move it, as they do not move the median, and it uses more of the samples
    (Rosenberger and Gasko, in Hoaglin, Mosteller and Tukey, Understanding Robust and Exploratory Data Analysis, 1983).
    Raises ValueError without a sample.
    """
    return float(_middle_mean(_logs(rounds)))


def by_rounds(cells: Sequence[Processes]) -> Estimates:
    """Locations of cells, with rounds as clusters, since the samples of one round share its conditions.

    A round's influence on a trimmed mean is the sum of its samples' winsorized deviations (Tukey and McLaughlin,
    Sankhya A 25, 1963). The squares of the influences, times R / (R - 1) for R rounds, add up to the variance of a
    bootstrap over whole rounds. This is the infinitesimal jackknife (Efron, The Jackknife, the Bootstrap and Other
    Resampling Plans, 1982, chapter 6).
    """
    values, variances, counts = (np.full(len(cells), np.inf) for _ in range(3))
    alike: dict[tuple[int, ...], list[int]] = defaultdict(list)  # cells with as many samples in each round
    for i, processes in enumerate(cells):
        alike[tuple(map(len, chain(*processes)))].append(i)
    for lengths, places in alike.items():
        logs = _logs(chain(*chain(*(cells[i] for i in places)))).reshape(len(places), sum(lengths))
        values[places], counts[places] = _middle_mean(logs), len(lengths)
        if len(lengths) > 1:
            squares = (_influences(logs, lengths) ** 2).sum(axis=-1)
            variances[places] = squares * len(lengths) ** 2 / (len(lengths) - 1)
    return Estimates(values, counts, variances, counts - 1)


def by_processes(cells: Sequence[Processes]) -> Estimates:
    """Means over processes of their locations, with processes as clusters; whatever varies within one is in them.

    The bootstrap of a mean over whole clusters needs no drawing. Its variance is theirs over their number (Davison and
    Hinkley, Bootstrap Methods and Their Application, 1997, sections 2.2 and 3.8).
    """
    return _means([np.array([location(rounds) for rounds in processes]) for processes in cells])


def by_pairs(base: Sequence[Processes], head: Sequence[Processes]) -> Estimates:
    """Means of log ratios head / base of processes measured in pairs, so that drift from pair to pair cancels."""
    return _means(
        [
            np.array([location(two) - location(one) for one, two in zip(before, after, strict=True)])
            for before, after in zip(base, head, strict=True)
        ]
    )


def pooled(estimates: Estimates) -> Estimates:
    """Each cell's variance drawn towards what is usual in the run, and the freedom that this adds.

    A variance from five clusters is uncertain, and a cell stops early just when its own is small by chance. The other
    cells of the run show the usual one: empirical Bayes by moments of the log variance (Smyth, Stat. Appl. Genet. Mol.
    Biol. 3, 2004, section 6.2). Runs of fewer than FEWEST_TO_POOL cells stay as they are.
    """
    variances, freedom = estimates.cluster_variances, estimates.freedom
    known = np.isfinite(variances) & (variances > 0)
    if known.sum() < FEWEST_TO_POOL:
        return estimates
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
    return replace(estimates, cluster_variances=np.where(drawn, shrunk, np.inf), freedom=total)


def log_ratios(base: Estimates, head: Estimates) -> LogRatios:
    """Compare runs that were measured apart, so that their variances add.

    Few clusters have too few different resamples for the small p-values that many cells need. So the tails are
    Student's t's (Cameron, Gelbach and Miller, Rev. Econ. Stat. 90, 2008) with the degrees of freedom of Welch
    (Biometrika 34, 1947). What has no variance at all differs if its values do.
    """
    total = base.variances + head.variances
    freedom = np.ones_like(total)
    some = np.isfinite(total) & (total > 0)
    parts = [run.variances[some] ** 2 / run.freedom[some] for run in (base, head)]
    freedom[some] = total[some] ** 2 / (parts[0] + parts[1])
    return _student(head.values - base.values, total, freedom)


def paired_ratios(differences: Estimates) -> LogRatios:
    """Compare runs that were measured in pairs, by the estimates of `by_pairs`: the paired t-test."""
    return _student(differences.values, differences.variances, differences.freedom)


def holm(p_values: Floats) -> Floats:
    """Adjusted p-values: held to a level, the chance of any false alarm among all cells stays below that level.

    Holm, Scand. J. Stat. 6, 1979; scipy has only procedures for the false discovery rate.
    """
    count = len(p_values)
    order = np.argsort(p_values, kind="stable")
    adjusted = np.empty(count)
    adjusted[order] = np.minimum(1, np.maximum.accumulate(np.asarray(p_values)[order] * (count - np.arange(count))))
    return adjusted


def _logs(rounds: Iterable[Sequence[float]]) -> Floats:
    return np.log(np.fromiter(chain(*rounds), dtype=float))


def _middle_mean(logs: Floats) -> Floats:
    """The mean of the middle half of the samples: `[...]` of `[..., samples]`; raises ValueError without a sample."""
    count = logs.shape[-1]
    if not count:
        raise ValueError("an estimate needs a sample")
    cut = int(CUT * count)
    # scipy's trim_mean does that in fifty times the time
    return np.asarray(np.sort(logs)[..., cut : count - cut].mean(axis=-1))


def _influences(logs: Floats, lengths: Sequence[int]) -> Floats:
    """What each round of so many samples adds to the mean of the middle half: `[cells, rounds]`."""
    count = logs.shape[-1]
    ranked, cut = np.sort(logs), int(CUT * count)
    winsorized = np.clip(logs, ranked[:, [cut]], ranked[:, [count - cut - 1]])
    sums = np.cumsum(winsorized - winsorized.mean(axis=-1, keepdims=True), axis=-1)[:, np.cumsum(lengths) - 1]
    return np.diff(sums, prepend=0.0) / (count - 2 * cut)


def _means(clusters: Sequence[Floats]) -> Estimates:
    """Means of each cell's clusters, at least two."""
    counts = np.array([values.size for values in clusters], dtype=float)
    means = np.array([values.mean() for values in clusters])
    return Estimates(means, counts, np.array([values.var(ddof=1) for values in clusters]), counts - 1)


def _student(values: Floats, variances: Floats, freedom: Floats) -> LogRatios:
    """Intervals and p-values by Student's t."""
    p_values, reach = np.where(values == 0, 1.0, 0.0), np.zeros_like(values)
    unknown = ~np.isfinite(variances)
    p_values[unknown], reach[unknown] = 1, np.inf
    some = np.isfinite(variances) & (variances > 0)
    errors = np.sqrt(variances[some])
    p_values[some] = 2 * stdtr(freedom[some], -np.abs(values[some]) / errors)
    reach[some] = stdtrit(freedom[some], 0.975) * errors
    return LogRatios(values, values - reach, values + reach, p_values, np.sqrt(variances), freedom)
