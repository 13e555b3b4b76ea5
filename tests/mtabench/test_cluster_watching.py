"""What a person sees of a sweep by several workers: in a terminal a line a worker, in a log a line a cell."""

import io

import pytest
from rich.console import Console
from written_runs import ENVIRONMENT, case

from mtabench.cluster import watching
from mtabench.results.facts import RunFacts
from mtabench.results.rows import cell_row


def row(seq, worker="node1 GPU 0"):
    return cell_row(case(seq), RunFacts("a", "", ENVIRONMENT | {"worker": worker}), "error", "planted")


@pytest.fixture
def terminal(monkeypatch):
    monkeypatch.setattr(watching, "REDRAW_S", 0.0)
    return Console(file=io.StringIO(), force_terminal=True, width=100, height=24)


def drawn(shown):
    """The text of a frame that is drawn now."""
    paper = Console(file=io.StringIO(), width=100)
    paper.print(shown._render())
    return paper.file.getvalue()


def test_a_terminal_has_a_line_for_every_worker(terminal):
    with watching.crew_watcher(terminal, 10, []) as shown:
        shown.working("node1 GPU 0", "timing eager")
        shown.working("node1 GPU 1", "verifying triton")
        shown.ended(row(64))
        shown.refresh()
        text = drawn(shown)
        assert "node1 GPU 0: timing eager" in text
        assert "node1 GPU 1: verifying triton" in text
        assert "1 of 10 cells" in text
        shown.working("node1 GPU 1", "")
        assert "node1 GPU 1" not in drawn(shown)


def test_a_thousand_workers_and_rows_fit_the_terminal(terminal):
    with watching.crew_watcher(terminal, 5000, []) as shown:
        for number in range(1000):
            shown.working(f"node{number:03}", "timing")
            shown.ended(row(64 + number))
        text = drawn(shown)
    assert len(text.splitlines()) <= terminal.height
    assert "and 990 more workers" in text
    assert "1000 of 5000 cells" in text


def test_a_log_says_who_measured_each_cell():
    console = Console(file=io.StringIO(), width=200)
    with watching.crew_watcher(console, 2, []) as shown:
        shown.working("node1 GPU 0", "timing")
        shown.ended(row(64, "node1 GPU 3"))
        shown.said("a [bold] word\x1b")
    first, second = console.file.getvalue().splitlines()
    assert first.startswith("[1/2] ")
    assert first.endswith("[node1 GPU 3]")
    assert second == r"a [bold] word\x1b"
