"""scripts/crosscheck_timers.py: the table of two timers, with sweeps that are stood in for."""

import csv
import importlib.util
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from written_runs import case, rounds, write_run

ROOT = Path(__file__).parents[1]
SPEC = importlib.util.spec_from_file_location("crosscheck_timers", ROOT / "scripts/crosscheck_timers.py")
crosscheck = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(crosscheck)


@pytest.fixture
def run(monkeypatch, tmp_path):
    """Runs the script; a timer's sweeps find what `times` has of it, in ms, or a status and a reason."""

    def call(times, *words):
        commands = []

        def measured(command, **_):
            commands.append(command[3:])
            timer, path = command[command.index("--timer") + 1], Path(command[command.index("--out") + 1])
            if "--seq=64" in command:
                result = times[timer]
                cell = rounds(result, seed=len(commands)) if isinstance(result, float) else result
                write_run(path, {case(64): cell}, run_id=str(len(commands)))
            return SimpleNamespace(returncode=0)

        monkeypatch.setattr(crosscheck.subprocess, "run", measured)
        monkeypatch.setattr(sys, "argv", ["crosscheck_timers.py", "--out", str(tmp_path / "out/timers.csv"), *words])
        code = crosscheck.main()
        with (tmp_path / "out/timers.csv").open() as file:
            return code, list(csv.DictReader(file)), commands

    return call


def test_timers_that_agree(run):
    code, (row,), commands = run({"events": 1.0, "nvbench": 1.004}, "--sweep", "fwd --seq=64", "--repeat", "2")
    assert code == 0
    assert (row["seq"], row["timer_1"], row["timer_2"], row["repeats_1"]) == ("64", "events", "nvbench", "2")
    assert float(row["difference"]) == pytest.approx(0.004, abs=0.002)
    assert float(row["median_2_ms"]) == pytest.approx(1.004, rel=0.002)
    timers = [command[command.index("--timer") + 1] for command in commands]
    assert timers == ["events", "nvbench", "nvbench", "events"]
    assert all("--resume" in command for command in commands)


@pytest.mark.parametrize("nvbench", [1.02, ("error", "no NVBench")])
def test_timers_that_do_not_agree_and_cells_without_a_time_fail(run, nvbench):
    code, (row,), _ = run({"events": 1.0, "nvbench": nvbench}, "--sweep", "fwd --seq=64", "--repeat", "1")
    assert code == 1
    assert row["reason"] == ("" if isinstance(nvbench, float) else "error: no NVBench")
    assert bool(row["difference"]) == isinstance(nvbench, float)


def test_the_ten_cells_are_cells_that_can_be_planned():
    from mtabench.sweeps import axes
    from mtabench.sweeps.plan import Options, make_plan

    cases = []
    for sweep in crosscheck.SWEEPS:
        words = sweep.split()
        options = {word[2:].replace("-", "_"): value for word, value in zip(words[1::2], words[2::2], strict=True)}
        limits = {"rounds": int(options.pop("rounds"))}
        cases += make_plan(Options(words[0], **options, **limits), device="cuda").cases
    assert len(cases) == 10
    assert axes.short(max(one.seq for one in cases)) == "32k"


def test_nothing_is_overwritten(run, tmp_path, capsys):
    (tmp_path / "out").mkdir()
    (tmp_path / "out/timers.csv").write_text("mine")
    with pytest.raises(SystemExit):
        run({}, "--repeat", "1")
    assert "already exists" in capsys.readouterr().err
    assert (tmp_path / "out/timers.csv").read_text() == "mine"
