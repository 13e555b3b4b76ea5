"""Median, quantiles and a bootstrap interval of samples that come in rounds."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from scipy.special import ndtr, stdtrit

RESAMPLES = 1000


@dataclass(frozen=True, slots=True)
class Summary:
    """Times of one cell in ms; the interval is for the median."""

    median_ms: float
    p10_ms: float
    p90_ms: float
    ci95_low_ms: float
    ci95_high_ms: float
    rounds: int
    samples: int


def summarize(rounds: Sequence[Sequence[float]]) -> Summary:
    """Summarize samples in ms, grouped by round. Raises ValueError without a sample."""
    samples = np.concatenate([np.asarray(r, dtype=float) for r in rounds]) if rounds else np.empty(0)
    if not samples.size:
        raise ValueError("no samples to summarize")
    low, high = median_interval(rounds)
    p10, median, p90 = np.quantile(samples, [0.1, 0.5, 0.9])
    return Summary(float(median), float(p10), float(p90), low, high, len(rounds), int(samples.size))


def median_interval(rounds: Sequence[Sequence[float]]) -> tuple[float, float]:
    """95 % interval of the median, by bootstrap over whole rounds.

    Samples of one round share its conditions, so the bootstrap draws rounds again, not samples: the cluster bootstrap
    (Field and Welsh, J. R. Stat. Soc. B 69, 2007). Its percentiles are too narrow where rounds are few, so they are
    taken further out, as far as Student's t does (Hesterberg, Am. Stat. 69, 2015, "expanded percentile"). With one
    round the interval is its range.
    """
    if len(rounds) == 1:
        return float(min(rounds[0])), float(max(rounds[0]))
    generator = np.random.default_rng(0)
    drawn = generator.integers(0, len(rounds), size=(RESAMPLES, len(rounds)))
    arrays = [np.asarray(r, dtype=float) for r in rounds]
    if len({len(a) for a in arrays}) == 1:
        medians = np.median(np.stack(arrays)[drawn].reshape(RESAMPLES, -1), axis=1)
    else:
        medians = np.array([np.median(np.concatenate([arrays[i] for i in row])) for row in drawn])
    count = len(rounds)
    tail = ndtr(np.sqrt(count / (count - 1)) * stdtrit(count - 1, 0.025))
    low, high = np.quantile(medians, [tail, 1 - tail])
    return float(low), float(high)


def geometric_mean(values: Iterable[float]) -> float:
    """The mean that suits ratios. Raises ValueError for no values or values that are not positive."""
    array = np.fromiter(values, dtype=float)
    if not array.size or (array <= 0).any():
        raise ValueError("a geometric mean needs positive values")
    return float(np.exp(np.log(array).mean()))
