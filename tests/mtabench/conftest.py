"""Fixtures of several commands."""

import pytest
from paired_runs import Processes

from mtabench.comparing import pairs


@pytest.fixture
def processes(monkeypatch):
    """Puts a stand-in in the place of processes, given what they measure."""

    def put(results):
        stand_in = Processes(results)
        monkeypatch.setattr(pairs, "run_module", stand_in)
        return stand_in

    return put
