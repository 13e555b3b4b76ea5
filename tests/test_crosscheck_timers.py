"""scripts/crosscheck_timers.py: the table of two timers, with cells that are stood in for."""

import csv
import sys

import crosscheck_timers as crosscheck
import pytest

from mtabench.errors import UsageError
from mtabench.problem import axes


class Here:
    """Stands for the pool of processes: the call's result, or what it raises, at once."""

    def __init__(self, *_, **__):
        pass

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def submit(self, function, *arguments):
        self.result = lambda: function(*arguments)
        return self


@pytest.fixture
def run(monkeypatch, tmp_path):
    """Runs the script; every cell takes 1 ms by events, and by NVBench what `nvbench` says, or raises it."""

    def call(nvbench, *words):
        def medians(case, rounds):
            if isinstance(nvbench, Exception):
                raise nvbench
            return dict.fromkeys(crosscheck.FACTS, "x") | {"git_dirty": False}, 1.0, nvbench(case)

        monkeypatch.setattr(crosscheck, "medians", medians)
        monkeypatch.setattr(crosscheck, "ProcessPoolExecutor", Here)
        monkeypatch.setattr(crosscheck, "check_nvbench", lambda: None)
        monkeypatch.setattr(crosscheck, "resolve_device", lambda name: name)
        monkeypatch.setattr(sys, "argv", ["crosscheck_timers.py", "--out", str(tmp_path / "out/timers.csv"), *words])
        code = crosscheck.main()
        with (tmp_path / "out/timers.csv").open() as file:
            return code, list(csv.DictReader(file))

    return call


def test_timers_that_agree(run):
    code, rows = run(lambda case: 1.004, "--rounds", "7")
    assert code == 0
    assert len(rows) == 20
    assert {row["difference"] for row in rows} == {"0.004000"}
    assert {(row["rounds"], row["git_dirty"], row["causal"]) for row in rows} == {("7", "false", "true")}
    assert [row["conv_q"] for row in rows] == ["6", "", ""] * 5 + [""] * 5


def test_one_cell_of_twenty_that_disagrees_fails(run, capsys):
    code, rows = run(lambda case: 0.98 if case.seq == 512 and case.impl == "hopper" else 1.0)
    assert code == 1
    assert "the largest difference is 2.00 %" in capsys.readouterr().out
    assert [row["seq"] for row in rows if row["difference"] != "0.000000"] == ["512"]


def test_cells_without_a_time_fail_and_say_why(run):
    code, rows = run(ValueError("out is off\nby far"))
    assert code == 1
    assert {row["reason"] for row in rows} == {"ValueError: out is off by far"}
    assert not any(row["difference"] for row in rows)


def test_cells_of_less_than_10_us_may_differ(run, monkeypatch):
    monkeypatch.setattr(crosscheck, "SHORTEST_MS", 1.1)
    assert run(lambda case: 0.5)[0] == 0


def test_the_twenty_cells():
    impls = ("hopper", "sdpa-cudnn", "sdpa-flash")
    assert [(case.impl, case.batch, axes.short(case.seq)) for case in crosscheck.cells()] == [
        *((impl, 1, seq) for seq in ("128", "256", "512", "1k", "2k") for impl in impls),
        *(("sdpa-flash", 16, seq) for seq in ("512", "1k", "2k", "4k", "8k")),
    ]


@pytest.mark.parametrize("missing", ["resolve_device", "check_nvbench"])
def test_what_is_missing_is_one_sentence_and_no_file(monkeypatch, tmp_path, capsys, missing):
    def refuse(*_):
        raise UsageError("there is none here; try another")

    monkeypatch.setattr(crosscheck, "resolve_device", lambda name: name)
    monkeypatch.setattr(crosscheck, missing, refuse)
    monkeypatch.setattr(sys, "argv", ["crosscheck_timers.py", "--out", str(tmp_path / "timers.csv")])
    with pytest.raises(SystemExit) as ended:
        crosscheck.main()
    assert ended.value.code == 2
    assert "there is none here; try another" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_nothing_is_overwritten(run, tmp_path, capsys):
    (tmp_path / "out").mkdir()
    (tmp_path / "out/timers.csv").write_text("mine")
    with pytest.raises(SystemExit):
        run(lambda case: 1.0)
    assert "already exists" in capsys.readouterr().err
    assert (tmp_path / "out/timers.csv").read_text() == "mine"
