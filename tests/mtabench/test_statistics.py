"""Summaries and the bootstrap over rounds."""

import numpy as np
import pytest

from mtabench.measuring.statistics import geometric_mean, median_interval, summarize


def test_summary_of_known_samples():
    summary = summarize([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0], [7.0, 8.0, 9.0, 10.0, 11.0]])
    assert summary.median_ms == 6.0
    assert summary.p10_ms == 2.0
    assert summary.p90_ms == 10.0
    assert (summary.rounds, summary.samples) == (3, 11)
    assert summary.ci95_low_ms <= summary.median_ms <= summary.ci95_high_ms


def test_summary_is_the_same_every_time():
    rounds = np.random.default_rng(3).normal(5, 1, (6, 10)).tolist()
    assert summarize(rounds) == summarize(rounds)


def test_no_samples_is_an_error():
    with pytest.raises(ValueError, match="sample"):
        summarize([])


def test_interval_covers_the_median():
    generator = np.random.default_rng(0)
    covered = 0
    for _ in range(200):
        offsets = generator.normal(0, 0.3, (16, 1))  # what a round's samples share
        low, high = median_interval((10 + offsets + generator.normal(0, 0.1, (16, 10))).tolist())
        covered += low <= 10 <= high
    assert 0.87 * 200 <= covered < 200


@pytest.mark.parametrize("count", [5, 16])
def test_interval_covers_the_median_about_as_often_as_it_says(count):
    generator = np.random.default_rng(0)
    covered = 0
    for _ in range(400):
        offsets = generator.normal(0, 0.3, (count, 1))
        low, high = median_interval((10 + offsets + generator.normal(0, 0.1, (count, 10))).tolist())
        covered += low <= 10 <= high
    assert 0.92 * 400 <= covered < 400


def test_interval_is_by_rounds_not_by_samples():
    """Ten equal samples a round say no more than one."""
    values = np.random.default_rng(1).normal(10, 1, 8)
    once = median_interval([[x] for x in values])
    assert median_interval([[x] * 10 for x in values]) == pytest.approx(once, rel=0.02)


def test_interval_of_rounds_of_different_lengths():
    low, high = median_interval([[1.0], [1.0, 1.1], [1.2, 1.0, 1.1]])
    assert 1.0 <= low <= high <= 1.2


def test_geometric_mean():
    assert geometric_mean([2.0, 8.0]) == pytest.approx(4.0)
    with pytest.raises(ValueError, match="positive"):
        geometric_mean([1.0, 0.0])
    with pytest.raises(ValueError, match="positive"):
        geometric_mean([])
