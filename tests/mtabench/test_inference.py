"""Inference on log ratios: each part on its own, then false alarms and power on simulated noise."""

from dataclasses import replace

import numpy as np
import pytest
from scipy.stats import bootstrap, trim_mean, ttest_rel
from simulated_noise import CELLS, ROUNDS, simulated_pairs, simulated_run, simulated_times, stops

from mtabench.comparing.compare import LEVEL, judge
from mtabench.comparing.inference import (
    Estimates,
    by_pairs,
    by_processes,
    by_rounds,
    compare_samples,
    detectable,
    holm,
    location,
    log_ratios,
    paired_ratios,
    pooled,
)
from mtabench.measuring.statistics import geometric_mean, median_interval, summarize

THRESHOLD = 0.02  # the default of `mtabench compare`


def estimates(variances, freedom, clusters=10.0):
    shape = np.ones(len(variances))
    return Estimates(0 * shape, clusters * shape, np.asarray(variances, dtype=float), freedom * shape)


def noisy(count=12, samples=10, drift=0.02, within=0.01, seed=1):
    """Samples of one process by round."""
    generator = np.random.default_rng(seed)
    return np.exp(generator.normal(0, drift, (count, 1)) + generator.normal(0, within, (count, samples)))


def test_the_variance_is_that_of_scipys_bootstrap_over_rounds():
    times = noisy(count=40)
    over_rounds = bootstrap(
        (np.arange(40),),
        lambda drawn: trim_mean(np.log(times[drawn]).ravel(), 0.25),
        vectorized=False,
        n_resamples=2000,
        rng=2,
    )
    found = by_rounds([[times.tolist()]])
    assert np.sqrt(found.variances[0] * 39 / 40) == pytest.approx(over_rounds.standard_error, rel=0.1)
    assert found.values[0] == pytest.approx(trim_mean(np.log(times).ravel(), 0.25))


def test_rounds_of_different_lengths_and_one_round():
    found = by_rounds([[[[1.0], [1.0, 1.1], [1.2, 1.0, 1.1]]], [[[1.0, 2.0]]]])
    assert 0 < found.variances[0] < np.inf
    assert found.variances[1] == np.inf
    with pytest.raises(ValueError, match="sample"):
        location([[]])


def test_pairs_are_scipys_paired_t_test_of_processes():
    base, head = ([noisy(seed=seed).tolist() for seed in seeds] for seeds in ((1, 2, 3, 4), (5, 6, 7, 8)))
    found = paired_ratios(by_pairs([base], [head]))
    expected = ttest_rel([location(p) for p in head], [location(p) for p in base])
    assert found.p_values[0] == pytest.approx(expected.pvalue)
    assert [found.low[0], found.high[0]] == pytest.approx(list(expected.confidence_interval()))
    compared = compare_samples([base], [head])
    assert compared.ratios == found
    assert compared.head_ms / compared.base_ms == pytest.approx(np.exp(found.values))


def test_what_differs_from_process_to_process_widens_the_interval():
    """Both processes of a side are quiet and 4 % apart; rounds alone would take that for a change."""
    quiet = [noisy(drift=0.001, seed=seed) for seed in range(6)]
    base = [times.tolist() for times in quiet[:3]]
    head = [(times * factor).tolist() for times, factor in zip(quiet[3:], (1.0, 1.06, 1.02), strict=True)]
    by_process = compare_samples([base], [head]).ratios
    one_each = compare_samples([base[:1]], [head[1:2]]).ratios
    assert one_each.p_values[0] < 1e-3 < 0.05 < by_process.p_values[0]
    unequal = compare_samples([base], [head[:2]]).ratios
    apart = log_ratios(by_processes([base]), by_processes([head[:2]]))
    assert unequal.p_values == pytest.approx(apart.p_values)


def test_pooling_finds_what_variances_were_drawn_from():
    """Variances around 4 with 6 degrees of freedom, each seen through 9 more."""
    generator = np.random.default_rng(3)
    true = 4 * 6 / generator.chisquare(6, 5000)
    found = pooled(estimates(true * generator.chisquare(9, 5000) / 9, freedom=9.0))
    assert found.freedom[0] - 9 == pytest.approx(6, rel=0.15)
    assert np.median(found.cluster_variances / true) == pytest.approx(1, rel=0.1)


def test_ratios_without_noise_and_of_one_round():
    constant, one_round = [[[1.0] * 3] * 5], [[[1.0, 1.1]]]
    found = compare_samples([constant, constant, one_round], [constant, [[[1.1] * 3] * 5], one_round]).ratios
    assert found.p_values == pytest.approx([1, 0, 1])
    assert [found.low[1], found.high[1]] == pytest.approx([np.log(1.1)] * 2)
    assert (found.low[2], found.high[2]) == (-np.inf, np.inf)


@pytest.mark.parametrize("threshold", [1e-9, 0.02])
@pytest.mark.parametrize(("cells", "clusters"), [(1, 3), (4, 5), (12, 5)])
def test_a_slowdown_as_small_as_detectable_is_found_in_95_percent(cells, clusters, threshold):
    """Each comparison of the same code is slowed down in its last cell by what it says itself."""
    generator = np.random.default_rng(5)
    found, comparisons = 0, 400
    for _ in range(comparisons):
        differences = generator.normal(0, 0.01, (cells, clusters))
        estimates = Estimates(differences.mean(axis=1), np.full(cells, float(clusters)),
                              differences.var(axis=1, ddof=1), np.full(cells, clusters - 1.0))  # fmt: skip
        ratios = paired_ratios(estimates)
        planted = detectable(ratios.errors, ratios.freedom, np.log1p(threshold), LEVEL)[-1]
        slowed = estimates.values + planted * (np.arange(cells) == cells - 1)
        found += judge(paired_ratios(replace(estimates, values=slowed)), threshold)[-1] == "slower"
    assert found / comparisons == pytest.approx(0.95, abs=0.03)


def test_what_is_detectable_by_hand():
    """Two cells, errors of 1 % with 4 degrees of freedom: t(0.995) = 4.6041 and t(0.95) = 2.1318, from tables."""
    errors, freedom = np.array([0.01, 0.01]), np.array([4.0, 4.0])
    assert detectable(errors, freedom, 0.02, 0.02) == pytest.approx([0.067359] * 2, abs=1e-5)
    assert detectable(errors, freedom, 0.06, 0.02) == pytest.approx([0.081318] * 2, abs=1e-5)
    assert np.isinf(detectable(np.array([np.inf]), np.array([1.0]), 0.02, 0.02)).all()


def test_holm():
    assert holm(np.array([0.01, 0.04, 0.03, 0.005])).tolist() == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm(np.array([0.9, 0.8])).tolist() == [1, 1]
    assert holm(np.array([])).tolist() == []


def test_the_stop_of_the_simulation_is_no_later_than_the_real_one():
    """The stand-in must not flatter the comparison with more rounds than a sweep would take."""
    generator = np.random.default_rng(6)
    run, real = np.concatenate([simulated_times(generator) for _ in range(2)]), []
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
    """200 comparisons of 50 cells of the same code; then each fifth cell 3 % slower, one at a time."""
    generator = np.random.default_rng(7)
    tally = Tally()
    for _ in range(200):
        base, head = (pooled(by_rounds([[cell] for cell in simulated_run(generator)])) for _ in range(2))
        tally.add(log_ratios(base, head), log_ratios(base, replace(head, values=head.values + np.log(1.03))))
    tally.check(least_found=0.965)


@pytest.mark.slow
def test_processes_in_pairs_hardly_ever_fail_where_they_differ_and_3_percent_are_found():
    """The same where each process has an offset of its own of 0.5 % and pairs drift: 5 pairs, as `mtabench ab`.

    One run each, of which only rounds are known, fails there in a third of the comparisons.
    """
    generator = np.random.default_rng(9)
    tally, single = Tally(), Tally()
    for _ in range(50):
        base, head = simulated_pairs(generator)
        differences = pooled(by_pairs(base, head))
        slower = replace(differences, values=differences.values + np.log(1.03))
        tally.add(paired_ratios(differences), paired_ratios(slower))
        one_each = [pooled(by_rounds([cell[:1] for cell in side])) for side in (base, head)]
        single.add(log_ratios(*one_each), None)
    tally.check(least_found=0.97)
    assert single.alarms >= 50 / 3


class Tally:
    """Counts false alarms of comparisons of the same code, and planted slowdowns that were found."""

    def __init__(self):
        self.comparisons = self.alarms = self.alarms_without_threshold = self.planted = self.found = 0

    def add(self, same, slower):
        self.comparisons += 1
        self.alarms += any(verdict == "slower" for verdict in judge(same, THRESHOLD))
        self.alarms_without_threshold += any(verdict == "slower" for verdict in judge(same, 0.0))
        for cell in range(self.comparisons % 5, CELLS, 5) if slower else ():
            planted = np.arange(CELLS) == cell
            self.planted += 1
            mixed = [np.where(planted, *pair) for pair in zip(columns(slower), columns(same), strict=True)]
            self.found += judge(type(same)(*mixed), THRESHOLD)[cell] == "slower"

    def check(self, least_found):
        assert self.alarms <= 0.01 * self.comparisons
        assert self.alarms_without_threshold <= 0.02 * self.comparisons
        assert self.found / self.planted >= least_found


def columns(ratios):
    return ratios.values, ratios.low, ratios.high, ratios.p_values, ratios.errors, ratios.freedom


def test_summary_of_known_samples():
    summary = summarize([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0], [7.0, 8.0, 9.0, 10.0, 11.0]])
    assert summary.median_ms == 6.0
    assert summary.p10_ms == 2.0
    assert summary.p90_ms == 10.0
    assert (summary.rounds, summary.samples) == (3, 11)
    assert summary.ci95_low_ms <= summary.median_ms <= summary.ci95_high_ms


def test_no_samples_is_an_error():
    with pytest.raises(ValueError, match="sample"):
        summarize([])


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


def test_geometric_mean():
    assert geometric_mean([2.0, 8.0]) == pytest.approx(4.0)
    with pytest.raises(ValueError, match="positive"):
        geometric_mean([1.0, 0.0])
    with pytest.raises(ValueError, match="positive"):
        geometric_mean([])
