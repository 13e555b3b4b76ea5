"""scripts/crosscheck_timers.py: two timers in turns, and their table, with stand-ins for cells and for NVBench."""

import contextlib
import csv
import itertools
import sys
import time
import types

import crosscheck_timers as crosscheck
import fake_nvbench
import nvbench_timer
import pytest

from mtabench.errors import UsageError
from mtabench.measuring import timing
from mtabench.measuring.timing import Settings, Timed
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


QUICK = Settings(timer="cpu", min_rounds=3, samples_per_round=4)


@pytest.fixture
def nvbench(monkeypatch):
    """A fresh registry, and PyTorch without a GPU where it would choose NVBench's stream."""
    registry = fake_nvbench.Registry()
    module = types.ModuleType("cuda.bench")
    module.register, module.run_all_benchmarks = registry.register, registry.run_all_benchmarks
    results = types.ModuleType("cuda.bench.results")
    results.BenchmarkResult = fake_nvbench.BenchmarkResult
    monkeypatch.setitem(sys.modules, "cuda.bench", module)
    monkeypatch.setitem(sys.modules, "cuda.bench.results", results)
    monkeypatch.setattr(nvbench_timer, "on_stream_of", lambda state: contextlib.nullcontext())
    monkeypatch.setattr(nvbench_timer, "current_device", lambda: 3)
    monkeypatch.setattr(timing, "WARM_UP_SECONDS", 0.05)
    return registry


def test_the_timers_take_turns_round_by_round_and_flush_outside_the_window(nvbench, monkeypatch):
    calls, timers, execute = [], ["cpu"], fake_nvbench.State.exec

    def exec_(state, *arguments, **options):
        timers.append("nvbench")
        execute(state, *arguments, **options)
        timers.pop()

    def run(_):
        calls.append(timers[-1])
        time.sleep(0.002)

    monkeypatch.setattr(fake_nvbench.State, "exec", exec_)
    monkeypatch.setattr(nvbench_timer, "cache_flush", lambda *_: lambda: time.sleep(0.02))
    ours, theirs = nvbench_timer.measure_beside_nvbench(Timed(run=run), "cpu", QUICK)
    assert [len(samples) for samples in ours] == [2] * 6
    assert [len(samples) for samples in theirs] == [4, 4, 4]
    for rounds in (ours, theirs):
        assert 2 <= min(ms for samples in rounds for ms in samples) < 20
    turns = [(timer, len(list(group))) for timer, group in itertools.groupby(calls)]
    between = nvbench_timer.WARM_UP_CALLS + 2 * 2
    assert turns[-6:] == [
        ("nvbench", 5),
        ("cpu", between),
        ("nvbench", 5),
        ("cpu", between),
        ("nvbench", 5),
        ("cpu", 2),
    ]
    assert nvbench.arguments[:4] == ["mtabench", "--quiet", "--devices", "3"]
    assert nvbench.benchmarks[0].settings["set_stopping_criterion",] == "sample-count"


def test_what_a_call_raises_is_raised_and_so_is_a_round_without_samples(nvbench, monkeypatch):
    def run(_):
        if nvbench.was_run:
            raise RuntimeError("planted")

    with pytest.raises(RuntimeError, match="planted"):
        nvbench_timer.measure_beside_nvbench(Timed(run=run), "cpu", QUICK)
    monkeypatch.setattr(nvbench, "was_run", False)
    nvbench.benchmarks.clear()
    monkeypatch.setattr(fake_nvbench.State, "exec", lambda state, *_, **__: state.skip("too fast"))
    with pytest.raises(RuntimeError, match="no samples of a round: too fast"):
        nvbench_timer.measure_beside_nvbench(Timed(run=lambda _: None), "cpu", QUICK)


def test_without_its_package_it_says_what_to_install(monkeypatch):
    monkeypatch.setattr(nvbench_timer, "PACKAGE", "no_such_package.bench")
    with pytest.raises(UsageError, match=r"cuda-bench of NVIDIA is not installed; type pip install"):
        nvbench_timer.check_nvbench()
