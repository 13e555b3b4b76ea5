"""A fault in a CUDA source, for tests that the emulator finds it."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import ModuleType

import pytest


def plant(
    monkeypatch: pytest.MonkeyPatch, module: ModuleType, folder: Path, name: str, line: str, instead: str
) -> None:
    """Have `module` take its sources from `folder`, a copy of its FOLDER where file `name` has `instead` for `line`.

    What was compiled of the sources before is the caller's to forget.
    """
    source = (module.FOLDER / name).read_text()
    assert source.count(line) == 1
    shutil.copytree(module.FOLDER, folder, dirs_exist_ok=True)
    (folder / name).write_text(source.replace(line, instead))
    monkeypatch.setattr(module, "FOLDER", folder)
