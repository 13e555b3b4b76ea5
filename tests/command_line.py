"""Runs the command line in this process, for tests."""

import functools
import sys

import pytest
import typer

from mtabench.cli import main

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
