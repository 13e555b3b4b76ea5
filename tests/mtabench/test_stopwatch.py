"""Where the wall time of a sweep goes."""

from types import SimpleNamespace

import pytest

from mtabench.measuring import stopwatch
from mtabench.measuring.stopwatch import CHARTS, MEASURING, START, VERIFYING, Stopwatch


@pytest.fixture
def clock(monkeypatch):
    """A clock that stands until it is set forward."""
    clock = SimpleNamespace(now=100.0)
    monkeypatch.setattr(stopwatch.time, "monotonic", lambda: clock.now)
    return clock


def spend(clock, seconds, error=None):
    clock.now += seconds
    if error:
        raise error


def test_all_else_is_neither_measuring_nor_verifying(clock):
    spent = Stopwatch()
    spend(clock, 2)
    spent.since_start(START)
    with spent.on(MEASURING):
        spend(clock, 12)
    with pytest.raises(ValueError, match="planted"), spent.on(VERIFYING):
        spend(clock, 4, ValueError("planted"))
    spend(clock, 1)
    with spent.on(CHARTS):
        spend(clock, 1)
    assert spent.overhead() == pytest.approx(0.2)
    assert spent.line() == (
        "time: 20.0 s, of which 60 % measuring, 20 % verifying and 20 % all else "
        "(2.0 s to start, 1.0 s charts, 1.0 s beside the cells)"
    )


def test_what_another_process_spent_counts(clock):
    spent = Stopwatch()
    spend(clock, 10)
    spent.add({MEASURING: 5.0, VERIFYING: 3.0})
    spent.add({MEASURING: 1.0})
    assert spent.overhead() == pytest.approx(0.1)
