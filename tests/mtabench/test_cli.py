"""The command line: help, bad input in one sentence, files, interruptions of a real process."""

import dataclasses
import errno
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from command_line import ENVIRONMENT, make_runner, printed, refused, run_python
from planted_cells import changed
from planted_sweeps import made_up_ceilings

from mtabench import registry
from mtabench.checking import verify
from mtabench.measuring import timing
from mtabench.measuring.ceilings import Ceilings
from mtabench.prediction import plans
from mtabench.results.results_file import read_results
from mtabench.results.runs import read_run

RESULTS_THERE = Path(__file__).parents[2] / "results/cpu/ladder.csv"
SMALL = ("--device", "cpu", "--head-dim", "16", "--heads", "2", "--conv", "3x3", "--rounds", "2")
TINY = (*SMALL, "--seq", "16,32", "--impl", "eager")
LONG = (*SMALL, "--impl", "eager,sdpa-math", "--no-plot")


def files_in(folder):
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("fwd --seq 4k..1k", "descends"),
        ("explain foo", "there is no pass 'foo'; expected one of fwd, bwd, decode"),
        ("explain fwd --impl foo", "no implementation is called 'foo'"),
        ("fwd --isolate --cell-timeout 0 --device cpu", "--cell-timeout is 0"),
        ("decode --cell-timeout 60", "--cell-timeout needs --isolate"),
        ("fwd stray", "(`mtabench fwd --help` shows what there is)"),
        (f"report {RESULTS_THERE} --out page.md", "for Markdown type mtabench show"),
        ("fwd --resume --device cpu", "--resume needs --out"),
        ("fwd --splits 2", "--splits"),
        ("bwd --splits auto", "--splits"),
        ("decode --no-causal", "--no-causal"),
        ("verify --impl nope", "expected one of eager"),
        ("env --device tpu", "expected auto, cuda or cpu"),
        ("plot", "CSV"),
        ("plot none.csv", "no file none.csv"),
        (f"plot --formats gif {RESULTS_THERE}", "gif"),
    ],
)
def test_bad_input_is_one_sentence_and_exit_code_2(mtabench, tmp_path, words, sentence):
    refused(mtabench(*words.split()), sentence)
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


def test_a_dry_run_prints_the_plan_and_touches_nothing(mtabench, tmp_path):
    out = printed(mtabench("fwd", "--seq", "1k..16k", "--device", "cpu", "--dry-run"))
    assert "1k, 2k, 4k, 8k, 16k" in out
    names = registry.default_names("fwd", "cpu")
    assert ", ".join(names) in out
    assert re.search(rf"cells +{5 * len(names)}, of which \d+ cannot run here, about \d+ (s|min|h) ", out)
    assert files_in(tmp_path) == []


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


def test_a_sweep_over_splits_shows_them(mtabench, splitter):
    words = ("decode", *SMALL, "--impl", "eager,planted", "--no-plot", "--out", "out.csv")
    out = printed(mtabench(*words, "--seq", "16", "--splits", "auto,2..4"))
    assert re.search(r"planted +auto \(1\) +4.000 +0.00 +", out)
    assert re.search(r"planted +4 +1.000 +0.00 +", out)
    assert "planted, splits 2: 3 ms" in out


def test_a_dry_run_says_what_cannot_run_and_why(mtabench, tmp_path):
    out = printed(mtabench("fwd", *SMALL, "--seq", "16,32", "--impl", "eager,triton", "--dry-run"))
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


def test_a_sweep_ends_with_a_table_and_paths(mtabench, tmp_path):
    out = printed(mtabench("fwd", *TINY, "--plot"))
    (path,) = (tmp_path / "mtabench-results").glob("fwd-*Z.csv")
    assert len(read_results(path)) == 2
    assert "[1/2]" in out
    assert "[2/2]" in out
    assert f"results: {path.relative_to(tmp_path)}" in out
    charts = [line.removeprefix("chart: ") for line in out.splitlines() if line.startswith("chart: ")]
    assert {Path(chart).suffix for chart in charts} == {".png", ".svg"}
    assert all((tmp_path / chart).stat().st_size for chart in charts)
    assert re.search(r" 16 +eager +~?[\d.]+ +[\d.]+ ", out)


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
    out = printed(mtabench("fwd", *LONG, "--seq", "32,48", "--out", "timed.csv"))
    assert out.count("no such instruction") == 3  # a line as each ended, and once below the table
    words = ("fwd", *SMALL, "--impl", "eager", "--seq", "16,32,64", "--out", "out.csv")
    code, out, err = mtabench(*words)
    assert code == 5
    assert err == (
        "mtabench: no cell has a time: error, RuntimeError: no such instruction (2 of 3 cells); "
        "their rows are in out.csv\n"
    )
    assert "results: out.csv" in out
    assert len(read_results("out.csv")) == 3
    assert mtabench(*words, "--resume")[0] == 5  # it is still so in the file


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
    out = printed(mtabench(*words, "--resume"))
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


def test_list_says_what_is_ready_and_why_not(mtabench):
    out = printed(mtabench("list", "--device", "cpu"))
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

    out = printed(mtabench("env", "--device", "cpu"))
    assert torch.__version__ in out
    assert "git_sha" in out
    assert "ceilings" not in out
    first = " ".join(out.split("\ndevice ")[0].split())
    assert re.match(r"measures on the CPU: conv-attention by eager, compile; attention by .*sdpa-flash", first)
    assert re.search(r"Nothing on a GPU, since PyTorch \S+ (is built without CUDA|finds no GPU); `mtabench", first)


def test_env_measures_when_asked_and_keeps_what_it_found(mtabench, tmp_path, monkeypatch):
    monkeypatch.setattr("mtabench.commands.env.measure_ceilings", lambda device, dtype: Ceilings(12.5, 0.25, 13.5))
    out = printed(mtabench("env", "--device", "cpu", "--measure"))
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
    refused(mtabench("env", "--device", "cpu", "--measure"), "ceilings.json")


@pytest.mark.parametrize(("name", "options"), [("out.csv", ["--resume"]), ("out.samples.csv", []), ("out.csv", [])])
def test_what_mtabench_did_not_write_and_rows_of_another_device_are_left_alone(mtabench, tmp_path, name, options):
    (tmp_path / name).write_text("my notes\nin two lines\n")
    refused(mtabench("fwd", *TINY, "--out", "out.csv", *options), name)
    assert (tmp_path / name).read_text() == "my notes\nin two lines\n"
    assert mtabench("fwd", *TINY, "--out", "other.csv")[0] == 0
    path = tmp_path / "other.csv"
    device = read_results(path)["device"][0]
    path.write_text(path.read_text().replace(device, "Some Other GPU"))
    again = mtabench("fwd", *TINY, "--seq", "64", "--out", "other.csv", "--resume")
    refused(again, f"measured on Some Other GPU, and this sweep runs on {device}")


@pytest.mark.parametrize("columns", [80, 200])
def test_verify_prints_its_checks_and_fails_on_a_wrong_one(monkeypatch, capsys, tmp_path, columns):
    off = "out is off by 0.01 of its norm against float64; allowed is 9.5e-07, by what eager is off"
    rows = [
        verify.CheckRow("mine:attention", "error fwd", "fp32 1 x 4/2 x 65 x 32 full", True, 1.5e-7, 9.5e-7),
        verify.CheckRow("mine:attention", "batch apart", "fp32 1 x 4/2 x 65 x 32 full", True, None, None),
        verify.CheckRow("mine:attention", "error fwd", "fp16 1 x 4/2 x 65 x 32 full", False, 0.01, 9.5e-7, off),
        verify.CheckRow("sdpa-cudnn", "not checked", "", True, None, None, "cuDNN's attention needs a CUDA GPU " * 2),
    ]
    calls = []

    def run_checks(names, device, seed, dtypes, steps):
        calls.append((list(names), device, seed, dtypes))
        return iter(rows)

    monkeypatch.setattr("mtabench.commands.verify.run_checks", run_checks)
    mtabench = make_runner(monkeypatch, capsys, tmp_path, columns)
    code, out, _ = mtabench("verify", "--device", "cpu", "--seed", "5")
    assert code == 4
    assert max(map(len, out.splitlines())) <= columns
    assert out.count("mine:attention, fp32 1 x 4/2 x 65 x 32 full") == out.count("mine:attention, fp16") == 1
    assert "  error fwd                 1.5e-07  9.5e-07  ok" in out.splitlines()
    assert f"wrong: {off}" in " ".join(out.split())
    assert "1 of 3 checks failed; --seed 5 draws the same inputs again" in " ".join(out.split())
    del rows[2]
    assert mtabench("verify", "--impl", "eager", "--device", "cpu", "--dtype", "fp16")[0] == 0
    assert calls[0] == (registry.names(), "cpu", 5, None)
    assert (calls[1][0], calls[1][3], calls[1][2] != 5) == (["eager"], ["fp16"], True)
    refused(mtabench("verify", "--device", "cpu", "--dtype", "bf16"), "--dtype bf16 is not checked on cpu; expected")
    del rows[:2]  # a gate on a machine that lost its GPU must not pass
    code, out, err = mtabench("verify", "--impl", "sdpa-cudnn", "--device", "cpu")
    assert (code, "passed" in out) == (5, False)
    assert err.startswith("mtabench: nothing was checked: no implementation that was asked for can run here")


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


def started(tmp_path, *words):
    """A real sweep in a process of its own, once its file has some rows."""
    path = tmp_path / "out.csv"
    made_up_ceilings(tmp_path)
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
    printed(mtabench("fwd", *LONG, "--seq", f"16..{last + 32}:+16", "--out", path, "--resume"))
    assert path.read_bytes().startswith(whole)
    table = read_results(path)
    assert len(table) == 2 * (last + 32) // 16
    assert not table.duplicated(["seq", "impl"]).any()
    assert (table["status"] == "ok").all()


@pytest.mark.parametrize("broken", [KeyboardInterrupt, RecursionError])
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


def test_ctrl_c_at_the_very_start_is_one_sentence():
    """As soon as `mtabench` is called, before anything that takes time is imported."""
    program = """
import signal, sys
import mtabench.__main__ as start
print(sorted({"typer", "rich", "mtabench.cli"} & set(sys.modules)))
class Stops:
    def find_spec(name, *_):
        if name == "mtabench.cli":
            signal.raise_signal(signal.SIGINT)
sys.meta_path.insert(0, Stops)
start.main()
"""
    done = run_python("-c", program)
    assert (done.returncode, done.stdout, done.stderr) == (130, "[]\n", "mtabench: stopped\n")


def test_sigterm_is_one_sentence_and_exit_code_130(tmp_path):
    process, path = started(tmp_path, "--seq", "16..2000:+16")
    process.send_signal(signal.SIGTERM)
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


@pytest.mark.parametrize(
    ("words", "output", "code", "sentence"),
    [
        ("--version", "/dev/full", 1, "mtabench: cannot write the output: No space left on device\n"),
        ("show --help", None, 0, ""),  # a reader that has seen enough
        ("compare --help", None, 1, ""),  # a verdict that nobody read
        ("show --help", "&-", 0, ""),
    ],
)
def test_an_output_that_ends_is_no_traceback(tmp_path, words, output, code, sentence):
    reader, writer = os.pipe()
    os.close(reader)
    command = f"{sys.executable} -m mtabench {words} >{output or f'&{writer}'}"
    done = subprocess.run(
        ["bash", "-c", command], stderr=subprocess.PIPE, text=True, env=ENVIRONMENT, cwd=tmp_path, pass_fds=[writer]
    )
    os.close(writer)
    assert (done.returncode, done.stderr) == (code, sentence)
