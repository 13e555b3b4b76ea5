"""Profiles: reports of Nsight Compute read, verdicts by the written rule, traces on a CPU, tools that are missing.

`ncu/h200.csv` is what `ncu --csv --page raw` wrote on an H200, less device attributes. `ncu/raw.csv` is laid out like
it; its numbers are made up, for what one recording does not have.
"""

import csv
import json
import os
import sys
from dataclasses import replace
from pathlib import Path

import planted_cells
import pytest
import torch
from command_line import ENVIRONMENT, printed, refused

from mta_kernels.operation import Operation
from mtabench import registry
from mtabench.commands import profile as command
from mtabench.environment import cpu_name
from mtabench.errors import MtabenchError, UsageError
from mtabench.problem.case import Case
from mtabench.profiling import ncu_report as ncu
from mtabench.profiling.ncu_report import Counters, parse, read_report
from mtabench.profiling.tables import bound_by, launch_verdict, read_memory_bytes, verdict
from mtabench.results.results_file import key_of

REPORTS = Path(__file__).parent / "ncu"
CELL = Case("fwd", "eager", Operation.of((3, 3), 16), "fp32", 1, 2, 2, 32, 16, None, "cpu")
SMALL = ("--device", "cpu", "--head-dim", "16", "--heads", "2", "--conv", "3x3", "--seq", "32")
IDLE = Counters("k", 1, 10.0, *[None] * 12, ())


def kernels(name="raw.csv"):
    return {one.kernel: one for one in read_report(REPORTS / name)}


def test_a_report_is_read_with_its_units_and_thousands():
    found = kernels()
    forward = next(iter(found.values()))  # the longest
    assert (forward.kernel, forward.launches) == ("_conv_attention_fwd_kernel", 1)
    assert (forward.us, forward.registers, forward.shared_bytes) == (pytest.approx(1064.32), 253, 114688)
    assert (forward.tensor_pct, forward.shared_pct, forward.l2_pct, forward.memory_pct) == (50.3, 31.2, 60.4, 6.1)
    assert (forward.occupancy_pct, forward.l2_hit_pct, forward.bank_conflicts) == (12.5, 94.3, 52311)
    assert (forward.memory_bytes, forward.l2_bytes) == (301989888 + 37748736, 6.9e9)


def test_a_recorded_report_of_an_h200_is_read():
    forward, prepare = kernels("h200.csv").values()
    assert (forward.kernel, forward.launches, prepare.kernel) == ("hopper_forward", 1, "hopper_prepare")
    assert (forward.us, prepare.us) == (pytest.approx(835.168), pytest.approx(13.856))
    assert (forward.registers, forward.shared_bytes) == (128, 119928)
    assert (forward.tensor_pct, forward.shared_pct) == (pytest.approx(51.41, abs=0.01), pytest.approx(69.93, abs=0.01))
    assert [name for name, _ in forward.stalls[:3]] == ["long scoreboard", "wait", "gmma"]
    assert bound_by(forward) == "shared memory"
    assert bound_by(prepare) == "latency"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "no line of it names columns"),
        ("==ERROR== something\n", "no line of it names columns"),
        ('"ID","Kernel Name","Metric Name","Metric Value"\n', "another page"),
        ('"ID","Kernel Name","dram__bytes_read.sum"\n"0","k","1"\n', "gpu__time_duration.sum"),
        ('"ID","Kernel Name","gpu__time_duration.sum"\n"","","ns"\n', "holds no kernel"),
        ('"ID","Kernel Name","gpu__time_duration.sum"\n"","","ns"\n"0","k","n/a"\n', "no time of k"),
        ('"ID","Kernel Name","gpu__time_duration.sum"\n"0","k"\n', "row 2 of x has 2 fields"),
    ],
)
def test_what_is_no_raw_page_is_refused(text, words):
    with pytest.raises(UsageError) as caught:
        parse(text, "x")
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("shares", "bound"),
    [
        ({"tensor_pct": 78.0, "l2_pct": 68.0}, "tensor cores"),
        ({"tensor_pct": 11.0, "l2_pct": 81.0, "memory_pct": 71.0}, "L2"),
        ({"memory_pct": 60.0, "shared_pct": 59.9}, "memory"),
        ({"shared_pct": 61.0}, "shared memory"),
        ({"tensor_pct": 59.0, "l2_pct": 55.0}, "latency"),
        ({}, ""),
    ],
)
def test_the_busiest_unit_from_60_percent_on_bounds_a_kernel(shares, bound):
    assert bound_by(replace(IDLE, **shares)) == bound


def test_a_verdict_says_by_how_much_and_what_warps_wait_for():
    assert verdict(replace(IDLE, memory_pct=80.0)) == (
        "bound by memory: 80 % of its peak, at most 1.25x faster without less of it"
    )
    waiting = replace(IDLE, l2_pct=28.0, stalls=(("long scoreboard", 0.5), ("barrier", 0.3), ("wait", 0.2)))
    assert verdict(waiting) == (
        "bound by latency: L2 is busiest, at 28 %; warps wait for long scoreboard 50%, barrier 30%"
    )
    assert "not known" in verdict(IDLE)


def test_a_call_that_runs_kernels_for_less_than_half_its_time_is_bound_by_launches():
    assert launch_verdict(0.04, 0.1).startswith("bound by launches: kernels take 40%")
    assert launch_verdict(0.09, 0.1) == "kernels take 90% of the call's 0.1 ms"


def test_a_saved_report_is_shown_and_kept(mtabench, tmp_path):
    out = printed(mtabench("profile", "--ncu-report", REPORTS / "raw.csv", "--out", "kept"))
    assert "_prepare_kernel: bound by L2: 81 % of its peak" in out
    assert "_band_kernel: bound by latency: tensor" not in out
    assert "_band_kernel: bound by latency: shared memory is busiest, at 39 %; warps wait for long scoreboard" in out
    with (tmp_path / "kept" / "counters.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["kernel"] for row in rows] == list(kernels())
    assert (rows[0]["us"], rows[0]["bound_by"], rows[0]["pass"]) == ("1064.32", "L2", "")
    assert (rows[0]["device"], rows[0]["repro"]) == ("", "")
    assert rows[0]["stall_1"] == "gmma"
    refused(mtabench("profile", "--ncu-report", REPORTS / "raw.csv", "--out", "kept"), "kept already exists")
    refused(mtabench("profile", "fwd", "--ncu-report", REPORTS / "raw.csv"), "without a pass")
    refused(mtabench("profile", "--ncu-report", "none.csv"), "cannot read none.csv")
    refused(mtabench("profile"), "name what to profile")


@pytest.mark.parametrize("pass_", ["fwd", "bwd", "decode"])
def test_on_a_cpu_there_is_a_trace_and_a_table_of_operators(mtabench, tmp_path, pass_):
    out = printed(mtabench("profile", pass_, *SMALL, "--impl", "eager,sdpa-flash", "--out", "out"))
    assert "without ncu: " in out
    assert "bmm" in out
    traces = sorted((tmp_path / "out").glob("*.trace.json"))
    assert [path.name.split("-")[1] for path in traces] == ["eager", "sdpa"]
    names = {event.get("name") for event in json.loads(traces[0].read_text())["traceEvents"]}
    assert "aten::bmm" in names
    with (tmp_path / "out" / "kernels.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if row["impl"] == "eager"]
    assert sum(float(row["share"]) for row in rows) == pytest.approx(1, rel=1e-3)
    assert [row["seq"] for row in rows] == ["32"] * len(rows)
    times = [float(row["total_ms"]) for row in rows]
    assert times == sorted(times, reverse=True)
    assert {(row["device"], row["torch"]) for row in rows} == {(cpu_name(), torch.__version__)}
    (again,) = {row["repro"] for row in rows}
    assert again.startswith(f"mtabench profile {pass_} --impl eager --seq 32 ")
    assert mtabench(*again.split()[1:], "--tools", "trace", "--out", "again")[0] == 0
    # Eager multiplies twice forward and four times backward, where only the latter is profiled.
    (calls,) = {row["calls"] for row in rows if row["kernel"] == "aten::bmm"}
    assert calls == {"fwd": "2", "bwd": "4", "decode": "2"}[pass_]


def test_a_wrong_result_is_not_profiled(mtabench, tmp_path, monkeypatch):
    eager = registry.find("eager")
    wrong = replace(eager, name="wrong", build=planted_cells.build)
    monkeypatch.setattr(registry, "IMPLEMENTATIONS", (*registry.IMPLEMENTATIONS, wrong))
    code, out, _ = mtabench("profile", "fwd", *SMALL, "--impl", "wrong", "--out", "out")
    assert code == 4
    assert "not profiled, the result is wrong" in out
    assert not (tmp_path / "out").exists()


def test_a_tool_that_is_named_and_missing_is_refused_with_what_to_do(mtabench, monkeypatch):
    refused(mtabench("profile", "fwd", *SMALL, "--tools", "trace,ncu"), "--tools ncu cannot be had here")
    refused(mtabench("profile", "fwd", *SMALL, "--tools", "perf"), "'perf'", "trace, ncu")
    monkeypatch.setenv("PATH", "")
    assert "not on PATH" in ncu.reason_against("cuda")


def stand_in(folder, monkeypatch, body):
    """An `ncu` on PATH, written in Python; `log` is its --log-file and `child` the command that it would run."""
    path = folder / "ncu"
    path.write_text(
        f"#!{sys.executable}\nimport shutil, subprocess, sys\n"
        "log = sys.argv[sys.argv.index('--log-file') + 1]\n"
        "child = sys.argv[sys.argv.index('--log-file') + 2:]\n" + body
    )
    path.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")


def test_ncu_runs_the_cell_in_a_child_and_its_report_is_read(mtabench, tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", ENVIRONMENT["PYTHONPATH"])
    body = f"subprocess.run(child, check=True)\nshutil.copy({str(REPORTS / 'raw.csv')!r}, log)\n"
    stand_in(tmp_path, monkeypatch, body)
    monkeypatch.setitem(command.TOOLS, "ncu", lambda device: None)
    out = printed(mtabench("profile", "bwd", *SMALL, "--impl", "eager", "--tools", "ncu", "--out", "out"))
    assert "_conv_attention_fwd_kernel: bound by L2: 60 % of its peak" in out
    cell = replace(CELL, pass_="bwd")
    whole = sum(one.memory_bytes for one in kernels().values())
    assert read_memory_bytes(tmp_path / "out" / "counters.csv") == {key_of(cell): pytest.approx(whole, rel=1e-4)}
    with (tmp_path / "out" / "counters.csv").open() as file:
        assert {row["device"] for row in csv.DictReader(file)} == {cpu_name()}


def test_a_tool_that_fails_is_left_out_unless_it_was_named(mtabench, tmp_path, monkeypatch):
    stand_in(tmp_path, monkeypatch, "print('==ERROR== ERR_NVGPUCTRPERM - The user')\nsys.exit(1)\n")
    monkeypatch.setitem(command.TOOLS, "ncu", lambda device: None)
    out = printed(mtabench("profile", "fwd", *SMALL[:-1], "16,32", "--impl", "eager", "--out", "out"))
    assert out.count("without ncu from here on: the driver lets administrators alone") == 1
    assert len(list((tmp_path / "out").glob("*.trace.json"))) == 2
    code, _, err = mtabench("profile", "fwd", *SMALL, "--impl", "eager", "--tools", "ncu", "--out", "named")
    assert (code, len(err.splitlines())) == (1, 1)
    assert "NVreg_RestrictProfilingToAdminUsers=0" in err


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("print('==ERROR== ERR_NVGPUCTRPERM - The user does not have')\nsys.exit(1)\n", "--cap-add=SYS_ADMIN"),
        ("print('==ERROR== Failed to find metric sm__x')\nsys.exit(1)\n", "Failed to find metric sm__x"),
        ("open(log, 'w').write('==WARNING== No kernels were profiled.')\n", "No kernels were profiled"),
        ("sys.exit(9)\n", "code 9"),
    ],
)
def test_what_ncu_cannot_do_is_one_sentence(tmp_path, monkeypatch, body, words):
    stand_in(tmp_path, monkeypatch, body)
    with pytest.raises(MtabenchError) as caught:
        ncu.measure(CELL, tmp_path / "raw.csv")
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)
