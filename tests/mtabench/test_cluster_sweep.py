"""Sweeps on two workers of this machine: the same cells as in one process, and nothing lost when workers die."""

import os
import signal
import subprocess
import sys
import time

import planted_workers
import psutil
import pytest
from command_line import make_runner, printed

from mtabench import registry
from mtabench.results.results_file import KEY_COLUMNS, read_results, samples_path

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="two workers need two cores"),
]

SHAPE = ("--device", "cpu", "--head-dim", "16", "--heads", "2", "--conv", "3x3", "--rounds", "2", "--no-plot")
TWO = ("--workers", "2")


@pytest.fixture
def mtabench(monkeypatch, capsys, tmp_path):
    """The command line, in whose workers implementations are planted."""
    monkeypatch.setattr(registry, "IMPLEMENTATIONS", planted_workers.implementations())
    monkeypatch.syspath_prepend(planted_workers.FOLDER / "planted_site")
    return make_runner(monkeypatch, capsys, tmp_path)


def statuses(table):
    return {(row.impl, int(row.seq)): row.status for row in table.itertuples()}


@pytest.mark.long
def test_two_workers_one_of_which_is_killed_measure_the_same_cells_as_one_process(mtabench, tmp_path, monkeypatch):
    flag = tmp_path / "flag"
    monkeypatch.setenv(planted_workers.FLAG, str(flag))
    words = ("fwd", *SHAPE, "--seq", "16..128", "--impl", "eager,triton,wrong,kills-once,sdpa-math", "--seed", "3")
    code, out, err = mtabench(*words, *TWO, "--out", "two.csv")
    assert (code, err) == (4, "")
    assert "workers: 2 on " in out
    (lost,) = [line for line in out.splitlines() if "lost a group" in line]
    assert f"CPU {flag.read_text()} lost a group (its process was ended by SIGKILL" in lost
    code, _, err = mtabench(*words, "--out", "one.csv")
    assert (code, err) == (4, "")
    two, one = (
        read_results(tmp_path / name).sort_values(["seq", "impl"], ignore_index=True) for name in ("two.csv", "one.csv")
    )
    same = [*KEY_COLUMNS, "status", "reason", "samples", "baseline", "device", "git_sha", "repro"]
    assert two[same].equals(one[same])
    assert set(one["worker"]) == {""}
    assert set(two["worker"]) <= {f"{os.uname().nodename} CPU {core}" for core in range(os.cpu_count())}
    assert (two[two["status"] == "ok"].groupby("seq")["worker"].nunique() == 1).all()
    assert two["run_id"].nunique() == 1
    assert (two[two["impl"] == "eager"]["speedup"] == 1).all()
    lines = samples_path(tmp_path / "two.csv").read_text().splitlines()
    assert len(lines) == 1 + two["samples"].sum()


@pytest.mark.long
def test_groups_that_kill_their_worker_three_times_are_error_rows_and_the_rest_is_measured(mtabench, tmp_path):
    impls = ("eager", "crashes-at-32", "breaks-at-64")
    out = printed(mtabench("fwd", *SHAPE, "--seq", "16..64", "--impl", ",".join(impls), *TWO, "--out", "out.csv"))
    table = read_results(tmp_path / "out.csv")
    expected = {(name, seq): "error" if seq == 32 else "ok" for name in impls for seq in (16, 32, 64)}
    expected["breaks-at-64", 64] = "error"  # alone: a fresh process on the same worker measures the others
    assert statuses(table) == expected
    assert (table["worker"] != "").all()
    (reason,) = set(table[table["seq"] == 32]["reason"])
    assert reason.startswith("its worker died 3 times while measuring cells of this shape, on ")
    assert "its process was ended by SIGSEGV; last step: verifying" in reason
    assert out.count("lost a group (") == 2
    assert out.count("for the last time") == 1


def descendants(process):
    return psutil.Process(process.pid).children(recursive=True)


@pytest.mark.long
def test_ctrl_c_ends_the_workers_and_resume_measures_the_rest(mtabench, tmp_path, monkeypatch):
    path, flag = tmp_path / "out.csv", tmp_path / "flag"
    monkeypatch.setenv(planted_workers.FLAG, str(flag))
    words = ("fwd", *SHAPE, "--seq", "16..64:+16", "--impl", "eager,waits-at-16", "--out", str(path))
    process = subprocess.Popen(
        [sys.executable, "-m", "mtabench", *words, *TWO],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=tmp_path, start_new_session=True,
        env=planted_workers.environment(),
    )  # fmt: skip
    deadline = time.monotonic() + 300
    while not (path.exists() and path.read_bytes().count(b"\n") > 2):
        assert process.poll() is None, process.stderr.read()
        assert time.monotonic() < deadline
        time.sleep(0.05)
    running = descendants(process)
    assert sum("mtabench.processes" in " ".join(one.cmdline()) for one in running) == 2
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does
    out, err = process.communicate(timeout=300)
    assert process.returncode == 130, (out, err)
    assert len(err.splitlines()) == 1, err
    assert "--resume measures the others" in err
    gone, alive = psutil.wait_procs(running, timeout=60)
    assert alive == []
    assert len(gone) == len(running)
    kept = path.read_bytes()
    before = read_results(path)
    assert 2 <= len(before) <= 6  # the last shape waits for the flag
    flag.touch()
    printed(mtabench(*words, "--workers", "1", "--resume"))
    assert path.read_bytes().startswith(kept)
    table = read_results(path)
    assert len(table) == 8
    assert not table.duplicated(["seq", "impl"]).any()
    assert set(table["status"]) == {"ok"}
    assert (table["baseline"] == "eager").all()
