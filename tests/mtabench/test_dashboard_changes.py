"""Changes in simulated histories: how often one is seen where there is none, and how well one is dated.

The numbers that are demanded here are a little weaker than those found with 300 histories each.
"""

import numpy as np
import pytest

from mtabench.dashboard.changes import FEW, find_changes

COUNT = 60  # histories of each kind
FIVE_PERCENT = np.log(1.05)


def found(logs, within=0.001):
    """The changes in log medians whose standard error within a run is `within`."""
    medians = np.exp(np.asarray(logs))
    return find_changes(medians, medians * np.exp(-1.96 * within), medians * np.exp(1.96 * within), 0.02)


def noise(generator, count, size, correlation=0.0, heavy=False):
    """Noise of a standard deviation; heavy has tails as Student's t with 3 degrees of freedom."""
    steps = generator.standard_t(3, count) / np.sqrt(3) if heavy else generator.normal(size=count)
    values = steps.copy()
    for i in range(1, count):
        values[i] = correlation * values[i - 1] + np.sqrt(1 - correlation**2) * steps[i]
    return size * values


def share(seed, simulate, holds):
    """The share of simulated histories of whose changes something holds."""
    generator = np.random.default_rng(seed)
    return np.mean([bool(holds(found(simulate(generator)))) for _ in range(COUNT)])


def sure(changes):
    return [change for change in changes if change.evidence in ("step", "drift")]


@pytest.mark.parametrize("runs", [6, 20, 200])
@pytest.mark.parametrize("size", [0.003, 0.01, 0.02])
@pytest.mark.parametrize("heavy", [False, True], ids=["normal", "heavy"])
def test_independent_noise_is_no_change(runs, size, heavy):
    """With 300 histories each: at most 1 % of them, in any of these settings."""
    assert share(1, lambda g: noise(g, runs, size, heavy=heavy), sure) <= 0.02


@pytest.mark.parametrize("correlation", [0.5, 0.8])
@pytest.mark.parametrize("runs", [60, 200])
def test_noise_that_lasts_for_several_runs_is_rarely_a_change(correlation, runs):
    """With 300 histories each: at most 6 %, where uncorrected tests found a change in up to 88 %."""
    assert share(2, lambda g: noise(g, runs, 0.02, correlation), sure) <= 0.1


@pytest.mark.parametrize("runs", [30, 200])
@pytest.mark.parametrize("total", [0.1, 0.3])
def test_a_drift_is_a_drift_and_no_step(runs, total):
    def simulate(generator):
        return noise(generator, runs, 0.01) + np.linspace(0, total, runs)

    assert share(3, simulate, lambda changes: [one.evidence for one in sure(changes)] == ["drift"]) >= 0.95


@pytest.mark.parametrize(
    ("runs", "at", "size", "least"),
    [(8, 4, 0.003, 0.95), (20, 17, 0.005, 0.95), (60, 30, 0.01, 0.93), (60, 57, 0.01, 0.8), (200, 196, 0.01, 0.88)],
)
def test_a_step_of_five_percent_is_dated_to_its_run(runs, at, size, least):
    """With 300 histories each 99 %, 100 %, 99 %, 90 % and 97 %."""

    def simulate(generator):
        return noise(generator, runs, size) + FIVE_PERCENT * (np.arange(runs) >= at)

    assert share(4, simulate, lambda changes: [one.bad for one in changes] == [at]) >= least


def test_two_steps_are_both_dated():
    """With 300 histories 96 %; in the others one is a run off."""

    def simulate(generator):
        runs = np.arange(200)
        return noise(generator, 200, 0.01) + FIVE_PERCENT * ((runs >= 80) & (runs < 140))

    def holds(changes):
        return [one.bad for one in changes] == [80, 140] and changes[0].change > 0 > changes[1].change

    assert share(5, simulate, holds) >= 0.85


def test_the_size_of_a_step_is_that_between_the_levels():
    generator = np.random.default_rng(6)
    logs = np.log(2.0) + noise(generator, 40, 0.003) + FIVE_PERCENT * (np.arange(40) >= 25)
    (change,) = found(logs)
    assert (change.good, change.bad, change.evidence) == (24, 25, "step")
    assert change.change == pytest.approx(0.05, abs=0.004)
    assert (change.before_ms, change.after_ms) == pytest.approx((2.0, 2.1), rel=0.003)


def test_a_step_below_the_threshold_does_not_count():
    generator = np.random.default_rng(7)
    assert not found(noise(generator, 100, 0.001) + np.log(1.015) * (np.arange(100) >= 50))


def test_one_run_apart_in_the_middle_is_no_change():
    generator = np.random.default_rng(8)
    logs = noise(generator, 60, 0.005)
    logs[30] += 0.3
    assert not found(logs)


@pytest.mark.parametrize("count", [1, 2])
def test_the_last_runs_are_told_before_they_are_confirmed(count):
    generator = np.random.default_rng(9)
    logs = noise(generator, 40, 0.003) + FIVE_PERCENT * (np.arange(40) >= 40 - count)
    (change,) = found(logs)
    assert (change.good, change.bad, change.evidence) == (39 - count, 40 - count, "latest")


def test_the_noise_is_never_less_than_the_intervals_say():
    """A history that happens to be still is not known better than its runs are."""
    logs = np.zeros(8) + np.log(1.03) * (np.arange(8) >= 4)
    assert found(logs, within=0.0005)
    assert not found(logs, within=0.02)


def test_a_short_history_goes_by_intervals_alone():
    assert len(found(np.log([1.0, 1.01, 1.06, 1.06]), within=0.001)) == 1
    (change,) = found(np.log([1.0, 1.05]), within=0.001)
    assert (change.good, change.bad, change.evidence) == (0, 1, "few")
    assert not found(np.log([1.0, 1.05]), within=0.02)  # overlapping
    assert not found(np.log([1.0, 1.015]), within=0.001)  # below the threshold


@pytest.mark.parametrize("runs", range(FEW + 1))
def test_any_length_of_history_can_be_looked_at(runs):
    assert found(np.zeros(runs)) == []
