"""results/README.md names every file of the main results, and none that is not there; charts are of their file."""

import csv
import re
from pathlib import Path

import pytest

RESULTS = Path(__file__).parents[1] / "results"
MAIN = RESULTS / "nvidia-h200"


def test_the_table_has_every_file():
    text = (RESULTS / "README.md").read_text()
    named = set(re.findall(r"`([\w-]+\.csv|\w+/)`", text))
    there = {path.name + "/" * path.is_dir() for path in MAIN.iterdir() if path.is_dir() or path.suffix == ".csv"}
    assert named == there


def test_the_table_has_the_commit_of_every_file():
    for name, commit in re.findall(
        r"^\| `([\w-]+\.csv)` \| (.+?) \|", (RESULTS / "README.md").read_text(), re.MULTILINE
    ):
        if commit == "in the rows":
            continue
        with open(MAIN / name) as file:
            measured = {(row["git_sha"], row["git_dirty"].lower()) for row in csv.DictReader(file)}
        sha, modified, _ = commit.partition(", modified")
        assert measured == {(sha, "true" if modified else "false")}, name


@pytest.mark.parametrize("chart", sorted(MAIN.glob("*.svg")), ids=lambda path: path.stem)
def test_no_chart_is_older_than_its_file(chart):
    """A chart of sweeps says below which commits were measured: those of the file with the longest matching name."""
    name = max((path.stem for path in MAIN.glob("*.csv") if chart.stem.startswith(path.stem)), key=len)
    if name == "toy-all":
        pytest.skip("it is no chart of sweeps and names no commit")
    (drawn,) = set(re.findall(r"<!-- .*\bgit (.*?) -->", chart.read_text()))
    with open(MAIN / f"{name}.csv") as file:
        measured = {row["git_sha"][:9] for row in csv.DictReader(file) if row["git_sha"]}
    assert set(re.findall(r"\b[0-9a-f]{9}\b", drawn)) == measured
    assert chart.with_suffix(".png").exists()


def test_every_experiment_is_told_of():
    texts = [path.read_text() for path in RESULTS.parent.rglob("*.md") if ".venv" not in path.parts]
    for path in (MAIN / "experiments").iterdir():
        assert any(f"experiments/{path.name}" in text for text in texts), path.name
