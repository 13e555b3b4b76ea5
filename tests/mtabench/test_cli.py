"""The command line: help, bad input in one sentence, files, interruptions of a real process."""

import csv
import dataclasses
import errno
import functools
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from command_line import make_runner, refused
from planted_cells import changed
from typer.main import get_command

from mtabench import __version__, registry
from mtabench.checking import verify
from mtabench.cli import app
from mtabench.measuring import timing
from mtabench.measuring.ceilings import Ceilings, measure_ceilings
from mtabench.prediction import plans
from mtabench.results.results_file import COLUMNS, KEY_COLUMNS, read_results
from mtabench.results.runs import read_run
from mtabench.results.writer import Writer

RESULTS_THERE = Path(__file__).parents[2] / "results/cpu/ladder.csv"

ROOT = Path(__file__).parents[2]
COMMANDS = ("fwd", "bwd", "decode", "verify", "list", "env", "profile", "explain", "roofline", "plot", "compare")
SMALL = ("--device", "cpu", "--head-dim", "16", "--heads", "2", "--conv", "3x3", "--rounds", "2")
TINY = (*SMALL, "--seq", "16,32", "--impl", "eager")
LONG = (*SMALL, "--impl", "eager,sdpa-math", "--no-plot")
ENVIRONMENT = os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'kernels'}", "COLUMNS": "200"}


ceilings_once = functools.cache(measure_ceilings)


@pytest.fixture
def mtabench(monkeypatch, capsys, tmp_path):
    """Runs the command line in an empty folder; gives the exit code, standard output and standard error.

    A sweep in this process warms up for a moment, and has the ceilings that the first one measured.
    """
    monkeypatch.setattr(timing, "WARM_UP_SECONDS", 0.05)
    monkeypatch.setattr("mtabench.sweeps.sweep.measure_ceilings", ceilings_once)
    return make_runner(monkeypatch, capsys, tmp_path)


def files_in(folder):
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


def test_every_command_and_option_has_help():
    commands = get_command(app).commands
    assert set(COMMANDS) <= set(commands)
    for name, command in commands.items():
        assert command.help, name
        for parameter in command.params:
            assert getattr(parameter, "help", None), f"{name} {parameter.name}"


def test_every_command_is_in_the_documents():
    page = (ROOT / "docs/commands.md").read_text()
    assert [name for name in get_command(app).commands if f"mtabench {name}" not in page] == []


def test_no_command_shows_the_help(mtabench):
    code, out, err = mtabench()
    assert (code, err) == (0, "")
    assert out == mtabench("--help")[1]
    assert "decode" in out


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("fwd --seq 4k..1k", "descends"),
        ("fwd --seq", "--seq"),
        ("fwd --impl tirton", "did you mean triton"),
        ("fwd --impl foo", "expected one of eager, compile"),
        ("explain foo", "there is no pass 'foo'; expected one of fwd, bwd, decode"),
        ("explain fwd --impl foo", "no implementation is called 'foo'"),
        ("fwd --isolate --cell-timeout 0 --device cpu", "--cell-timeout is 0"),
        ("decode --cell-timeout 60", "--cell-timeout needs --isolate"),
        ("fwd --no-such-option", "--no-such-option"),
        ("fwd stray", "(`mtabench fwd --help` shows what there is)"),
        ("memory decode", "(decode); did you mean --pass decode? (`mtabench memory --help` shows"),
        ("fwd eager", "; did you mean --impl eager? (`mtabench fwd --help` shows what there is)"),
        ("memory decode fwd", "(decode fwd) (`mtabench memory --help` shows"),
        ("forward", "(`mtabench --help` shows what there is)"),
        (f"report {RESULTS_THERE} --out page.md", "for Markdown type mtabench export"),
        ("fwd --resume --device cpu", "--resume needs --out"),
        ("fwd --splits 2", "--splits"),
        ("bwd --splits auto", "--splits"),
        ("decode --no-causal", "--no-causal"),
        ("verify --impl nope", "expected one of eager"),
        ("verify --device tpu", "expected auto, cuda or cpu"),
        ("list --device tpu", "expected auto, cuda or cpu"),
        ("env --device tpu", "expected auto, cuda or cpu"),
        ("plot", "CSV"),
        ("plot none.csv", "no file none.csv"),
        (f"plot --formats gif {RESULTS_THERE}", "gif"),
    ],
)
def test_bad_input_is_one_sentence_and_exit_code_2(mtabench, tmp_path, words, sentence):
    code, out, err = mtabench(*words.split())
    assert code == 2
    assert err.startswith("mtabench: ")
    assert sentence in err
    assert len(err.splitlines()) == 1
    assert out == ""
    assert files_in(tmp_path) == []


@pytest.mark.parametrize("out", [".", "folder", "file/out.csv", "old.csv", "/proc/nowhere/out.csv"])
def test_an_output_that_cannot_be_written(mtabench, tmp_path, out):
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_text("a file")
    (tmp_path / "old.csv").write_text("something else\n")
    before = files_in(tmp_path)
    for words in ([], ["--resume"], ["--dry-run"]):
        code, _, err = mtabench("fwd", *TINY, "--out", out, *words)
        assert (code, len(err.splitlines())) == (2, 1)
    assert files_in(tmp_path) == before
    assert (tmp_path / "old.csv").read_text() == "something else\n"


def test_charts_of_another_schema_or_to_where_nothing_can_be_written(mtabench, tmp_path):
    (tmp_path / "file").write_text("a file")
    with (tmp_path / "next.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(COLUMNS)
        writer.writerow(["2"] + [""] * (len(COLUMNS) - 1))
    code, out, err = mtabench("plot", "next.csv")
    assert (code, out, len(err.splitlines())) == (2, "", 1)
    assert "schema version 2" in err
    assert mtabench("fwd", *TINY, "--out", "good.csv", "--no-plot")[0] == 0
    before = files_in(tmp_path)
    code, out, err = mtabench("plot", "good.csv", "--out", "file")
    assert (code, out, len(err.splitlines())) == (2, "", 1)
    assert files_in(tmp_path) == before


def test_a_dry_run_prints_the_plan_and_touches_nothing(mtabench, tmp_path):
    code, out, err = mtabench("fwd", "--seq", "1k..16k", "--device", "cpu", "--dry-run")
    assert (code, err) == (0, "")
    assert "1k, 2k, 4k, 8k, 16k" in out
    names = registry.default_names("fwd", "cpu")
    assert ", ".join(names) in out
    assert re.search(rf"cells +{5 * len(names)}, of which \d+ cannot run here, about \d+ (s|min|h) ", out)
    assert files_in(tmp_path) == []


def test_decode_shows_its_splits_and_who_takes_them(mtabench):
    code, out, _ = mtabench("decode", "--device", "cpu", "--splits", "auto,1..8", "--dry-run")
    assert code == 0
    assert "auto, 1, 2, 4, 8 (none of these implementations splits keys" in out
    code, out, _ = mtabench("decode", "--device", "cpu", "--impl", "eager,triton", "--splits", "1..8", "--dry-run")
    assert code == 0
    assert "1, 2, 4, 8 (of triton; the others are measured once)" in out


@pytest.fixture
def splitter(monkeypatch):
    """An implementation `planted` whose times are given: 1 ms with 4 splits, and more with fewer; auto takes 1."""

    def used(case):
        return 1 if case.splits == "auto" else case.splits

    planted = dataclasses.replace(registry.find("eager"), name="planted", splits=True)
    monkeypatch.setattr(plans, "splits_of", used)
    monkeypatch.setattr(registry, "IMPLEMENTATIONS", (*registry.IMPLEMENTATIONS, planted))

    def measure(cells, device, settings):
        times = {case: 8.0 if case.splits is None else 5.0 - used(case) for case in cells}
        return {case: timing.Measurement("cpu", "warm", [[ms] * 3] * 2) for case, ms in times.items()}

    monkeypatch.setattr(timing, "measure", measure)
    monkeypatch.setattr("mtabench.sweeps.sweep.measure_ceilings", lambda device, dtype: Ceilings(10.0, 0.1, 12.0))


def test_a_sweep_over_splits_says_how_good_auto_is(mtabench, splitter):
    words = ("decode", *SMALL, "--impl", "eager,planted", "--no-plot", "--out", "out.csv")
    code, out, err = mtabench(*words, "--seq", "16", "--splits", "auto,2..4")
    assert (code, err) == (0, "")
    assert "auto took 1 split: 4 ms, 300.0 % slower than the best of those measured (4)" in out.splitlines()
    header = next(line for line in out.splitlines() if "median ms" in line)
    assert "splits" in header.split()
    assert re.search(r"planted +auto \(1\) +4 +0.0 % +4-4 +2.00x ", out)
    assert re.search(r"planted +4 +1 +0.0 % +1-1 +8.00x ", out)
    assert "planted, splits 2: 3 ms" in out
    assert "auto took" not in mtabench(*words[:-1], "others.csv", "--seq", "16", "--splits", "1,2")[1]
    code, out, _ = mtabench(*words, "--seq", "16,32", "--splits", "auto,2..4", "--resume")
    assert code == 0
    for place in ("seq 16: ", "seq 32: "):
        assert f"{place}auto took 1 split: 4 ms, 300.0 % slower than the best of those measured (4)" in out.splitlines()


def test_a_dry_run_says_what_cannot_run_and_why(mtabench, tmp_path):
    code, out, err = mtabench("fwd", *SMALL, "--seq", "16,32", "--impl", "eager,triton", "--dry-run")
    assert (code, err) == (0, "")
    assert "cells     4, of which 2 cannot run here" in out
    assert "  triton cannot run 2 of these cells: Triton's interpreter is for checking" in out
    assert "eager cannot" not in out


@pytest.mark.parametrize("words", ["fwd", "fwd --dry-run"])
def test_a_sweep_none_of_whose_cells_can_run_says_so_once_and_stops(mtabench, tmp_path, words):
    code, out, err = mtabench(*words.split(), *SMALL, "--seq", "16,32", "--impl", "triton,hopper")
    assert code == 5
    assert err.startswith("mtabench: nothing was measured: triton cannot run 2 of these cells: Triton's interpreter")
    assert "; hopper cannot run 2 of these cells: " in err
    assert "triton cannot" not in out
    assert len(err.splitlines()) == 1
    assert "results" not in out
    assert "[1/" not in out
    assert files_in(tmp_path) == []


def test_a_quiet_sweep_says_where_its_results_are(mtabench):
    assert mtabench("fwd", *TINY, "--no-plot", "-q", "-o", "out.csv") == (0, "out.csv\n", "")
    assert len(read_results("out.csv")) == 2
    assert "seq" in mtabench("fwd", *TINY, "--quiet", "--dry-run")[1]


@pytest.mark.parametrize("splits", ["auto", "3"])
def test_a_row_is_measured_again_from_its_own_repro(mtabench, splitter, splits):
    words = ("decode", *SMALL, "--seq", "16", "--impl", "planted", "--splits", "auto,3", "--no-plot")
    assert mtabench(*words, "--out", "a.csv")[0] == 0
    first = read_results("a.csv").set_index("splits").loc[splits]
    assert mtabench(*first["repro"].split()[1:], "--out", "b.csv", "--no-plot")[0] == 0
    (again,) = read_results("b.csv").to_dict("records")
    assert [again[name] for name in ("splits", *KEY_COLUMNS[:10])] == [splits, *first[list(KEY_COLUMNS[:10])]]
    assert (again["splits_used"], again["median_ms"]) == (first["splits_used"], first["median_ms"])


def test_a_sweep_ends_with_a_table_paths_and_what_to_type_next(mtabench, tmp_path):
    code, out, err = mtabench("fwd", *TINY, "--plot")
    assert (code, err) == (0, "")
    (path,) = (tmp_path / "mtabench-results").glob("fwd-*Z.csv")
    assert len(read_results(path)) == 2
    assert "[1/2]" in out
    assert "[2/2]" in out
    assert "median ms" in out
    assert f"results: {path.relative_to(tmp_path)}" in out
    charts = [line.removeprefix("chart: ") for line in out.splitlines() if line.startswith("chart: ")]
    assert {Path(chart).suffix for chart in charts} == {".png", ".svg"}
    assert all((tmp_path / chart).stat().st_size for chart in charts)
    assert out.splitlines()[-2] == f"next: mtabench report {path.relative_to(tmp_path)}"
    assert re.search(r" median ms +± +p10-p90 ms ", out)
    assert re.search(r" eager +~?[\d.]+ +[\d.]+ % ", out)


def test_what_to_type_next_can_be_typed_and_a_file_of_another_name_is_said_to_be_csv(mtabench):
    words = ("fwd", *TINY, "--no-plot", "--out", "my runs/a b.json")
    assert "the results would go to my runs/a b.json (a CSV file)" in mtabench(*words, "--dry-run")[1]
    code, out, _ = mtabench(*words)
    assert code == 0
    assert "results: my runs/a b.json (a CSV file)" in out.splitlines()
    assert out.splitlines()[-2:] == [
        "next: mtabench plot 'my runs/a b.json'",
        "  or: the same command with --out 'my runs/a b.json' --resume and more on its axes",
    ]


def test_a_wrong_kernel_is_exit_code_4(mtabench, monkeypatch):
    right = registry.find("eager").build

    def build(case, inputs):
        closure = right(case, inputs)
        return lambda: closure() * 2

    monkeypatch.setattr(registry, "IMPLEMENTATIONS", changed("eager", build=build))
    code, out, err = mtabench("fwd", *TINY, "--out", "out.csv", "--no-plot")
    assert (code, err) == (4, "")
    assert "wrong" in out
    code, _, _ = mtabench("fwd", *TINY, "--out", "out.csv", "--no-plot", "--resume")
    assert code == 4  # it is still in the file


def test_errors_of_an_implementation_fail_only_a_sweep_without_a_time(mtabench, monkeypatch):
    def build(case, inputs):
        raise RuntimeError("no such instruction" if case.seq > 16 else "no room on the chip")

    monkeypatch.setattr(registry, "IMPLEMENTATIONS", changed("eager", build=build))
    code, out, err = mtabench("fwd", *LONG, "--seq", "32,48", "--out", "timed.csv")
    assert (code, err) == (0, "")
    assert out.count("no such instruction") == 3  # a line as each ended, and once below the table
    words = ("fwd", *SMALL, "--impl", "eager", "--seq", "16,32,64", "--out", "out.csv")
    code, out, err = mtabench(*words)
    assert code == 5
    assert err == (
        "mtabench: no cell has a time: error, RuntimeError: no such instruction (2 of 3 cells); "
        "their rows are in out.csv\n"
    )
    assert "results: out.csv" in out
    assert "next:" not in out
    assert len(read_results("out.csv")) == 3
    assert mtabench(*words, "--resume")[0] == 5  # it is still so in the file


def test_a_file_that_another_sweep_writes(mtabench, tmp_path):
    with Writer(tmp_path / "out.csv", command="mtabench fwd --seq 1k"):
        code, out, err = mtabench("fwd", *TINY, "--out", "out.csv", "--resume")
    assert (code, out, len(err.splitlines())) == (2, "", 1)
    assert f"process {os.getpid()} (mtabench fwd --seq 1k) since" in err


def test_resume_measures_only_what_is_missing(mtabench, tmp_path):
    assert mtabench("fwd", *TINY, "--out", "out.csv", "--no-plot")[0] == 0
    before = (tmp_path / "out.csv").read_bytes()
    code, out, _ = mtabench("fwd", *TINY, "--seq", "16,32,48", "--out", "out.csv", "--no-plot", "--resume")
    assert code == 0
    assert "3, of which 2 are in the file already, about" in out
    after = (tmp_path / "out.csv").read_bytes()
    assert after.startswith(before)
    assert after.count(b"\n") == before.count(b"\n") + 1


def test_a_time_whose_samples_are_gone_is_measured_again(mtabench, tmp_path):
    words = ("fwd", *TINY, "--out", "out.csv", "--no-plot")
    samples = tmp_path / "out.samples.csv"
    assert mtabench(*words)[0] == 0
    first = read_results("out.csv").set_index("seq")
    lines = samples.read_text().splitlines(keepends=True)
    samples.write_text("".join(lines[:-1]))
    (tmp_path / "other.csv").write_bytes((tmp_path / "out.csv").read_bytes())
    refused(
        mtabench("compare", "out.csv", "other.csv"), "the sweep with --out out.csv --resume measures that cell again"
    )
    code, out, err = mtabench(*words, "--resume")
    assert (code, err) == (0, "")
    assert "1 of these cells is measured again: its samples are missing" in out
    again = read_results("out.csv").set_index("seq")
    assert sorted(again.index) == [16, 32]
    assert again.loc[16].equals(first.loc[16])
    assert again.loc[32, "run_id"] != first.loc[32, "run_id"]
    assert read_run(Path("out.csv")).cells
    samples.unlink()
    refused(mtabench("compare", "out.csv", "other.csv"), "there is no file out.samples.csv", "--resume")
    assert mtabench(*words, "--resume")[0] == 0
    assert read_run(Path("out.csv")).cells
    assert len(read_results("out.csv")) == 2


def test_a_row_that_is_measured_again_stays_until_then(mtabench, tmp_path, monkeypatch):
    words = ("fwd", *TINY, "--out", "out.csv", "--no-plot")
    assert mtabench(*words)[0] == 0
    (tmp_path / "out.samples.csv").unlink()
    before = read_results("out.csv")

    def stopped(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("mtabench.sweeps.sweep.make_inputs", stopped)
    assert mtabench(*words, "--resume")[0] == 130
    assert read_results("out.csv").equals(before)


@pytest.mark.parametrize("content", ["my notes, one line", "my notes\nin two lines\n"])
@pytest.mark.parametrize(
    ("name", "options", "kind"),
    [
        ("out.csv", ["--resume"], "results"),
        ("out.samples.csv", [], "samples"),
        ("out.samples.csv", ["--resume"], "samples"),
    ],
)
def test_what_mtabench_did_not_write_is_left_alone(mtabench, tmp_path, name, options, kind, content):
    (tmp_path / name).write_text(content)
    code, _, err = mtabench("fwd", *TINY, "--out", "out.csv", "--no-plot", *options)
    assert code == 2
    assert f"{name} is not a {kind} file of mtabench" in err
    assert (tmp_path / name).read_text() == content
    assert not (tmp_path / "out.csv").exists() or name == "out.csv"


def test_resume_refuses_a_file_of_another_device(mtabench, tmp_path):
    path = tmp_path / "out.csv"
    assert mtabench("fwd", *TINY, "--out", "out.csv", "--no-plot")[0] == 0
    device = read_results(path)["device"][0]
    path.write_text(path.read_text().replace(device, "Some Other GPU"))
    before = path.read_bytes()
    code, out, err = mtabench("fwd", *TINY, "--seq", "64", "--out", "out.csv", "--resume")
    assert (code, out, len(err.splitlines())) == (2, "", 1)
    assert f"measured on Some Other GPU, and this sweep runs on {device}" in err
    assert path.read_bytes() == before


def test_ceilings_that_cannot_be_read_are_told_before_any_file_is_touched(mtabench, tmp_path):
    (tmp_path / "ceilings.json").write_text("{")
    code, out, err = mtabench("fwd", *TINY, "--out", "out.csv")
    assert (code, out, len(err.splitlines())) == (2, "", 1)
    assert "ceilings.json is not a file of ceilings" in err
    assert files_in(tmp_path) == ["ceilings.json"]


def test_isolated_cells_are_asked_for(mtabench, monkeypatch):
    asked = []
    monkeypatch.setattr(
        "mtabench.sweeps.isolation.run_isolated", lambda plan, *args: asked.append(plan.options.cell_timeout)
    )
    words = ("fwd", *TINY, "--no-plot", "--isolate")
    assert mtabench(*words, "--out", "a.csv")[0] == 0
    assert mtabench(*words, "--cell-timeout", "60", "--out", "b.csv")[0] == 0
    assert asked == [None, 60.0]


def test_list_says_what_is_ready_and_why_not(mtabench):
    code, out, err = mtabench("list", "--device", "cpu")
    assert (code, err) == (0, "")
    labels = [line.split(maxsplit=1) for line in out.splitlines() if not line.startswith(" ")]
    states = dict(labels)
    assert len(labels) == len(states)
    assert list(states) == [*registry.names(), *registry.GROUPS]
    assert states["eager"] == "ready"
    assert states["triton"].startswith("not ready on this machine (cpu): ")
    words = " ".join(out.split())
    for implementation in registry.IMPLEMENTATIONS:
        assert implementation.summary in words
        assert implementation.note in words


def test_env_names_the_device_and_the_versions(mtabench):
    import torch

    code, out, _ = mtabench("env", "--device", "cpu")
    assert code == 0
    assert torch.__version__ in out
    assert "git_sha" in out
    assert "ceilings" not in out
    first = " ".join(out.split("\ndevice ")[0].split())
    assert re.match(r"measures on the CPU: conv-attention by eager, compile; attention by .*sdpa-flash", first)
    assert re.search(r"Nothing on a GPU, since PyTorch \S+ (is built without CUDA|finds no GPU); `mtabench", first)


def test_env_measures_when_asked_and_keeps_what_it_found(mtabench, tmp_path, monkeypatch):
    monkeypatch.setattr("mtabench.commands.env.measure_ceilings", lambda device, dtype: Ceilings(12.5, 0.25, 13.5))
    code, out, _ = mtabench("env", "--device", "cpu", "--measure")
    assert code == 0
    for dtype in ("fp16", "bf16", "fp32"):
        line = (
            f"ceilings   {dtype}: 12.5 GB/s copy, 13.5 GB/s read, 0.25 TFLOP/s matmul (mtabench-results/ceilings.json)"
        )
        assert line in out.splitlines()
    assert files_in(tmp_path) == [f"mtabench-results{name}" for name in ("", "/.gitignore", "/ceilings.json")]
    assert mtabench("env", "--device", "cpu") == (0, out, "")
    assert mtabench("fwd", *TINY, "--no-plot", "--out", "mtabench-results/a.csv")[0] == 0
    assert "250 GFLOP/s from ceilings.json" in mtabench("roofline", "mtabench-results/a.csv")[1]
    (tmp_path / "mtabench-results" / "ceilings.json").write_text("{")
    code, out, err = mtabench("env", "--device", "cpu", "--measure")
    assert (code, out, len(err.splitlines())) == (2, "", 1)
    assert "ceilings.json" in err


def test_verify_names_kernel_and_shape_once_on_80_columns(monkeypatch, capsys, tmp_path):
    off = "out is off by 0.01 of its norm against float64; allowed is 9.5e-07, by what eager is off"
    rows = [
        verify.CheckRow("mine:attention", "error fwd", "fp32 1 x 4/2 x 65 x 32 full", True, 1.5e-7, 9.5e-7),
        verify.CheckRow("mine:attention", "causal, bit for bit", "fp32 1 x 4/2 x 65 x 32 full", True, None, None),
        verify.CheckRow("mine:attention", "error fwd", "fp16 1 x 4/2 x 65 x 32 full", False, 0.01, 9.5e-7, off),
        verify.CheckRow("sdpa-cudnn", "not checked", "", True, None, None, "cuDNN's attention needs a CUDA GPU " * 2),
    ]
    monkeypatch.setattr("mtabench.commands.verify.run_checks", lambda *_: iter(rows))
    code, out, _ = make_runner(monkeypatch, capsys, tmp_path, 80)("verify", "--device", "cpu")
    assert code == 4
    assert max(map(len, out.splitlines())) <= 80
    assert out.count("mine:attention, fp32 1 x 4/2 x 65 x 32 full") == out.count("mine:attention, fp16") == 1
    assert "  error fwd                 1.5e-07  9.5e-07  ok" in out.splitlines()
    assert f"wrong: [1] {off}" in " ".join(out.split())


def test_verify_says_once_what_differs_only_in_its_amounts(mtabench, monkeypatch):
    off = "{} is off by {} of its norm against float64; allowed is {}, by what eager is off"
    amounts = [("out", "0.2", "0.001"), ("dq", "inf", "9.5e-07"), ("out", "0.013", "9.5e-07"), ("out", "0.1", "0.002")]
    rows = [verify.CheckRow("mine", "error", "fp32 1 x 2", False, 0.2, 0.1, off.format(*one)) for one in amounts]
    monkeypatch.setattr("mtabench.commands.verify.run_checks", lambda *_: iter(rows))
    _, out, _ = mtabench("verify", "--device", "cpu")
    assert [line.partition("wrong: ")[2] for line in out.splitlines() if "wrong: " in line] == [
        f"[1] {off.format(*amounts[0])}", f"[2] {off.format(*amounts[1])}", "[1]", "[1]",
    ]  # fmt: skip
    assert f"[1] 3 checks: {off.format('out', '0.013 to 0.2', '9.5e-07 to 0.002')}" in out.splitlines()
    assert "[2] 1" not in out


def test_an_error_breaks_between_words_on_a_terminal_and_is_one_line_in_a_log(monkeypatch, capsys, tmp_path):
    run = make_runner(monkeypatch, capsys, tmp_path, 80)
    _, _, logged = run("list", "--device", "gpu" * 20)
    _, _, unknown = run("fwd", "--impl", "foo")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    code, _, shown = run("fwd", "--impl", "foo")
    assert code == 2
    assert len(unknown.splitlines()) == len(logged.splitlines()) == 1
    assert len(shown.splitlines()) > 2
    assert max(map(len, shown.splitlines())) <= 80
    assert shown.split() == unknown.split()
    assert "`mtabench list`" in shown  # a command is not torn


def test_verify_prints_its_checks_and_fails_on_a_wrong_one(mtabench, monkeypatch):
    right = verify.CheckRow("eager", "error fwd", "fp32 1 x 2", True, 1e-7, 2e-7)
    wrong = verify.CheckRow("triton", "causal, bit for bit", "fp32 1 x 2", False, None, None, "leaks the future")
    absent = verify.CheckRow("sdpa-cudnn", "not checked", "", True, None, None, "no GPU")
    asked, seeds = [], []

    def checks(rows):
        def run_checks(implementations, device, seed, dtypes, steps):
            asked.append((list(implementations), device, dtypes))
            seeds.append(seed)
            return iter(rows)

        return run_checks

    monkeypatch.setattr("mtabench.commands.verify.run_checks", checks([right]))
    code, out, _ = mtabench("verify", "--impl", "eager", "--device", "cpu", "--seed", "5")
    assert code == 0
    assert "interpreter" not in out
    assert "\n1 check passed; --seed 5 draws the same inputs again" in out
    monkeypatch.setattr("mtabench.commands.verify.run_checks", checks([right, wrong, absent, wrong, wrong]))
    code, out, _ = mtabench("verify", "--device", "cpu")
    assert code == 4
    assert re.search(r"^Triton's interpreter on the CPU runs \d+ checks", out)
    assert [line.partition("wrong: ")[2] for line in out.splitlines() if "wrong: " in line] == [
        "[1] leaks the future", "[1]", "[1]",
    ]  # fmt: skip
    assert "[1] 3 checks: leaks the future" in out
    assert "3 of 4 checks failed" in out
    assert "not checked: no GPU" in out
    assert asked == [(["eager"], "cpu", None), (registry.names(), "cpu", None)]
    assert seeds[0] == 5 != seeds[1]
    mtabench("verify", "--impl", "eager", "--device", "cpu", "--dtype", "fp16")
    assert asked[-1] == (["eager"], "cpu", ["fp16"])
    code, _, err = mtabench("verify", "--device", "cpu", "--dtype", "bf16")
    assert (code, err) == (2, "mtabench: --dtype bf16 is not checked on cpu; expected one or more of fp32, fp16\n")
    # A gate on a machine that lost its GPU must not pass.
    monkeypatch.setattr("mtabench.commands.verify.run_checks", checks([absent]))
    code, out, err = mtabench("verify", "--impl", "sdpa-cudnn", "--device", "cpu")
    assert (code, "passed" in out) == (5, False)
    assert err == (
        "mtabench: nothing was checked: no implementation that was asked for can run here; "
        "--head-dim, --kv-heads, --seq and --causal choose shapes\n"
    )


def started(tmp_path, *words):
    """A real sweep in a process of its own, once its file has some rows."""
    path = tmp_path / "out.csv"
    command = [sys.executable, "-m", "mtabench", "fwd", *LONG, "--out", str(path), *words]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=ENVIRONMENT, cwd=tmp_path
    )
    deadline = time.monotonic() + 60
    while not (path.exists() and path.read_bytes().count(b"\n") > 3):
        assert process.poll() is None, process.stderr.read()
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return process, path


def test_kill_9_leaves_whole_rows_and_resume_completes_them(tmp_path, mtabench):
    process, path = started(tmp_path, "--seq", "16..2000:+16")
    process.send_signal(signal.SIGKILL)
    process.communicate()
    kept = path.read_bytes()
    whole = kept[: kept.rfind(b"\n") + 1]
    finished = read_results(path)
    assert 3 <= len(finished) < 250
    assert (tmp_path / ".out.csv.lock").exists()
    last = int(finished["seq"].max())
    code, _, err = mtabench("fwd", *LONG, "--seq", f"16..{last + 32}:+16", "--out", path, "--resume")
    assert (code, err) == (0, "")
    assert path.read_bytes().startswith(whole)
    table = read_results(path)
    assert len(table) == 2 * (last + 32) // 16
    assert not table.duplicated(["seq", "impl"]).any()
    assert (table["status"] == "ok").all()


@pytest.fixture
def ctrl_c_counts():
    """Ctrl-C as at a terminal: a background job's processes begin with it ignored."""
    usual = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, usual)


@pytest.mark.parametrize("broken", [KeyboardInterrupt, RecursionError])
@pytest.mark.usefixtures("ctrl_c_counts")
def test_ctrl_c_while_torch_is_imported_is_one_sentence_whatever_comes_up(mtabench, monkeypatch, broken):
    """Torch and numpy swallow a KeyboardInterrupt there, and break later."""

    def stopped(*_, **__):
        try:
            signal.raise_signal(signal.SIGINT)
        except KeyboardInterrupt:
            raise broken from None

    monkeypatch.setattr("mtabench.commands.list.run", stopped)
    assert mtabench("list") == (130, "", "mtabench: stopped\n")
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_ctrl_c_before_anything_is_imported_says_nothing():
    code = """
import runpy, signal, sys
class Presses:
    def find_spec(self, name, *_):
        if name == "mtabench.exit_handling":
            signal.raise_signal(signal.SIGINT)
sys.meta_path.insert(0, Presses())
runpy.run_module("mtabench", run_name="__main__")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=ENVIRONMENT)
    assert (done.returncode, done.stderr) == (130, "")


@pytest.mark.parametrize("number", ["SIGINT", "SIGTERM"])
def test_ctrl_c_at_the_very_start_is_one_sentence(number):
    """As soon as `mtabench` is called, before anything that takes time is imported."""
    program = f"""
import signal, sys
import mtabench.__main__ as start
print(sorted({{"typer", "rich", "mtabench.cli"}} & set(sys.modules)))
class Stops:
    def find_spec(name, *_):
        if name == "mtabench.cli":
            signal.raise_signal(signal.{number})
sys.meta_path.insert(0, Stops)
start.main()
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=ENVIRONMENT)
    assert (done.returncode, done.stdout, done.stderr) == (130, "[]\n", "mtabench: stopped\n")


def test_an_error_that_is_no_ctrl_c_is_not_taken_for_one(mtabench, monkeypatch):
    monkeypatch.setattr("mtabench.commands.list.run", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        mtabench("list")


def test_the_version_can_be_asked_for(mtabench):
    assert mtabench("--version") == (0, f"mtabench {__version__}\n", "")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_and_sigterm_are_one_sentence_and_exit_code_130(tmp_path, number):
    process, path = started(tmp_path, "--seq", "16..2000:+16")
    process.send_signal(number)
    try:
        _, err = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 130
    assert len(err.splitlines()) == 1
    assert "--resume" in err
    assert path.read_bytes().endswith(b"\n")
    assert len(read_results(path)) >= 3
    assert not list(tmp_path.glob(".*.lock"))


def test_a_path_that_cannot_be_reached_is_one_sentence(mtabench, monkeypatch, tmp_path):
    refused(mtabench("fwd", *TINY, "--out", "a" * 300), "File name too long")
    assert files_in(tmp_path) == []

    def closed(*arguments):
        """As in a folder of somebody else: root, who may run the tests, enters every one."""
        raise PermissionError(errno.EACCES, "Permission denied", "private/a.json")

    monkeypatch.setattr("mtabench.commands.env.run", closed)
    refused(mtabench("env", "--out", "private/a.json"), "cannot reach private/a.json: Permission denied; give another")


@pytest.mark.parametrize("words", [("list",), ("explain", "fwd", "--seq", "4k", "--device-name", "h200")])
def test_an_unknown_width_is_not_a_width_of_nothing(mtabench, monkeypatch, words):
    monkeypatch.setenv("COLUMNS", "0")
    code, out, _ = mtabench(*words)
    assert code == 0
    assert "triton" in out


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("words", [("--help",), ("list", "--device", "cpu")], ids=lambda words: words[0])
def test_a_full_disk_below_the_output_is_one_sentence(words, unbuffered):
    environment = ENVIRONMENT | {"PYTHONUNBUFFERED": unbuffered}
    with open("/dev/full", "w") as full:
        command = [sys.executable, "-m", "mtabench", *words]
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, env=environment)
    assert (done.returncode, done.stderr) == (1, "mtabench: cannot write the output: No space left on device\n")


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize(
    ("words", "code"), [(["--version"], 0), (["list", "--device", "cpu"], 0), (["compare", "--help"], 1)]
)
def test_a_reader_that_has_seen_enough_is_no_error_to_tell(words, code, unbuffered):
    environment = ENVIRONMENT | {"PYTHONUNBUFFERED": unbuffered}
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "w") as closed:
        command = [sys.executable, "-m", "mtabench", *words]
        done = subprocess.run(command, stdout=closed, stderr=subprocess.PIPE, text=True, env=environment)
    assert (done.returncode, done.stderr) == (code, "")


def test_closed_standard_output_is_no_error(tmp_path):
    command = f"{sys.executable} -m mtabench fwd --impl eager --seq 16 --device cpu --dry-run >&-"
    done = subprocess.run(["sh", "-c", command], stderr=subprocess.PIPE, text=True, env=ENVIRONMENT, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")


def test_another_pipe_that_breaks_is_not_hidden():
    fails = "def app(*_, **__): raise BrokenPipeError(32, 'of a worker')"
    code = f"import mtabench.cli as cli\n{fails}\ncli.app = app\ncli.main()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=ENVIRONMENT)
    assert done.returncode == 1
    assert "of a worker" in done.stderr
