"""Figures of written cells, for the tests of each kind of chart."""

import pytest
from chart_cells import figure, title_of, write


@pytest.fixture
def measured(tmp_path):
    """Writes cells and gives the figure of a kind."""
    return lambda kind, cells, **more: figure(write(tmp_path / "a.csv", cells), kind, **more)


@pytest.fixture
def titled(tmp_path):
    """Writes cells and gives the title of a kind's chart."""
    return lambda kind, cells: title_of(write(tmp_path / "a.csv", cells), kind)
