"""The scripts are sound shell with help, and documents name only commands, options and times that exist."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import generate_docs
import pytest
from conformance_faults import FAULTS

ROOT = Path(__file__).parents[1]
RUNNABLE = ("scripts/quickstart", "scripts/test", "scripts/build_wheel", "scripts/tag_release", ".ci/run")
PAGES = {
    str(path.relative_to(ROOT)): path.read_text()
    for path in sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
}


def run(*words, **more):
    return subprocess.run(words, **{"capture_output": True, "text": True, "cwd": ROOT, "timeout": 60} | more)


def names_of_commands():
    import typer

    from mtabench.cli import app

    return set(typer.main.get_command(app).commands)


@pytest.mark.parametrize("script", [*RUNNABLE, "scripts/setup.sh"])
def test_scripts_are_sound_shell_and_can_be_run(script):
    result = run("bash", "-n", script)
    assert (result.returncode, result.stderr) == (0, "")
    assert os.access(ROOT / script, os.X_OK) == (script in RUNNABLE)


@pytest.mark.parametrize("script", RUNNABLE[:-1])
def test_help_says_what_it_does_and_needs(script):
    result = run(ROOT / script, "--help")
    assert result.returncode == 0
    assert result.stdout.startswith(f"usage: ./{script}")
    assert "Python 3.11 or later, git and a network" in result.stdout


@pytest.mark.parametrize(("mypy", "pytest_", "code"), [(0, 0, 0), (1, 0, 1), (0, 5, 5), (2, 5, 2)])
def test_what_fails_beside_the_tests_or_in_them_fails_all(tmp_path, mypy, pytest_, code):
    """With stand-ins for the tools and the set-up: mypy's output comes whole, after the tests' output."""
    places = f"ROOT={tmp_path} VENV={tmp_path}/.venv"
    set_up = f'{places}; PATH=$VENV/bin:$PATH; say() {{ echo "$@"; }}; set_up() {{ :; }}'
    tools = {"mypy": f"echo of mypy; exit {mypy}", "pytest": f"sleep 0.2; echo of pytest; exit {pytest_}"}
    for name, does in {"ruff": ":", "chromium-headless-shell": ":", **tools}.items():
        tool = tmp_path / ".venv/bin" / name
        tool.parent.mkdir(parents=True, exist_ok=True)
        tool.write_text(f"#!/bin/sh\n{does}\n")
        tool.chmod(0o755)
    (tmp_path / "setup.sh").write_text(set_up)
    shutil.copy(ROOT / "scripts/test", tmp_path)
    done = run(tmp_path / "test")
    assert done.returncode == code
    assert done.stdout.splitlines()[-4:] == ["Tests", "of pytest", "Types", "of mypy"]


COMMIT = "git add -A && git commit -qm more"


@pytest.mark.parametrize(
    ("change", "words", "code", "message"),
    [
        ("", "v0.1.0", 0, "Tagged v0.1.0; publish it with: git push origin v0.1.0"),
        ("", "--dry-run v0.1.0", 0, "v0.1.0 can be tagged."),
        ("git tag v0.1.0", "v0.1.0", 1, "v0.1.0 is already a tag; choose the next version."),
        ("git switch -qc other", "v0.1.0", 1, "other is checked out, expected main: git switch main"),
        ("git switch -q --detach", "v0.1.0", 1, "no branch is checked out, expected main: git switch main"),
        ("touch new", "v0.1.0", 1, "the tree has changes, expected none: commit them, git status lists them."),
        ("", "v0.2.0", 1, "pyproject.toml has version 0.1.0, expected 0.2.0: change it, or tag v0.1.0."),
        (f"echo '## [Unreleased]' >CHANGELOG.md; {COMMIT}", "v0.1.0", 1, "CHANGELOG.md has no section [0.1.0]"),
        (f"touch generate_docs.py; {COMMIT}", "v0.1.0", 1, "the pages above are not of this code and these results"),
        (f"touch fuzz_status.py; {COMMIT}", "v0.1.0", 1, "the kernels above were not fuzzed as they are"),
        ("", "0.1.0", 2, "usage: ./scripts/tag_release [--dry-run] vVERSION"),
        ("", "", 2, "usage: ./scripts/tag_release [--dry-run] vVERSION"),
    ],
)
def test_only_what_keeps_its_promises_is_tagged(tmp_path, change, words, code, message):
    """In a repository whose Python fails for a script that has a file of its name in the root."""
    (tmp_path / "scripts").mkdir()
    shutil.copy(ROOT / "scripts/tag_release", tmp_path / "scripts")
    setup = f'ROOT={tmp_path}\nsay() {{ echo "$@"; }}\nset_up() {{ :; }}\n'
    python = '#!/bin/sh\n[ "$1" = scripts/fuzz_status.py ] || [ "$*" = "scripts/generate_docs.py --check" ] || exit 9\n'
    python += '[ ! -e "${1##*/}" ]\n'
    files = {".gitignore": ".venv", "pyproject.toml": 'version = "0.1.0"\n', "CHANGELOG.md": "## [0.1.0] - today\n"}
    for name, text in (files | {"scripts/setup.sh": setup, ".venv/bin/python": python}).items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    (tmp_path / ".venv/bin/python").chmod(0o755)
    identity = {f"GIT_{who}_{what}": "me@here" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")}
    here = {"cwd": tmp_path, "env": os.environ | identity}
    assert run("bash", "-ec", f"git init -qb main; {COMMIT}; {change}", **here).returncode == 0
    before = run("git", "tag", **here).stdout
    result = run(tmp_path / "scripts/tag_release", *words.split(), **here)
    assert result.returncode == code, result.stderr
    assert message in (result.stderr if code else result.stdout)
    assert result.stderr.count("\n") == (code == 1) or code == 2
    tagged = run("git", "tag", **here).stdout
    assert tagged == ("v0.1.0\n" if code == 0 and "--dry-run" not in words else before)


def test_a_python_that_will_not_do_is_named(tmp_path):
    """In a copy without .venv, a PYTHON that is too old makes nothing, and the message says what to do."""
    (tmp_path / "scripts").mkdir()
    for name in ("scripts/quickstart", "scripts/setup.sh", "scripts/constraints-cpu.txt", "pyproject.toml"):
        (tmp_path / name).write_bytes((ROOT / name).read_bytes())
    old = tmp_path / "old-python"
    old.write_text("#!/bin/sh\nexit 1\n")
    old.chmod(0o755)
    result = run("bash", tmp_path / "scripts/quickstart", env={**os.environ, "PYTHON": str(old)})
    assert result.returncode == 1
    assert "error: no Python 3.11 or later was found" in result.stderr
    assert str(old) in result.stderr
    assert not (tmp_path / ".venv").exists()


FAKE_TORCH = """
bfloat16 = "bf16"
class cuda:
    is_available = staticmethod(lambda: BACKEND != "none")
def empty(*shape, dtype, device):
    return [*shape, dtype, device]
"""
FAKE_KERNELS = """
from types import SimpleNamespace
def explain(q, k, v, weight):
    assert q == k == v == [1, 16, 64, 64, "bf16", "cuda"] and weight == [16, 6, 11, "bf16", "cuda"]
    return SimpleNamespace(backend=BACKEND)
"""


@pytest.mark.parametrize(
    ("backend", "expected"),
    [
        ("hopper", "fwd --seq 1k..8k --impl eager,hopper,triton,sdpa-flash,sdpa-cudnn --plot"),
        ("triton", "fwd --seq 1k..8k --impl eager,triton,sdpa-flash,sdpa-cudnn --plot"),
        ("reference", "fwd --seq 1k..8k --impl eager,triton,sdpa-flash,sdpa-cudnn --plot"),
        ("none", "fwd --seq 128..512 --device cpu --time-limit 4 --plot"),
    ],
)
def test_quickstart_measures_what_auto_takes_on_this_gpu(tmp_path, backend, expected):
    """With a GPU that is not there: in place of the set-up, of torch and of the kernels stand a few lines."""
    for folder in ("scripts", ".venv/bin", "fake/mta_kernels"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "scripts/quickstart").write_bytes((ROOT / "scripts/quickstart").read_bytes())
    setup = f"ROOT={tmp_path}\nsay() {{ printf '%s\\n' \"$@\"; }}\nset_up() {{ :; }}\nhas_gpu() {{ :; }}\n"
    (tmp_path / "scripts/setup.sh").write_text(setup)
    (tmp_path / "fake/torch.py").write_text(f"BACKEND = {backend!r}\n{FAKE_TORCH}")
    (tmp_path / "fake/mta_kernels/__init__.py").write_text("")
    (tmp_path / "fake/mta_kernels/conv_attention.py").write_text(f"BACKEND = {backend!r}\n{FAKE_KERNELS}")
    python = f'#!/bin/sh\nPYTHONPATH={tmp_path}/fake exec {sys.executable} "$@"\n'
    for name, text in (("python", python), ("mtabench", '#!/bin/sh\necho "ran: $*"\n')):
        (tmp_path / ".venv/bin" / name).write_text(text)
        (tmp_path / ".venv/bin" / name).chmod(0o755)
    result = run("bash", tmp_path / "scripts/quickstart")
    assert (result.returncode, result.stderr) == (0, "")
    (ran,) = re.findall(r"^ran: (.*) --out mtabench-results/quickstart-\S+\.csv$", result.stdout, re.MULTILINE)
    assert ran == expected


def test_the_pytorch_that_setup_takes_from_the_machine_is_one_that_the_project_takes():
    major, minor = re.findall(r'"torch>=(\d+)\.(\d+)"', (ROOT / "pyproject.toml").read_text())[0]
    assert f"version < ({major}, {minor})" in (ROOT / "scripts/setup.sh").read_text()


def test_each_fault_that_is_planted_has_one_place():
    places = {(x.file, x.name): (ROOT / "kernels/mta_kernels" / x.file).read_text().count(x.line) for x in FAULTS}
    assert {name: count for name, count in places.items() if count != 1} == {}


def test_the_page_of_commands_names_every_command_and_no_other():
    named = set(re.findall(r"mtabench ([a-z]+)\b", "\n".join(re.findall(r"`([^`\n]+)`", PAGES["docs/commands.md"]))))
    assert named == names_of_commands()


def test_documents_and_scripts_use_options_that_exist():
    import typer

    from mtabench.cli import app

    commands = typer.main.get_command(app).commands

    def options_of(command):
        own = {option for parameter in command.params for option in (*parameter.opts, *parameter.secondary_opts)}
        return own.union(*map(options_of, getattr(command, "commands", {}).values()))

    options = {name: options_of(command) for name, command in commands.items()}
    shell = (ROOT / "scripts/quickstart").read_text()
    workflows = [path.read_text() for path in (ROOT / "action.yml", *(ROOT / ".github/workflows").iterdir())]
    text = "\n".join([*PAGES.values(), *workflows, re.sub(r"\((fwd|bwd|decode) ", r"mtabench \1 ", shell)])
    used = re.findall(r"mtabench ([a-z]+) ([^`\n|)#]*)", text.replace("\\\n", " "))
    assert used
    for command, words in used:
        if command in options:
            taken = options[command].union(*(options[word] for word in words.split() if word in options))  # ab ... fwd
            for option in re.findall(r"--[a-z][a-z-]*", words):
                assert option in taken | {"--help"}, f"mtabench {command} {words}"
    table = (ROOT / "docs/sweeps.md").read_text()
    for option in re.findall(r"--[a-z][a-z-]*", table):
        assert option in options["fwd"] | options["decode"] | {"--help"}, option


@pytest.mark.parametrize("page", ["README.md", "docs/model.md"])
@pytest.mark.usefixtures("without_interpreter")
def test_the_example_of_a_model_runs_and_decodes_the_last_row(page, capsys):
    code = re.findall(r"```python\n(.*?)```", PAGES[page], re.DOTALL)[0]
    for there, here in (("cuda", "cpu"), ("bfloat16", "float32"), ("1024", "24")):
        assert there in code
        code = code.replace(there, here)
    code += "\nassert out.shape == (2, 16, 24, 64)\n"
    if page == "docs/model.md":
        code += "torch.testing.assert_close(token, out[:, :, -1:])\n"
    exec(code, {})
    assert capsys.readouterr().out.startswith("reference: ")


@pytest.mark.usefixtures("without_interpreter")
def test_the_readme_trains_a_hugging_face_model_in_ten_lines():
    pytest.importorskip("transformers", reason="transformers is not installed: pip install '.[transformers]'")
    (code,) = (x for x in re.findall(r"```python\n(.*?)```", PAGES["README.md"], re.DOTALL) if "transformers" in x)
    assert len(list(filter(None, code.splitlines()))) <= 10
    assert "pip install '.[transformers]'" in PAGES["README.md"]
    code = code.replace("cuda", "cpu").replace("(4, 128)", "(2, 16)")
    exec(code, names := {})
    assert all((x.grad != 0).any() for name, x in names["model"].named_parameters() if ".mta." in name)


def test_the_page_of_results_names_every_status():
    from mtabench.results.columns import STATUSES

    page = (ROOT / "docs/results.md").read_text()
    assert all(f"`{status}`" in page for status in STATUSES)


def test_generated_tables_are_those_of_today():
    assert generate_docs.main(["--check"]) == 0, "run `python scripts/generate_docs.py`"


def test_pages_that_are_not_of_today_are_named_and_kept(monkeypatch, tmp_path, capsys):
    page = tmp_path / "docs/page.md"
    page.parent.mkdir()
    page.write_text("<!-- table -->\nold\n<!-- /table -->\n")
    monkeypatch.setattr(generate_docs, "DOCS", page.parent)
    monkeypatch.setattr(generate_docs, "PAGES", {page: {"table": lambda: iter(["new"])}})
    assert (generate_docs.main(["--check"]), capsys.readouterr().out) == (1, "docs/page.md\n")
    assert "old" in page.read_text()
    assert (generate_docs.main([]), page.read_text()) == (0, "<!-- table -->\nnew\n<!-- /table -->\n")
