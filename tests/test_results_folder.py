"""results/README.md names every file of the main results, and none that is not there; drawings have their file."""

import re
from pathlib import Path

RESULTS = Path(__file__).parents[1] / "results"
MAIN = RESULTS / "nvidia-h200"


def test_the_table_has_every_file():
    text = (RESULTS / "README.md").read_text()
    named = set(re.findall(r"`([\w-]+\.csv|\w+/)`", text))
    there = {path.name + "/" * path.is_dir() for path in MAIN.iterdir() if path.is_dir() or path.suffix == ".csv"}
    assert named == there


def test_links_lead_somewhere():
    for target in re.findall(r"\]\(([^)#]+)\)", (RESULTS / "README.md").read_text()):
        assert (RESULTS / target).exists(), target


def test_every_experiment_is_told_of():
    texts = [path.read_text() for path in RESULTS.parent.rglob("*.md") if ".venv" not in path.parts]
    for path in (MAIN / "experiments").iterdir():
        assert any(f"experiments/{path.name}" in text for text in texts), path.name
