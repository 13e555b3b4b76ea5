"""Fixtures of several commands."""

from functools import partial

import pytest
from command_line import make_runner
from paired_runs import Processes
from planted_sweeps import without_warm_up
from written_runs import write_pair

from mtabench.comparing import pairs


@pytest.fixture
def processes(monkeypatch):
    """Puts a stand-in in the place of processes, given what they measure."""

    def put(results):
        stand_in = Processes(results)
        monkeypatch.setattr(pairs, "run_module", stand_in)
        return stand_in

    return put


@pytest.fixture
def mtabench(monkeypatch, capsys, tmp_path):
    """Runs the command line in an empty folder; gives the exit code, standard output and standard error.

    Sweeps warm up for a moment, and measure no ceilings.
    """
    without_warm_up(monkeypatch)
    return make_runner(monkeypatch, capsys, tmp_path)


@pytest.fixture
def pair(tmp_path):
    """Writes base.csv and head.csv into the folder."""
    return partial(write_pair, tmp_path)
