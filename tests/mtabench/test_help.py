"""What a person reads before anything runs: help, completion, errors that name the help; and what is loaded."""

import os
import re
from pathlib import Path

import pytest
from command_line import refused, run_python
from rich.console import Console
from typer.main import get_command

from mtabench import environment, exit_handling
from mtabench.cli import app
from mtabench.commands.sweep import _draw_at_end
from mtabench.help import WIDTH
from mtabench.measuring import timing
from mtabench.problem.case import KERNEL_PASSES
from mtabench.sweeps.plan import DEFAULTS
from mtabench.sweeps.this_process import CELL_TIMEOUT_S


def every_command(group=None, path=()):
    group = group or get_command(app)
    for name, command in group.commands.items():
        yield (*path, name), command
        if hasattr(command, "commands"):
            yield from every_command(command, (*path, name))


COMMANDS = [((), get_command(app)), *every_command()]


@pytest.mark.parametrize(("path", "command"), COMMANDS, ids=lambda part: "-".join(part) if type(part) is tuple else "")
def test_help_fits_and_breaks_no_word(mtabench, monkeypatch, path, command):
    shown = {}
    for columns in (WIDTH, 40):
        monkeypatch.setenv("COLUMNS", str(columns))
        code, shown[columns], err = mtabench(*path, "--help")
        assert (code, err) == (0, "")
    assert max(map(len, shown[WIDTH].splitlines())) <= WIDTH
    assert "list[" not in shown[WIDTH]
    for text in shown.values():
        words = text.split()
        for param in command.params:
            assert set((getattr(param, "help", None) or "").split()) <= set(words), param.name
            assert any(name in text for name in param.opts) or param.param_type_name == "argument"


def test_help_of_an_option_names_only_options_of_its_command():
    for path, command in COMMANDS:
        names = {"--help", *(name for param in command.params for name in (*param.opts, *param.secondary_opts))}
        for param in command.params:
            text = re.sub("`ncu .*?`", "", getattr(param, "help", None) or "")  # the options of another program
            assert set(re.findall("--[a-z][a-z-]*", text)) <= names, (path, param.name)


@pytest.mark.parametrize("pass_", KERNEL_PASSES)
def test_help_has_the_defaults(mtabench, pass_):
    _, out, _ = mtabench(pass_, "--help")
    text = " ".join(out.split())
    for device in ("cuda", "cpu"):
        for name, value in DEFAULTS[device, pass_].items():
            assert f"--{name} {value}" in text
    usual = timing.Settings()
    for value in (usual.max_rounds, usual.time_limit_s, CELL_TIMEOUT_S):
        assert f"; {value:g} if not given." in text
    assert "[default: cold]" in text


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("fwd --seq", "(`mtabench fwd --help` shows what there is)"),
        ("fwd --rounds x", "(`mtabench fwd --help` shows what there is)"),
        ("decode --no-such", "(`mtabench decode --help` shows what there is)"),
        ("results murge", "(`mtabench results --help` shows what there is)"),
        ("ab --base HEAD fwd --rounds x", "(`mtabench fwd --help` shows what there is)"),
        ("ab fwd", "(`mtabench ab --help` shows what there is)"),
        ("explain", "(`mtabench explain --help` shows what there is)"),
        ("fwdd", "(`mtabench --help` shows what there is)"),
        ("inspect --json", "No such option: --json (Possible options: --json-file)"),
        ("fwd --rounds x", "'--rounds': 'x' is no whole number"),
        ("fwd --time-limit soon", "'soon' is no number of seconds"),
        ("ab --pairs many --base main fwd", "'many' is no whole number"),
        ("dashboard . -o site --days ten", "'ten' is no whole number"),
        ("merge a.csv", "there is `mtabench results merge`"),
        ("fwd --sequence 1k", "Possible options: --seq)"),
        ("fwd --implm eager", "(Possible options: --impl)"),  # and neither --plot nor --time-limit
        ("explain fwd --gpu h200", "No such option: --gpu (`"),
    ],
)
def test_an_error_names_what_there_is_and_the_help_of_its_command(mtabench, words, sentence):
    refused(mtabench(*words.split()), sentence)


def completed(words, shell="bash"):
    """The completions that a shell receives for the last of these words."""
    variables = {"COMP_WORDS": " ".join(words), "COMP_CWORD": str(len(words) - 1)}
    done = run_python("-m", "mtabench", _MTABENCH_COMPLETE=f"complete_{shell}", **variables)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout.split()


def test_the_shell_completes_commands_options_and_names(mtabench):
    assert "--install-completion" in mtabench("--help")[1]
    assert completed(["mtabench", "fwd", "--impl", "eager,sdpa-m"]) == ["eager,sdpa-math"]


def test_a_slip_is_refused_before_torch_is_imported():
    commands = [
        "verify --impl tritn", "verify --head-dim 1000", "memory --seq x", "roofline no.csv",
        "plot no.csv", "report no.csv", "fwd --target 1", "fwd --impl tritn",
    ]  # fmt: skip
    code = (
        "import sys\nfrom mtabench.cli import app\nfrom mtabench.errors import UsageError\n"
        f"for words in {commands}:\n"
        "    try:\n        app(words.split(), standalone_mode=False)\n        print(words)\n"
        "    except UsageError:\n        pass\n"
        "print(*{'torch', 'matplotlib', 'scipy'} & set(sys.modules))"
    )
    done = run_python("-c", code)
    assert (done.returncode, done.stdout.strip()) == (0, "")


def test_lists_of_an_option_that_is_given_several_times_all_count():
    command = get_command(app).commands["fwd"]
    words = "--impl eager --seq 1k --impl=./a.py:f,triton --out a.csv --seq 2k --out b.csv --target 1% --target 2%"
    typed = command.make_context("fwd", words.split()).params
    assert (typed["impl"], typed["seq"]) == ("eager,./a.py:f,triton", "1k,2k")
    assert (str(typed["out"]), typed["target"]) == ("b.csv", "2%")


def test_what_a_notebook_or_a_container_lacks_stops_nothing(monkeypatch):
    """A notebook names a backend of matplotlib that is not installed here; an account may have no name and no home."""

    def nameless():
        raise KeyError("getpwuid(): uid not found: 12345")

    monkeypatch.setenv("MPLBACKEND", "module://matplotlib_inline.backend_inline")
    monkeypatch.setattr(exit_handling.getpass, "getuser", nameless)
    monkeypatch.setattr(exit_handling.os.path, "expanduser", lambda path: path)
    for name in ("HOME", "LOGNAME"):
        monkeypatch.setenv(name, "")
    with pytest.raises(SystemExit) as end:
        exit_handling.run_and_exit(lambda: 0)
    assert not end.value.code
    assert os.environ["MPLBACKEND"] == "agg"
    assert os.environ["LOGNAME"] == f"uid-{os.getuid()}"
    assert Path(os.environ["HOME"]).parent.is_dir()


def test_charts_that_fail_are_said_and_spoil_nothing(monkeypatch):
    def draw(*_):
        raise ValueError("no such backend")

    monkeypatch.setattr("mtabench.charts.draw", draw)
    console = Console(record=True, width=80)
    _draw_at_end(console, Path("a.csv"))
    assert "no charts: ValueError: no such backend" in console.export_text()


HEAVY = ("torch", "triton", "numpy", "scipy", "pandas", "matplotlib", "rich")
PROGRAM = f"""
import sys
from mtabench.cli import main
try:
    main()
finally:
    print("HEAVY", *sorted(set(sys.modules) & {set(HEAVY)!r}), file=sys.stderr)
"""


@pytest.mark.parametrize("words", ["--help", "bwd --help", "results merge --help", "fwd --seq 4k..1k", "--version"])
def test_help_and_slips_of_the_fingers_load_nothing_heavy(words):
    done = run_python("-c", PROGRAM, *words.split())
    assert done.returncode in (0, 2), done.stderr
    assert done.stderr.splitlines()[-1].split()[1:] == ["rich"] * ("--seq" in words)


def test_torch_says_the_same_of_itself():
    import torch

    assert environment.torch_build() == (torch.__version__, torch.version.cuda or "")
