"""The table of a sweep: what it shows in a terminal of any width."""

import io
import re

import pytest
from rich.console import Console
from written_runs import ENVIRONMENT, case, rounds

from mtabench.measuring.timing import Measurement
from mtabench.results.facts import RunFacts
from mtabench.results.rows import cell_row, timed_row
from mtabench.sweeps.table import print_results, results_table

FACTS = RunFacts("a", "2026-01-02T03:04:05Z", ENVIRONMENT)


def timed(seq, ms, **changes):
    return timed_row(case(seq, **changes), FACTS, Measurement("cpu", "warm", rounds(ms)), 1e-6, None)


ROWS = [
    timed(1024, 1234.5, batch=16, head_dim=64),
    timed(16384, 0.01234, batch=1, head_dim=128, impl="sdpa-cudnn"),
    cell_row(case(16384, batch=1, head_dim=64), FACTS, "oom", "there is no room"),
]
WHY = "a second call returns the memory of the first one's result, which is still in use: cached, or overwritten"


def printed(width, limit=None, rows=ROWS):
    paper = Console(file=io.StringIO(), width=width)
    if limit:
        paper.print(results_table(rows, width, limit))
    else:
        print_results(paper, rows)
    return [line.rstrip() for line in paper.file.getvalue().splitlines()]


@pytest.mark.parametrize("width", [58, 70, 80, 110, 200])
def test_a_table_too_wide_leaves_out_columns_and_cuts_nothing(monkeypatch, width):
    monkeypatch.setenv("COLUMNS", str(width))
    lines = printed(width)
    text = "\n".join(lines)
    assert "\u2026" not in text
    assert max(map(len, lines)) <= width
    assert lines[0].split()[:3] == ["batch", "head", "dim"]
    assert lines[0].endswith("status")
    assert [line.split()[2] for line in lines[1:3]] == ["1k", "16k"]
    assert re.search(r" sdpa-cudnn +0.01234 ", lines[2])
    assert re.search(r" 16k +eager +oom \[1\]$", lines[3])
    assert lines[-1] == "[1] there is no room"
    left_out = text.partition("left out for")[2]
    assert bool(left_out) == (width < 110)
    assert ("p10-p90 ms" in left_out) == (width < 110)
    assert ("speedup" in left_out) == (width == 58)


def test_a_reason_stands_below_the_table_once_and_breaks_between_words(monkeypatch):
    rows = [*ROWS, *(cell_row(case(seq, impl="sdpa-math"), FACTS, "wrong", WHY) for seq in (64, 128))]
    monkeypatch.setenv("COLUMNS", "58")
    lines = printed(58, rows=rows)
    assert max(map(len, lines)) <= 58
    assert [line[-9:] for line in lines if "sdpa-math" in line] == ["wrong [2]"] * 2
    at = lines.index("[1] there is no room")
    assert " ".join(lines[at + 1 :]).split() == ["[2]", *WHY.split()]


def test_a_frame_that_is_drawn_while_measuring_has_a_line_a_row():
    lines = printed(80, limit=2)
    assert len(lines) == 3
    assert "there is no room" not in "".join(lines)
    assert "left out" not in "".join(lines)
