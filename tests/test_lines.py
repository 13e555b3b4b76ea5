"""The size of each part against its budget in pyproject.toml, which only falls."""

import subprocess
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
BUDGET = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["mtabench"]["budget"]
SLACK = 300  # below the budget; then it is lowered
PARTS = {
    "mtabench": ("mtabench", b"\n"),
    "kernels": ("kernels", b"\n"),
    "tests": ("tests", b"\n"),
    "words": ("*.md", None),  # of all documents
}


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="needs a git checkout: only tracked files count")
@pytest.mark.parametrize("part", PARTS)
def test_the_budget_holds_and_falls(part):
    pattern, end = PARTS[part]
    listed = subprocess.run(["git", "ls-files", "-z", pattern], cwd=ROOT, capture_output=True, check=True).stdout
    texts = [path.read_bytes() for name in listed.split(b"\0")[:-1] if (path := ROOT / name.decode()).is_file()]
    count = sum(text.count(end) if end else len(text.split()) for text in texts)
    budget = BUDGET[part]
    assert count <= budget, f"{part} has {count}, {count - budget} more than its budget; remove what is superfluous"
    assert count >= budget - SLACK, f"{part} has only {count}: lower its budget in pyproject.toml from {budget}"
