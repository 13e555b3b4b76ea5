"""Our workflows, the ones that `mtabench ci init` writes, and the action: commands exist, rights are few."""

import re
import shlex
import subprocess
import tomllib
from pathlib import Path

import pytest

from mtabench.cli import _sweep_words

yaml = pytest.importorskip("yaml")
ROOT = Path(__file__).parents[1]
FILES = {
    "action": "action.yml",
    "test": ".github/workflows/test.yml",
    "gate": ".github/workflows/gate.yml",
    "written gate": "mtabench/workflows/gate.yml",
    "written dashboard": "mtabench/workflows/dashboard.yml",
}
TEXTS = {name: (ROOT / path).read_text() for name, path in FILES.items()}
PARSED = {name: yaml.safe_load(text) for name, text in TEXTS.items()}
WORKFLOWS = [name for name in FILES if name != "action"]
PAGE = (ROOT / "docs/ci.md").read_text()


def jobs(name):
    """The jobs of a workflow; the action's steps count as one."""
    parsed = PARSED[name]
    return list(parsed["jobs"].values()) if "jobs" in parsed else [parsed["runs"]]


def steps(name):
    return [step for job in jobs(name) for step in job["steps"]]


def commands(name):
    return [step["run"] for step in steps(name) if "run" in step]


def test_every_workflow_is_known():
    assert {path.stem for path in (ROOT / ".github/workflows").glob("*.yml")} == {"test", "gate"}
    assert sum(" ab " in command for command in commands("action")) == 1


@pytest.mark.parametrize("name", FILES)
def test_commands_are_sound_shell_and_their_files_exist(name):
    for command in commands(name):
        done = subprocess.run(["bash", "-n", "-c", command], capture_output=True, text=True, timeout=60)
        assert (done.returncode, done.stderr) == (0, ""), command
        for word in shlex.split(command, comments=True):
            if re.fullmatch(r"(\./)?(scripts|results)/\S+", word):
                assert (ROOT / word).exists(), word


@pytest.mark.parametrize("text", [TEXTS["action"], TEXTS["test"], PAGE], ids=["action", "test", "docs/ci.md"])
def test_commands_of_the_suite_exist_with_their_options(text):
    import typer

    from mtabench.cli import app

    all_ = typer.main.get_command(app).commands
    known = {
        name: {option for parameter in command.params for option in parameter.opts}
        for name, command in [*all_.items(), ("ci init", all_["ci"].commands["init"])]
    }
    names = "|".join(("ab", "noise", "inspect", "compare", "history", "dashboard", "fwd", "bwd", "decode", "ci init"))
    used = re.findall(rf"\bmtabench ({names})\b((?:[^`\n]|\\\n)*)", text)
    assert used
    for command, words in used:
        taken = known[command].union(*(known[word] for word in words.split() if word in known))
        for option in re.findall(r"(?<=\s)--[a-z][a-z-]*", words.partition(" # ")[0]):
            assert option in taken | {"--help"}, f"mtabench {command} {words}"


def test_sweeps_of_the_gate_can_be_planned():
    (given,) = [step["with"] for step in steps("gate") if step.get("uses") == "./"]
    assert set(given) <= set(PARSED["action"]["inputs"])
    passes = [_sweep_words(line.split()).words[0] for line in given["sweeps"].splitlines()]
    assert passes == ["fwd", "bwd", "decode"]


RIGHTS = {
    "test": {"contents": "read"},
    "gate": {"contents": "read", "pull-requests": "write"},
    "written gate": {"contents": "read", "pull-requests": "write"},
    "written dashboard": {"contents": "read"},
}


@pytest.mark.parametrize("name", WORKFLOWS)
def test_rights_are_few(name):
    workflow = PARSED[name]
    assert workflow["permissions"] == RIGHTS[name]
    assert "pull_request_target" not in TEXTS[name]
    more = [job["permissions"] for job in jobs(name) if "permissions" in job]
    if name == "written dashboard":
        assert workflow[True]["push"] == {"branches": ["BRANCH"]}  # the key `on`, which YAML 1.1 takes for a yes
        assert more == [{"contents": "write"}, {"pages": "write", "id-token": "write"}]
    else:
        assert more == []
        assert TEXTS[name].count("actions/checkout@") == TEXTS[name].count("persist-credentials: false")
    assert {"name", "concurrency"} <= set(workflow)
    assert all({"runs-on", "steps", "timeout-minutes"} <= set(job) for job in jobs(name))


@pytest.mark.parametrize("name", FILES)
def test_actions_are_githubs_own_and_no_text_from_outside_is_run(name):
    assert "secrets" not in re.sub(r"#.*", "", TEXTS[name])
    for step in steps(name):
        assert ("run" in step) != ("uses" in step), step
        github = r"actions/(checkout|setup-python|upload-artifact|upload-pages-artifact|deploy-pages)@v\d+"
        assert re.fullmatch(rf"{github}|ACTION|\./", step.get("uses", "./")), step
        assert "${{" not in step.get("run", ""), "text from outside would be run by the shell"


@pytest.mark.parametrize("name", ["gate", "written gate"])
def test_code_of_forks_does_nothing_on_a_runner(name):
    (job,) = jobs(name)
    assert "github.event.pull_request.head.repo.full_name == github.repository" in job["if"]


def test_the_page_names_what_the_workflows_do():
    for words in ("gate.yml", "test.yml", "mtabench ab", "mtabench inspect --baseline", "JUnit", "self-hosted"):
        assert words in PAGE


def test_another_project_installs_from_an_address_that_is_said_once():
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
    (extras,) = [one for page in pages for one in re.findall(r"mtabench\[(\S+)\] @ git\+https://\S+", page.read_text())]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert extras in project["optional-dependencies"]
