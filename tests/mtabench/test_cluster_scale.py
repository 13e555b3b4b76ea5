"""A thousand workers and a hundred thousand cells: what it costs to hand out a cell, and to write its row."""

import time

import pytest

pytest.importorskip("dask")
import simulated_crew

LIMIT_S = 5e-3

pytestmark = pytest.mark.slow


def test_this_suites_part_stays_far_below_5_ms_a_cell(tmp_path):
    """By the processor's time, which a busy machine does not stretch."""
    assert simulated_crew.pretended(1000, 10_000, tmp_path / "out.csv", time.process_time) < LIMIT_S / 2
    rows = (tmp_path / "out.csv").read_bytes().count(b"\n") - 1
    samples = (tmp_path / "out.samples.csv").read_bytes().count(b"\n") - 1
    assert (rows, samples) == (10_000, 10_000 * 50)


@pytest.mark.long
def test_with_dask_it_stays_below_5_ms_a_cell(tmp_path):
    assert simulated_crew.on_dask(100, 5_000, tmp_path / "out.csv") < LIMIT_S
