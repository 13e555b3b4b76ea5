"""Revisions of a checkout: found, given a folder each, and gone at the end however it comes."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from paired_runs import git, make_repository

from mtabench.comparing.revisions import Checkout, find_checkout, folders_of, resolve, working_tree
from mtabench.errors import UsageError
from mtabench.exit_handling import STOPPED


@pytest.fixture
def repository(tmp_path, monkeypatch):
    folder = make_repository(tmp_path)
    monkeypatch.chdir(folder)
    return folder


def worktrees(folder):
    return [line for line in git(folder, "worktree", "list", "--porcelain").splitlines() if line.startswith("worktree")]


def test_submodules_of_a_revision_are_those_of_its_commit(repository, tmp_path):
    part = make_repository(tmp_path / "other")
    git(repository, "-c", "protocol.file.allow=always", "submodule", "--quiet", "add", str(part), "part")
    git(repository, "commit", "--quiet", "--message", "with a part")
    git(repository / "part", "checkout", "--quiet", "HEAD~1")
    git(repository, "commit", "--quiet", "--all", "--message", "the part of before")
    checkout = Checkout(repository, own=False, files=(Path("part/mtabench/code.py"),))
    revisions = {"base": resolve(repository, "HEAD~1", "--base"), "head": working_tree(checkout)}
    with folders_of(checkout, revisions) as folders:
        texts = {name: (folder / "part/mtabench/code.py").read_text() for name, folder in folders.items()}
        assert texts == {"base": "revision = 1\n", "head": "revision = 0\n"}
    assert len(worktrees(repository)) == len(worktrees(repository / "part")) == 1
    git(repository, "update-index", "--cacheinfo", f"160000,{'1' * 40},part")
    git(repository, "commit", "--quiet", "--message", "a part that nobody has")
    with (
        pytest.raises(UsageError, match=r"has the submodule part at 111111111111, .* fetch origin 1111"),
        folders_of(checkout, {"base": resolve(repository, "HEAD", "--base")}),
    ):
        pass
    assert len(worktrees(repository)) == 1


def test_nothing_is_left_after_an_error_and_variables_of_a_hook_are_not_followed(repository, monkeypatch):
    monkeypatch.setenv("GIT_DIR", "/nowhere")
    base = resolve(repository, "main", "--base")
    folder = None

    def stopped():
        nonlocal folder
        with folders_of(find_checkout(), {"base": base}) as folders:
            folder = folders["base"]
            folder.joinpath("untracked").touch()
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        stopped()
    monkeypatch.delenv("GIT_DIR")
    assert len(worktrees(repository)) == 1
    assert not folder.exists()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_nothing_is_left_after_a_signal(repository, tmp_path, number):
    script = (
        "import time; from pathlib import Path; from mtabench.comparing.revisions import *; root = Path.cwd()\n"
        "from mtabench.exit_handling import run_and_exit\n"
        "def command():\n"
        "    with folders_of(Checkout(root), {'base': resolve(root, 'HEAD', '--base')}):\n"
        "        print('in', flush=True); time.sleep(60)\n"
        "run_and_exit(command)"
    )
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "TMPDIR": str(scratch)}
    process = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, env=environment, text=True)
    assert process.stdout.readline() == "in\n"
    assert len(list(scratch.iterdir())) == 1
    process.send_signal(number)
    assert process.wait(30) == STOPPED
    process.stdout.close()
    assert list(scratch.iterdir()) == []
    assert len(worktrees(repository)) == 1


@pytest.mark.parametrize("name", ["no-such-branch", "--all", "HEAD:mtabench", ""])
def test_what_is_no_commit_is_named(repository, name):
    with pytest.raises(UsageError, match=r"is no revision of .*give a branch, a tag or a commit"):
        resolve(repository, name, "--base")


def test_outside_a_repository(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    with pytest.raises(UsageError, match=r"cannot be used as a git checkout .not a git repository"):
        find_checkout()
