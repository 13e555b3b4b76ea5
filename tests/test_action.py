"""From an empty repository to a gate and a dashboard: what `mtabench ci init` writes, its steps run as a shell."""

import json
import os
import re
import shutil
import subprocess
import sys
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import NamedTuple

import pytest
from command_line import make_runner, refused
from paired_runs import git
from written_runs import case, rounds, write_run

from mtabench.commands import ci

ROOT = Path(__file__).parents[1]
KERNEL = """
import time
from torch.nn.functional import scaled_dot_product_attention

MS = {ms}


def attention(q, k, v, *, causal, scale):
    time.sleep(MS / 1e3 - 1)
    return scaled_dot_product_attention(q, k, v, is_causal=causal, scale=scale, enable_gqa=True)
"""
SWEEP = "fwd --impl ./mine.py:attention --seq 32 --head-dim 16 --heads 2 --device cpu --rounds 2 --time-limit 1"
FAST, SLOW = 1000.0, 1100.0
# Stand for the Python that makes an environment, for the one in it with pip, and for GitHub's own command line.
TOOLS = {
    "python3": 'for venv; do :; done; mkdir -p "$venv/bin"; cp "$TOOLS/pip" "$venv/bin/python"; '
    'ln -sf "$TOOLS/mtabench" "$venv/bin/"; echo "python3 $*" >> "$TOOLS/log"',
    "pip": '[ "$1" = -c ] || echo "pip $*" >> "$TOOLS/log"',
    "gh": 'echo "gh $*" >> "$TOOLS/log"; case $* in *--jq*) cat "$TOOLS/comments"; esac',
    "mtabench": f'exec {sys.executable} $PROGRAM "$@"',
}


@pytest.fixture
def mtabench(monkeypatch, capsys, project):
    return make_runner(monkeypatch, capsys, project)


@pytest.fixture
def project(tmp_path):
    """A clone of an empty repository, with three commits of a kernel."""
    git(tmp_path, "init", "--quiet", "--bare", "origin")
    folder = tmp_path / "project"
    git(tmp_path, "clone", "--quiet", str(tmp_path / "origin"), str(folder))
    for number in range(3):
        commit(folder, FAST, f"{number}")
    git(folder, "push", "--quiet", "--set-upstream", "origin", "main")
    return folder


def commit(folder, ms, message):
    (folder / "mine.py").write_text(f"# {message}{KERNEL.format(ms=ms)}")
    git(folder, "add", "--all")
    git(folder, "commit", "--quiet", "--message", message)


class Runner:
    """A machine that runs jobs in a project as GitHub does, as far as the action needs it."""

    def __init__(self, folder, project, program):
        self.project, self.tools = project, folder / "tools"
        self.tools.mkdir()
        for name, text in TOOLS.items():
            (self.tools / name).write_text(f"#!/bin/bash\n{text}\n")
            (self.tools / name).chmod(0o755)
        (self.tools / "comments").touch()
        (self.tools / "log").touch()
        templates = folder / "templates"
        for ms in (FAST, SLOW):
            for seed in range(4):
                cell = {case(32): rounds(ms, noise=0.001, seed=seed)}
                write_run(templates / f"{ms}-{seed}.csv", cell, "RUN", git_sha="COMMIT", git_dirty="DIRTY")
        self.environment = os.environ | {
            "PATH": f"{self.tools}:{os.environ['PATH']}", "TOOLS": str(self.tools), "TEMPLATES": str(templates),
            "PYTHONPATH": f"{ROOT}:{ROOT}/kernels:{ROOT}/tests", "PROGRAM": program, "COLUMNS": "200",
            "GITHUB_ACTIONS": "true", "GITHUB_ACTION_PATH": str(ROOT), "GITHUB_JOB": "gate",
            "GITHUB_REPOSITORY": "me/project", "GITHUB_SERVER_URL": "https://github.com", "OMP_NUM_THREADS": "1",
            "RUNNER_TOOL_CACHE": str(folder / "cache"), "GIT_CONFIG_GLOBAL": "/dev/null",
        }  # fmt: skip
        self.temp = folder / "temp"

    def run(self, workflow, event, only=""):
        """Run the steps of the job that uses the action; its exit code, and what it printed."""
        yaml = pytest.importorskip("yaml")
        jobs = yaml.safe_load(self.project.joinpath(workflow).read_text())["jobs"]
        (given,) = [step["with"] for job in jobs.values() for step in job["steps"] if "sweeps" in step.get("with", {})]
        action = yaml.safe_load((ROOT / "action.yml").read_text())
        assert set(given) <= set(action["inputs"])
        if not only:
            shutil.rmtree(self.temp, ignore_errors=True)  # as GitHub does before a job
        self.temp.mkdir(exist_ok=True)
        values = {f"inputs.{name}": given.get(name, one.get("default")) for name, one in action["inputs"].items()}
        values |= {"github.event_name": event, "github.event.pull_request.number": "7", "github.token": "secret",
                   "github.job": "gate", "runner.temp": str(self.temp)}  # fmt: skip
        path, summary = self.temp / "path", self.temp / "summary"
        path.touch()
        summary.touch()
        self.uploads, worst, printed = [], 0, ""
        for step in action["runs"]["steps"]:
            if (worst and "cancelled()" not in step.get("if", "")) or not holds(step.get("if", "True"), values):
                continue
            if only and step.get("name") != only:
                continue
            if "uses" in step:
                self.uploads.append(filled(step["with"]["path"], values))
                continue
            environment = self.environment | {
                "PATH": ":".join([*path.read_text().split(), self.environment["PATH"]]), "GITHUB_PATH": str(path),
                "GITHUB_STEP_SUMMARY": str(summary), "RUNNER_TEMP": str(self.temp),
                "GITHUB_SHA": git(self.project, "rev-parse", "HEAD"), "GITHUB_WORKSPACE": str(self.project),
                **{name: filled(text, values) for name, text in step.get("env", {}).items()},
            }  # fmt: skip
            done = subprocess.run(
                ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", step["run"]],
                cwd=self.project, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            )  # fmt: skip
            printed += done.stdout
            worst = worst or (0 if step.get("continue-on-error") else done.returncode)
        self.summary, self.log = summary.read_text(), (self.tools / "log").read_text()
        return worst, printed


def holds(condition, values):
    """Whether a condition of a step holds, of a job that nobody cancelled."""
    text = condition.removeprefix("${{").removesuffix("}}").replace("!cancelled()", "True").replace("&&", "and")
    return eval(re.sub(r"[a-z]+(\.[a-z_-]+)+", lambda found: repr(values[found[0]]), text))


def filled(text, values):
    return re.sub(r"\$\{\{ (\S+) \}\}", lambda found: values[found[1]], text)


@pytest.mark.slow
@pytest.mark.parametrize(
    "program", [ROOT / "tests/planted_command.py", pytest.param("-m mtabench", marks=pytest.mark.long)]
)
def test_from_an_empty_repository_to_a_gate_and_a_dashboard(mtabench, project, tmp_path, program):
    runner = Runner(tmp_path, project, str(program))
    code, out, err = mtabench("ci", "init", "--action", "me/mtabench@v1", *SWEEP.split())
    assert (code, err) == (0, "")
    assert "register a runner with the labels self-hosted, linux, gpu" in out
    gate = project / ".github/workflows/mtabench-gate.yml"
    gate.write_text(
        gate.read_text().replace("with:\n          sweeps", "with:\n          options: --pairs 3\n          sweeps")
    )
    commit(project, FAST, "workflows")
    git(project, "push", "--quiet")

    # The first push to main: a dashboard with a past.
    code, printed = runner.run(".github/workflows/mtabench-dashboard.yml", "push")
    assert code == 0, printed
    assert f"pip -m pip install --quiet {ROOT}[report,nvml]\n" in runner.log
    names = git(project, "ls-tree", "-r", "--name-only", "origin/mtabench-results").splitlines()
    assert sorted(name.partition("/")[0] for name in names)[1:] == ["past"] * 4
    assert not any("samples" in name for name in names)
    assert "read 5 files: 5 runs of 4 revisions, 1 cell" in runner.summary
    assert runner.uploads == [str(runner.temp / "mtabench"), str(runner.temp / "mtabench/site")]
    assert (runner.temp / "mtabench/site/index.html").exists()
    assert git(project, "status", "--porcelain") == ""

    # A pull request that makes the kernel slower, as GitHub merges it.
    git(project, "switch", "--quiet", "--create", "slower")
    commit(project, SLOW, "slower")
    git(project, "switch", "--quiet", "--detach", "main")
    git(project, "merge", "--quiet", "--no-ff", "--message", "merge", "slower")
    code, printed = runner.run(".github/workflows/mtabench-gate.yml", "pull_request")
    assert code == 1, printed
    assert re.search(r"^::error.*mine:attention", printed, re.M)
    assert printed.count("] pair ") == 6
    assert "1 slower" in runner.summary
    mark, comment = (runner.temp / "mtabench/body").read_text().split("\n", 1)
    assert mark == "<!-- mtabench gate -->"
    assert "1 slower" in comment
    assert f"gh api --silent repos/me/project/issues/7/comments -F body=@{runner.temp}/mtabench/body\n" in runner.log
    assert '<failure type="slower"' in (runner.temp / "mtabench/1.xml").read_text()
    assert runner.uploads == [str(runner.temp / "mtabench")]
    (runner.tools / "comments").write_text("40\n41\n")
    assert runner.run(".github/workflows/mtabench-gate.yml", "pull_request", only="Comment")[0] == 0
    assert "gh api --silent --method PATCH repos/me/project/issues/comments/41 -F" in runner.log

    # It is merged all the same, and the next run is added.
    git(project, "switch", "--quiet", "main")
    git(project, "merge", "--quiet", "slower")
    git(project, "push", "--quiet")
    code, printed = runner.run(".github/workflows/mtabench-dashboard.yml", "push")
    assert code == 0, printed
    assert "read 6 files: 6 runs of 5 revisions, 1 cell" in runner.summary
    assert len(git(project, "log", "--format=%H", "origin/mtabench-results").splitlines()) == 3


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("--action", "nonsense"), "--action 'nonsense' is no action; expected one such as OWNER/mtabench@v0.1.0"),
        ((), "was not installed from a git address; give it, as --action OWNER/mtabench@v0.1.0"),
        (("--runner", "gpu]"), "--runner 'gpu]' has no labels of a runner"),
    ],
)
def test_what_cannot_be_written_is_one_sentence(mtabench, project, monkeypatch, words, sentence):
    monkeypatch.setattr(ci, "metadata", Installed(None))
    refused(mtabench("ci", "init", *words, *SWEEP.split()), sentence)
    assert not (project / ".github").exists()


class Installed(NamedTuple):
    """Stands for importlib.metadata, given what pip wrote of the origin."""

    text: str | None
    PackageNotFoundError = PackageNotFoundError

    def distribution(self, name):
        return self

    def read_text(self, name):
        return self.text


def test_the_action_is_of_the_commit_that_was_installed(mtabench, project, monkeypatch):
    origin = {"url": "https://github.com/them/mtabench.git", "vcs_info": {"vcs": "git", "commit_id": "0123abc"}}
    monkeypatch.setattr(ci, "metadata", Installed(json.dumps(origin)))
    assert mtabench("ci", "init", *SWEEP.split())[0] == 0
    gate = project / ".github/workflows/mtabench-gate.yml"
    assert "- uses: them/mtabench@0123abc\n" in gate.read_text()
    refused(mtabench("ci", "init", *SWEEP.split()), "mtabench-gate.yml already exists; give --overwrite")
    assert mtabench("ci", "init", "--overwrite", "--runner", "ubuntu-latest", *SWEEP.split())[0] == 0
    assert "runs-on: [ubuntu-latest]\n" in gate.read_text()
    refused(mtabench("ci", "init", *SWEEP.split(), "--cells", "a b.csv"), "cannot stand in a workflow")
    for option, value in (("--out", "a.csv"), ("--workers", "2")):
        refused(mtabench("ci", "init", *SWEEP.split(), option, value), f"{option} is for one sweep")
    git(project, "switch", "--quiet", "--detach")
    refused(mtabench("ci", "init", *SWEEP.split()), "has no branch checked out; type git switch main")
    monkeypatch.chdir(project / ".github")
    refused(
        mtabench("ci", "init", *SWEEP.replace("./", "../").split()), f"workflows start in {project}; type this there"
    )
