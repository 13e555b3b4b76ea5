"""Inference on log ratios: each part on its own, then false alarms and power on simulated noise."""

from dataclasses import replace

import numpy as np
import pytest
from scipy.stats import bootstrap, mannwhitneyu
from simulated_noise import CELLS, ROUNDS, simulated_run, simulated_times, stops

from mtabench.compare import LEVEL, judge
from mtabench.inference import LogMedians, compare_rounds, holm, log_medians, log_ratios, pooled, weighted_medians
from mtabench.statistics import median_interval

THRESHOLD = 0.02  # the default of `mtabench compare`
FEW_RESAMPLES = 150  # they are many comparisons; 1000 are taken of one


def medians(variances, freedom, rounds=10.0):
    shape = np.ones(len(variances))
    return LogMedians(0 * shape, rounds * shape, np.asarray(variances, dtype=float), freedom * shape)


def test_weighted_medians_are_those_of_repeated_samples():
    generator = np.random.default_rng(0)
    owners = np.repeat(np.arange(4), [3, 1, 2, 3])
    samples, weights = generator.normal(size=9).round(1), generator.integers(0, 3, (50, 4)).astype(np.int16)
    weights[:, 0] += 1
    expected = [np.median(np.repeat(samples, row[owners])) for row in weights]
    assert weighted_medians(samples, weights, owners).tolist() == expected


def test_the_bootstrap_is_scipys_over_rounds():
    times = np.exp(np.random.default_rng(1).normal(0, 0.02, (12, 1)) + np.zeros((12, 10)))
    over_rounds = bootstrap(
        (np.arange(12),), lambda drawn: np.log(np.median(times[drawn])), vectorized=False, n_resamples=2000, rng=2
    )
    found = log_medians([times.tolist()], seed=0)
    assert np.sqrt(found.variances[0] * 11 / 12) == pytest.approx(over_rounds.standard_error, rel=0.1)
    assert found.values[0] == np.log(np.median(times))


def test_ten_equal_samples_a_round_say_no_more_than_one():
    values = np.exp(np.random.default_rng(1).normal(0, 0.02, 9))
    once, often = log_medians([[[x] for x in values], [[x] * 10 for x in values]], seed=0).variances
    assert often == pytest.approx(once)


def test_rounds_of_different_lengths_and_one_round():
    found = log_medians([[[1.0], [1.0, 1.1], [1.2, 1.0, 1.1]], [[1.0, 2.0]]], seed=0)
    assert 0 < found.variances[0] < np.inf
    assert found.variances[1] == np.inf
    with pytest.raises(ValueError, match="sample"):
        log_medians([[]], seed=0)


def test_pooling_finds_what_variances_were_drawn_from():
    """Variances around 4 with 6 degrees of freedom, each seen through 9 more."""
    generator = np.random.default_rng(3)
    true = 4 * 6 / generator.chisquare(6, 5000)
    found = pooled(medians(true * generator.chisquare(9, 5000) / 9, freedom=9.0))
    assert found.freedom[0] - 9 == pytest.approx(6, rel=0.15)
    assert np.median(found.round_variances / true) == pytest.approx(1, rel=0.1)


def test_pooling_of_equal_variances_and_of_few_or_odd_cells():
    alike = medians(np.random.default_rng(4).chisquare(9, 50) / 9, freedom=9.0)
    assert np.ptp(pooled(alike).round_variances) < 0.1 * np.ptp(alike.round_variances)
    few = medians([1.0, 2.0, 3.0], freedom=9.0)
    assert pooled(few) is few
    odd = pooled(medians([*np.linspace(1, 3, 20), 0.0, np.inf], freedom=9.0))
    assert 0 < odd.round_variances[-2] < 3
    assert odd.round_variances[-1] == np.inf


def test_ratios_without_noise_and_of_one_round():
    constant, one_round = [[1.0] * 3] * 5, [[1.0, 1.1]]
    found = compare_rounds([constant, constant, one_round], [constant, [[1.1] * 3] * 5, one_round])
    assert found.p_values == pytest.approx([1, 0, 1])
    assert [found.low[1], found.high[1]] == pytest.approx([np.log(1.1)] * 2)
    assert (found.low[2], found.high[2]) == (-np.inf, np.inf)


def test_holm():
    assert holm(np.array([0.01, 0.04, 0.03, 0.005])).tolist() == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm(np.array([0.9, 0.8])).tolist() == [1, 1]
    assert holm(np.array([])).tolist() == []


def test_the_stop_of_the_simulation_is_no_later_than_the_real_one():
    """The stand-in must not flatter the comparison with more rounds than a sweep would take."""
    generator = np.random.default_rng(6)
    run = np.concatenate([simulated_times(generator) for _ in range(2)])
    real = []
    for cell in run:
        for count in range(5, ROUNDS + 1):
            low, high = median_interval(cell[:count])
            if (high - low) / 2 <= 0.005 * (high + low) / 2:
                break
        real.append(count)
    quick = stops(run)
    assert np.mean(real) - 2 < quick.mean() < np.mean(real)
    assert (quick == 5).mean() >= np.equal(real, 5).mean()


@pytest.mark.slow
def test_same_code_hardly_ever_fails_and_a_slowdown_of_3_percent_is_found():
    """500 comparisons of 50 cells of the same code; then each cell in turn 3 % slower, one at a time."""
    generator = np.random.default_rng(7)
    alarms, alarms_without_threshold, found, comparisons = 0, 0, 0, 500
    for _ in range(comparisons):
        base, head = (pooled(log_medians(simulated_run(generator), seed, FEW_RESAMPLES)) for seed in (0, 1))
        same = log_ratios(base, head)
        alarms += any(verdict == "slower" for verdict, _ in judge(same, THRESHOLD))
        alarms_without_threshold += any(verdict == "slower" for verdict, _ in judge(same, 0.0))
        slower = log_ratios(base, replace(head, values=head.values + np.log(1.03)))
        for cell in range(CELLS):
            planted = (np.arange(CELLS) == cell).astype(float)
            mixed = [np.where(planted, *pair) for pair in zip(columns(slower), columns(same), strict=True)]
            found += judge(type(same)(*mixed), THRESHOLD)[cell][0] == "slower"
    share = found / (comparisons * CELLS)
    print(f"\n{comparisons} comparisons: {alarms} false alarms, {alarms_without_threshold} without a threshold;")
    print(f"{share:.2%} of the slowdowns found")
    assert alarms <= 0.01 * comparisons
    assert alarms_without_threshold <= 0.02 * comparisons
    assert share >= 0.95


def columns(ratios):
    return ratios.values, ratios.low, ratios.high, ratios.p_values


def test_pooled_mann_whitney_fails_the_same_code():
    """Samples of a round share its drift, and a test that takes each for a witness of its own sees changes."""
    generator = np.random.default_rng(8)
    alarms, comparisons = 0, 20
    for _ in range(comparisons):
        base, head = simulated_run(generator), simulated_run(generator)
        pairs = [(one.ravel(), other.ravel()) for one, other in zip(base, head, strict=True)]
        p_values = holm(np.array([mannwhitneyu(one, other).pvalue for one, other in pairs]))
        slower = np.array([np.median(other) > np.median(one) for one, other in pairs])
        alarms += bool((slower & (p_values <= LEVEL)).any())
    assert alarms >= 0.5 * comparisons
