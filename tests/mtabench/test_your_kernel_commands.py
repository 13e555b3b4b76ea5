"""Functions of a person's own on the command line: names, mistakes, strangers' results, packages, sweeps and gates."""

import csv
import json
import shlex
import shutil
import subprocess
import sys
from textwrap import indent

import pytest
import torch
from command_line import ENVIRONMENT, printed, refused
from own_cases import EXAMPLES, OWN, TINY, forget
from paired_runs import git
from written_runs import case, rounds, write_run

from mtabench import registry
from mtabench.checking import verify
from mtabench.checking.verify import CheckedShape
from mtabench.problem.inputs import use_full_float32
from mtabench.registry import name_of, typed_as
from mtabench.report.data import COMMAND
from mtabench.results.results_file import read_file


@pytest.fixture(autouse=True)
def nothing_loaded(monkeypatch):
    forget(monkeypatch)


REFUSED = {
    "nothing.py:attention": ["there is no file nothing.py", "--impl ./mine.py:attention"],
    "own.py": ["names no function in own.py"],
    "own.py:": ["names no function in own.py"],
    "./own:attention": ["names no function in a Python file"],
    "own.py:attentoin": ["own.py has no attentoin; did you mean own.py:attention?"],
    "own.py:number": ["is an object of type int; expected a function (q, k, v, weight, *, causal, scale) -> out"],
    "own.py:other_parameters": ["takes (a, b), too many positional arguments; expected (q, k, v, weight"],
    "own.py:weight_first": ["takes (weight, q, k, v, *, causal, scale), k comes where it has q; expected (q, k, v"],
    "own.py:WithBackward": ["is a class; expected a function or an object", "my_kernel = WithBackward()"],
    "own.py:other_work": ["its work is 'much'; expected one of dense, tiled"],
    "own.py:asks_for_much": ["unsupported asks for colour; it may ask for pass_, device"],
    "a=own.py:attention,a=own.py:late": ["two functions would be called a", "--impl other=own.py:late"],
    "eager=own.py:attention": ["eager is one of mtabench's own names"],
    "a b=own.py:attention": ["would be called 'a b'", "--impl my-kernel=own.py:attention"],
    "my own.py:attention": ["would be called 'my own:attention'", "--impl 'my-kernel=my own.py:attention'"],
    "own:attention": ["is a function of a file; give its path as well"],
    "missing.py:attention": ["ModuleNotFoundError: No module named 'no_such_package' (missing.py, line 2)"],
    "beside.py:attention": ["ZeroDivisionError: division by zero (broken_module.py, line 1)"],
    "syntax.py:attention": ["SyntaxError", "(syntax.py, line 1)"],
    "exits.py:attention": ["exits.py cannot be imported: SystemExit: 3"],
}  # fmt: skip
FILES = {
    "missing.py": "import torch\nimport no_such_package\n",
    "beside.py": "import broken_module\n",
    "broken_module.py": "1 / 0\n",
    "syntax.py": "def attention(:\n",
    "exits.py": "raise SystemExit(3)\n",
}


@pytest.mark.parametrize("typed", REFUSED)
def test_a_mistake_is_one_sentence_and_leaves_nothing(mtabench, tmp_path, typed):
    for name in ("own.py", "my own.py"):
        shutil.copy(OWN, tmp_path / name)
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    refused(mtabench("fwd", "--impl", typed, *TINY, "--dry-run"), *REFUSED[typed])
    assert not (tmp_path / "mtabench-results").exists()


SETS = """
import os
import torch

os.chdir("/")
os.environ["PLANTED"] = "1"
torch.set_default_dtype(torch.float16)
torch.set_grad_enabled(False)
torch.set_num_threads(5)
torch.use_deterministic_algorithms(True, warn_only=True)
torch.backends.cuda.enable_flash_sdp(False)
torch.backends.cudnn.benchmark = True
torch.backends.cuda.matmul.fp32_precision = "tf32"
torch.set_autocast_enabled("cpu", True)
torch.set_flush_denormal(True)
torch.nn.functional.silu = torch.nn.functional.relu
"""
READS = """
import os
import torch

def state():
    return (
        os.getcwd(), os.environ.get("PLANTED"), torch.get_default_dtype(), torch.get_num_threads(),
        torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled(),
        torch.backends.cuda.flash_sdp_enabled(), torch.backends.cudnn.benchmark,
        torch.backends.cuda.matmul.fp32_precision, torch.is_autocast_enabled("cpu"),
        (torch.tensor([1e-39], dtype=torch.float32) * 1.0).item() == 0, torch.nn.functional.silu.__name__,
    )
"""
CALL = """
seen = set()

def f(q, k, v, *, causal, scale):
    seen.add(state())
    with torch.autocast("cpu", enabled=False):
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=scale, enable_gqa=True)
"""


@pytest.mark.parametrize("when", ["import", "call"])
def test_what_a_file_sets_for_the_process_holds_for_its_own_calls_alone(mtabench, tmp_path, monkeypatch, when):
    """Some of it made other kernels slower, or others, and a folder took the rows with it."""
    call = CALL if when == "import" else CALL.replace("    seen", indent(SETS, "    ") + "    seen")
    (tmp_path / "sets.py").write_text((SETS if when == "import" else "") + READS + call)
    (tmp_path / "spared.py").write_text(READS + CALL)
    use_full_float32()  # as a sweep does
    here: dict = {}
    exec(READS, here)
    before, gradients = here["state"](), torch.is_grad_enabled()
    printed(mtabench("fwd", "--impl", "./sets.py:f,./spared.py:f", *TINY, "--out", "a.csv"))
    assert [row["status"] for row in csv.DictReader((tmp_path / "a.csv").open())] == ["ok", "ok"]
    monkeypatch.setattr(verify, "SHAPES", {"cpu": (CheckedShape(1, 2, 1, 17, 16, 3, 3),)})
    monkeypatch.setattr(verify, "LONG_SHAPES", {"cpu": ()})
    mtabench("verify", "--impl", "./sets.py:f", "--device", "cpu", "--dtype", "fp32")
    assert (here["state"](), torch.is_grad_enabled()) == (before, gradients)
    of_others, of_own = (registry._LOADED[f"{name}:f"][0].module.seen for name in ("spared", "sets"))
    assert of_others == {before}
    (own,) = of_own
    assert not any(theirs == ours for theirs, ours in zip(own, before, strict=True))


@pytest.mark.parametrize(("line", "name"), [
    ("time.perf_counter_ns = lambda: 0", "time.perf_counter_ns"),
    ("Oracle.check = lambda *_: Check(True, 0.0, 1.0)", "Oracle.check"),
    ("torch.cuda.Event.elapsed_time = lambda *_: 1e-3", "Event.elapsed_time"),
])  # fmt: skip
def test_a_file_that_replaces_what_measures_it_is_refused_and_a_call_that_does_is_wrong(mtabench, tmp_path, line, name):
    imports = "import time\nimport torch\nfrom mtabench.checking.oracle import Check, Oracle\n"
    (tmp_path / "first.py").write_text(f"{imports}{line}\n{READS}{CALL}")
    (tmp_path / "later.py").write_text(f"{imports}{READS}{CALL.replace('    seen', f'    {line}{chr(10)}    seen')}")
    (tmp_path / "spared.py").write_text(READS + CALL)
    result = mtabench("fwd", "--impl", "./first.py:f", *TINY, "--out", "a.csv")
    refused(result, f"first.py cannot be imported: it replaces {name}, which measures it; leave it as it is")
    code, _, _ = mtabench("fwd", "--impl", "./later.py:f,./spared.py:f", *TINY, "--out", "a.csv")
    assert code == 4
    rows = {row["impl"]: row for row in csv.DictReader((tmp_path / "a.csv").open())}
    assert rows["spared:f"]["status"] == "ok"
    assert (rows["later:f"]["status"], rows["later:f"]["median_ms"]) == ("wrong", "")
    assert rows["later:f"]["reason"] == f"it replaces {name}, which measures it; leave it as it is"


def test_names_are_stable_and_what_was_typed_is_what_repro_says(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shutil.copy(OWN, tmp_path / "mine.py")
    assert [name_of("./mine.py:attention"), name_of("mine.py:attention")] == ["mine:attention"] * 2
    assert typed_as("mine:attention") == "./mine.py:attention"
    assert name_of("new=mine.py:attention") == "new"
    assert typed_as("new") == "new=mine.py:attention"
    assert typed_as("eager") == "eager"


def test_a_stranger_s_results_load_nothing(mtabench, tmp_path):
    """Their names may be a path that is there: it is drawn and compared, and no code runs."""
    (tmp_path / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    stand_in = {"sdpa-math": "evil:attention", "sdpa-flash": "evil.py:attention", "hopper": "./evil.py:attention"}
    cells = {case(64, impl=name): ms for ms, name in enumerate(("eager", *stand_in), start=1)}
    for number, name in enumerate(("base", "head")):
        samples = {one: rounds(ms, seed=number) for one, ms in cells.items()}
        path = write_run(tmp_path / f"{name}.csv", samples, name, f"2026-01-0{1 + number}T03:04:05Z")
        for file in (path, path.with_suffix(".samples.csv")):
            text = file.read_text()
            for ours, theirs in stand_in.items():
                text = text.replace(ours, theirs)
            file.write_text(text)
    commands = ["show base.csv", "compare base.csv head.csv", "plot base.csv --out charts --kind time",
                "report base.csv --out page.html", "show base.csv --markdown", "dashboard . --out site",
                "results merge base.csv head.csv --latest --out all.csv"]  # fmt: skip
    for command in commands:
        printed(mtabench(*command.split()))
    assert not (tmp_path / "ran").exists()
    assert mtabench("fwd", "--impl", "evil:attention", "--dry-run")[0] == 2
    assert not (tmp_path / "ran").exists()


def test_from_files_to_rows_chart_and_comparison(mtabench, tmp_path):
    """Both examples, beside plain attention of ours; the row's own command measures the cell again."""
    triton, own = "triton_attention:attention", "my_attention:attention"
    for name in ("triton_attention.py", "my_attention.py"):
        shutil.copy(EXAMPLES / name, tmp_path)
    typed = "./triton_attention.py:attention,./my_attention.py:attention,sdpa-math"
    for name in ("base", "head"):
        printed(mtabench("fwd", "--impl", typed, *TINY, "--out", f"{name}.csv"))
    rows = {row["impl"]: row for row in csv.DictReader((tmp_path / "base.csv").open())}
    assert list(rows) == [triton, own, "sdpa-math"]
    ready = [own] if torch.cuda.is_available() else [triton, own]  # the interpreter, which is no timing
    for name in ready:
        assert (rows[name]["status"], rows[name]["op"]) == ("ok", "attention")
        assert float(rows[name]["rel_error"]) < 1e-5
        assert rows[name]["executed_tflops"]
    assert (rows[own]["git_sha"], rows[own]["git_dirty"]) == ("", "")  # of no checkout, whatever mtabench is of
    printed(mtabench("plot", "base.csv", "--kind", "time", "--formats", "svg", "--out", "charts"))
    assert own in next((tmp_path / "charts").glob("*.svg")).read_text()
    code, out, _ = mtabench("compare", "base.csv", "head.csv", "--fail-on", "broken")
    assert code in (0, 3), out  # 3 if the noise of this machine hides every cell
    assert out.count(own) == 1
    words = shlex.split(rows[own]["repro"])
    assert "--impl ./my_attention.py:attention " in rows[own]["repro"]
    assert COMMAND.fullmatch(rows[own]["repro"])  # so a report shows it
    printed(mtabench(*words[1:], "--out", "again.csv", "--no-plot"))


@pytest.mark.slow
def test_a_crash_costs_one_row_with_isolate(mtabench, tmp_path):
    shutil.copy(OWN, tmp_path / "own.py")
    code, _, _ = mtabench("fwd", "--impl", "own.py:crashes", *TINY, "--isolate", "--out", "a.csv")
    assert code == 5
    (row,) = csv.DictReader((tmp_path / "a.csv").open())
    assert row["reason"].startswith("its process was ended by SIGSEGV")


def test_verify_says_what_is_right_and_what_was_not_checked(mtabench, tmp_path, monkeypatch):
    small = {"cpu": (CheckedShape(1, 4, 2, 17, 16, 3, 3),)}
    monkeypatch.setattr(verify, "SHAPES", small)
    monkeypatch.setattr(verify, "LONG_SHAPES", {**small, "interpreter": small["cpu"]})
    shutil.copy(OWN, tmp_path / "own.py")
    out = printed(mtabench("verify", "--impl", "own.py:without_gradient", "--device", "cpu"))
    assert out.count("own:without_gradient not checked: own:without_gradient has no backward") == 1
    code, out, _ = mtabench("verify", "--impl", "own.py:raises", "--device", "cpu")
    assert code == 4
    assert "(own_kernels.py, line" not in out
    assert "(own.py, line" in out


def test_a_kernel_of_some_shapes_is_verified_at_those_and_refuses_others(mtabench, tmp_path, monkeypatch):
    shapes = (CheckedShape(1, 4, 2, 17, 16, 3, 3), CheckedShape(2, 2, 2, 9, 16, 3, 3, causal=False))
    monkeypatch.setattr(verify, "SHAPES", {"cpu": shapes})
    monkeypatch.setattr(verify, "LONG_SHAPES", {"cpu": shapes[:1], "interpreter": shapes[:1]})
    shutil.copy(OWN, tmp_path / "own.py")
    words = ("--impl", "own.py:of_head_dim_64", "--device", "cpu")
    code, out, err = mtabench("verify", *words)
    assert code == 5
    assert "not checked: own:of_head_dim_64 refuses it: causal heads of 64 alone, not 16" in " ".join(out.split())
    assert "--head-dim, --kv-heads, --seq and --causal choose shapes" in err
    out = printed(mtabench("verify", *words, "--head-dim", "64", "--causal", "--seq", "12,18", "--json"))
    found = json.loads(out)["data"]
    assert {check["shape"] for check in found["checks"]} == {
        f"fp{n} 2 x 2 x {m} x 64" for n in (16, 32) for m in (12, 18)
    }
    assert "refuses it" in found["not_checked"][0]["reason"]  # two heads a KV head
    code, out, _ = mtabench("verify", *words, "--head-dim", "64", "--causal", "--kv-heads", "3", "--json")
    assert {check["shape"] for check in json.loads(out)["data"]["checks"]} == {
        "fp16 2 x 3 x 9 x 64",
        "fp32 2 x 3 x 9 x 64",
    }
    mtabench("fwd", *words, *TINY, "--out", "a.csv")
    (row,) = read_file(tmp_path / "a.csv").rows()
    assert (row["status"], "refuses it" in row["reason"]) == ("unsupported", True)


def make_project(tmp_path, sleep=0.0):
    """A repository of another project, whose kernels are in a folder, with a second commit that sleeps."""
    folder = tmp_path / "project"
    (folder / "kernels").mkdir(parents=True)
    (folder / "src/parts").mkdir(parents=True)
    shutil.copy(OWN, folder / "src/parts/own.py")
    (folder / "src/parts/__init__.py").touch()
    git(folder, "init", "--quiet")
    for wait in (0.0, sleep):
        (folder / "kernels/mine.py").write_text(
            "import time\nfrom parts.own import attention as right\n\n\n"
            f"def attention(q, k, v, *, causal, scale):\n    time.sleep({wait})\n"
            "    return right(q, k, v, causal=causal, scale=scale)\n"
        )
        git(folder, "add", "--all")
        git(folder, "commit", "--quiet", "--allow-empty", "--message", f"sleeps {wait}")
    return folder


@pytest.mark.long
@pytest.mark.slow
def test_a_project_s_own_kernels_are_gated_by_real_processes(tmp_path):
    folder = make_project(tmp_path, sleep=0.05)
    words = ["ab", "--base", "HEAD~1", "--pairs", "3", "--threshold", "50%", "--out", str(tmp_path / "out"), "fwd"]
    done = subprocess.run(
        [sys.executable, "-m", "mtabench", *words, "--impl", "./mine.py:attention", *TINY[:-1]],
        cwd=folder / "kernels", env=ENVIRONMENT | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    assert done.returncode == 1, done
    assert "mine:attention" in next(x for x in done.stdout.splitlines() if "slower" in x)
    for name, revision in (("base", "HEAD~1"), ("head", "HEAD")):
        for row in csv.DictReader((tmp_path / f"out/{name}.csv").open()):
            assert (row["git_sha"], row["git_dirty"]) == (git(folder, "rev-parse", "--short=12", revision), "false")
    assert len(git(folder, "worktree", "list").splitlines()) == 1


AB_REFUSED = {
    "eager": ["is the checkout of another project: it has no mtabench, so name its kernels, as --impl ./mine.py"],
    "{outside}:attention": ["would be the same file for both revisions"],
    "../../outside.py:attention": ["would be the same file for both revisions"],
    "./new.py:attention": ["has no kernels/new.py in it; choose a later revision"],
}


@pytest.mark.parametrize("typed", AB_REFUSED)
def test_what_ab_cannot_measure_of_another_project(mtabench, monkeypatch, tmp_path, typed):
    folder = make_project(tmp_path)
    shutil.copy(OWN, tmp_path / "outside.py")
    shutil.copy(OWN, folder / "kernels/new.py")
    monkeypatch.chdir(folder / "kernels")
    sweep = ["fwd", "--impl", typed.format(outside=tmp_path / "outside.py"), *TINY[:-1]]
    code, _, err = mtabench("ab", "--base", "HEAD", "--out", tmp_path / "out", *sweep)
    assert code == 2
    for words in AB_REFUSED[typed]:
        assert words in err
    assert not (tmp_path / "out").exists()


def test_what_a_kernel_warns_of_is_said_behind_the_lines_of_its_cells(mtabench, tmp_path):
    (tmp_path / "warns.py").write_text(
        "import warnings\n\nfrom torch.nn.functional import scaled_dot_product_attention\n\n\n"
        "def attention(q, k, v, *, causal, scale):\n"
        "    warnings.warn('an old\\nname')\n"
        "    warnings.warn('Attempting to run cuBLAS, but there was no current CUDA context!')\n"  # PyTorch
        "    warnings.warn(f'{q.shape[2]} rows', RuntimeWarning)\n"
        "    return scaled_dot_product_attention(q, k, v, is_causal=causal, scale=scale)\n"
    )
    words = [*TINY, "--seq", "16,32,48", "--out", "a.csv", "--no-plot", "--impl", "./warns.py:attention"]
    _, out, err = mtabench("fwd", *words)
    assert "[3/3]" in out
    places = [f"Warning at {tmp_path / 'warns.py'}, line {line}: " for line in (7, 9)]
    assert err.splitlines() == [
        f"mtabench: User{places[0]}an old name",
        f"mtabench: Runtime{places[1]}32 rows (and 2 like it)",
    ]
