"""The scripts that train, for their tests: their names, their command lines."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

Command = Callable[..., tuple[int, str, str]]


def names_of(*modules: str) -> SimpleNamespace:
    """All names of modules that lie in scripts/, the script's own among them."""
    return SimpleNamespace(**{k: v for name in modules for k, v in vars(importlib.import_module(name)).items()})


@pytest.fixture(autouse=True)
def without_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton's interpreter, which the tests of the kernels ask for, is slow."""
    import triton.language  # noqa: F401 - which reads the flag once, for all tests of the process

    monkeypatch.delenv("TRITON_INTERPRET", raising=False)


def command_line(
    script: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *first: str
) -> Command:
    """Runs a script with words after the `first`; gives the exit code, standard output and standard error."""

    def run(*words: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", [*first, *map(str, words)])
        try:
            code = script.main()
        except SystemExit as ended:
            code = ended.code
        return code, *capsys.readouterr()

    return run


def assert_refused(command: Command, folder: Path, words: tuple[str, ...], sentence: str) -> None:
    """The last line on standard error says this, and the empty folder stays empty."""
    code, out, error = command(*words, "--out", folder / "x.csv")
    assert code == 2
    assert out == ""
    assert sentence in error.splitlines()[-1]
    assert not list(folder.iterdir())


def assert_kept(command: Command, folder: Path, *words: str) -> None:
    """A file that is there stays as it is."""
    path = folder / "x.csv"
    path.write_text("mine")
    code, _, error = command(*words, "--out", path)
    assert code == 2
    assert "already exists; give another --out" in error
    assert path.read_text() == "mine"
