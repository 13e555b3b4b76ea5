"""Runs the command line in this process, or Python in another, for tests."""

import functools
import os
import subprocess
import sys
from pathlib import Path

import pytest
import typer

from mtabench.cli import main

ROOT = Path(__file__).parents[1]
ENVIRONMENT = os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'kernels'}", "COLUMNS": "200"}

get_command = functools.cache(typer.main.get_command)  # all commands and options, built once a process


def make_runner(monkeypatch, capsys, folder, columns=200):
    """A function that runs `mtabench WORDS` in a folder: exit code, standard output and standard error."""
    monkeypatch.chdir(folder)
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.delenv("GITHUB_ACTIONS", raising=False)
    monkeypatch.delenv("GITHUB_STEP_SUMMARY", raising=False)
    monkeypatch.setattr(typer.main, "get_command", get_command)

    def run(*words):
        monkeypatch.setattr(sys, "argv", ["mtabench", *map(str, words)])
        with pytest.raises(SystemExit) as ended:
            main()
        captured = capsys.readouterr()
        return ended.value.code, captured.out, captured.err

    return run


def run_python(*words, **variables):
    """Run Python in a process of its own, which finds this checkout: how it ended, and what it printed."""
    return subprocess.run([sys.executable, *words], capture_output=True, text=True, env=ENVIRONMENT | variables)


def printed(result):
    """What a command wrote to standard output: assert that it ended well, and said nothing on standard error."""
    code, out, err = result
    assert (code, err) == (0, ""), result
    return out


def refused(result, *words):
    """Assert that a command ended as wrong usage does: one sentence that has these words, code 2, no output."""
    code, out, err = result
    assert (code, out, len(err.splitlines())) == (2, "", 1), result
    assert err.startswith("mtabench: ")
    for word in words:
        assert word in err


def contents(folder):
    """What is in the files of a folder, by name."""
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}
