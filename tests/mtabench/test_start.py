"""What a command loads before it has something to measure."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from mtabench import environment

ROOT = Path(__file__).parents[2]
HEAVY = ("torch", "triton", "numpy", "scipy", "pandas", "matplotlib", "rich")
PROGRAM = f"""
import sys
from mtabench.cli import main
try:
    main()
finally:
    print("HEAVY", *sorted(set(sys.modules) & {set(HEAVY)!r}), file=sys.stderr)
"""


def heavy_modules(words, **variables):
    """The heavy modules that `mtabench WORDS` loads in a process of its own, and what it prints."""
    paths = os.pathsep.join([str(ROOT), str(ROOT / "kernels")])
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *words], capture_output=True, text=True,
        env={**os.environ, "PYTHONPATH": paths, **variables},
    )  # fmt: skip
    assert done.returncode in (0, 2), done.stderr
    return done.stderr.splitlines()[-1].split()[1:], done.stdout


@pytest.mark.parametrize("words", ["--help", "bwd --help", "results merge --help", "fwd --seq 4k..1k", "--version"])
def test_help_and_slips_of_the_fingers_load_nothing_heavy(words):
    assert heavy_modules(words.split())[0] == ["rich"] * ("--seq" in words)


def test_torch_says_the_same_of_itself():
    import torch

    assert environment.torch_build() == (torch.__version__, torch.version.cuda or "")
