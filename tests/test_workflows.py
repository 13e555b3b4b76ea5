"""Our workflows, the ones that `mtabench ci init` writes, and the action: commands exist, rights are few."""

import os
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
    "release": ".github/workflows/release.yml",
    "written gate": "mtabench/workflows/gate.yml",
    "written dashboard": "mtabench/workflows/dashboard.yml",
}
TEXTS = {name: (ROOT / path).read_text() for name, path in FILES.items()}
PARSED = {name: yaml.safe_load(text) for name, text in TEXTS.items()}
WORKFLOWS = [name for name in FILES if name != "action"]


def jobs(name):
    """The jobs of a workflow; the action's steps count as one."""
    parsed = PARSED[name]
    return list(parsed["jobs"].values()) if "jobs" in parsed else [parsed["runs"]]


def steps(name):
    return [step for job in jobs(name) for step in job["steps"]]


def commands(name):
    return [step["run"] for step in steps(name) if "run" in step]


@pytest.mark.parametrize("name", FILES)
def test_commands_are_sound_shell_and_their_files_exist(name):
    for command in commands(name):
        done = subprocess.run(["bash", "-n", "-c", command], capture_output=True, text=True, timeout=60)
        assert (done.returncode, done.stderr) == (0, ""), command
        for word in shlex.split(command, comments=True):
            if re.fullmatch(r"(\./)?(scripts|results)/\S+", word):
                assert (ROOT / word).exists(), word


def test_sweeps_of_the_gate_can_be_planned():
    (given,) = [step["with"] for step in steps("gate") if step.get("uses") == "./"]
    assert set(given) <= set(PARSED["action"]["inputs"])
    passes = [_sweep_words(line.split()).words[0] for line in given["sweeps"].splitlines()]
    assert passes == ["fwd", "bwd", "decode"]


DOWNLOAD, PYPI = "actions/download-artifact@v7", "pypa/gh-action-pypi-publish@release/v1"
RIGHTS = {
    "test": {"contents": "read"},
    "gate": {"contents": "read", "pull-requests": "write"},
    "release": {"contents": "read"},
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
    elif name == "release":
        assert more == [{"id-token": "write"}, {"contents": "write"}]
        assert [step["uses"] for step in jobs(name)[1]["steps"]] == [
            DOWNLOAD,
            PYPI,
        ]  # PyPI's rights run nothing of ours
    else:
        assert more == []
        assert TEXTS[name].count("actions/checkout@") == TEXTS[name].count("persist-credentials: false")
    assert {"name", "concurrency"} <= set(workflow)
    assert all({"runs-on", "steps", "timeout-minutes"} <= set(job) for job in jobs(name))


@pytest.mark.parametrize("name", FILES)
def test_actions_are_of_github_or_pypi_and_no_text_from_outside_is_run(name):
    assert "secrets" not in re.sub(r"#.*", "", TEXTS[name])
    for step in steps(name):
        assert ("run" in step) != ("uses" in step), step
        github = (
            r"actions/(checkout|setup-python|upload-artifact|download-artifact|upload-pages-artifact|deploy-pages)@v\d+"
        )
        assert re.fullmatch(rf"{github}|{PYPI}|ACTION|\./", step.get("uses", "./")), step
        assert "${{" not in step.get("run", ""), "text from outside would be run by the shell"


@pytest.mark.parametrize("name", ["gate", "written gate"])
def test_code_of_forks_does_nothing_on_a_runner(name):
    (job,) = jobs(name)
    assert "github.event.pull_request.head.repo.full_name == github.repository" in job["if"]


def test_the_matrix_has_the_oldest_versions_that_are_promised_and_newer_than_the_pinned():
    rows = PARSED["test"]["jobs"]["tests"]["strategy"]["matrix"]["include"]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert {row["python"] for row in rows} == {"3.11", "3.12", "3.13", "3.14"}
    assert project["requires-python"] == ">=3.11"
    pinned = dict(re.findall(r"^(torch|triton)==(\d+\.\d+)", (ROOT / "scripts/constraints-cpu.txt").read_text(), re.M))
    for name in ("torch", "triton"):
        oldest, *newer = sorted((row[name] for row in rows if name in row), key=lambda text: int(text.split(".")[1]))
        assert any(re.match(rf"{name}>={oldest}(;|$)", dependency) for dependency in project["dependencies"]), oldest
        assert int(newer[-1].split(".")[1]) > int(pinned[name].split(".")[1])


def test_a_release_builds_as_its_tag_is_named():
    """The step that compares a tag with the version takes this version's tag alone."""
    (check,) = [step["run"] for step in steps("release") if step.get("name") == "The tag is the version"]
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    for tag, code in ((f"v{version}", 0), (f"v{version}1", 1), (version.replace(".", "x"), 1)):
        environment = {**os.environ, "GITHUB_REF_NAME": tag}
        assert subprocess.run(["bash", "-c", check], cwd=ROOT, env=environment, check=False).returncode == code, tag
