"""results/README.md names every file of the main results, and none that is not there; charts are of their file."""

import csv
import re
import runpy
import zipfile
from pathlib import Path

import pytest

from mtabench.charts import stamp
from mtabench.results.results_file import find_samples
from mtabench.results.runs import read_run

RESULTS = Path(__file__).parents[1] / "results"
MAIN = RESULTS / "nvidia-h200"


def test_the_table_has_every_file():
    text = (RESULTS / "README.md").read_text()
    named = set(re.findall(r"`([\w-]+\.csv|\w+/)`", text))
    files = {path for path in MAIN.glob("*.csv") if not path.stem.endswith(".samples")}
    there = {path.name + "/" * path.is_dir() for path in MAIN.iterdir() if path.is_dir() or path in files}
    assert named == there


def test_every_run_has_its_samples_but_those_that_the_text_names():
    text = " ".join((RESULTS / "README.md").read_text().split())
    (names,) = re.findall(r"These were measured before samples were kept: (.*?)\.(?= )", text)
    without = set()
    for path in MAIN.glob("*.csv"):
        with open(path) as file:
            is_run = {"run_id", "rounds", "median_ms"} <= set(next(csv.reader(file)))
        if is_run and find_samples(path).exists():
            read_run(path)  # which checks that they are the samples of these rows
        elif is_run:
            without.add(path.name)
    assert without == set(re.findall(r"`([\w-]+\.csv)`", names))


def test_the_table_has_the_commit_of_every_file():
    for name, commit in re.findall(
        r"^\| `([\w-]+\.csv)` \| (.+?) \|", (RESULTS / "README.md").read_text(), re.MULTILINE
    ):
        if commit == "in the rows":
            continue
        with open(MAIN / name) as file:
            # Without git, MTABENCH_GIT_SHA named the commit, and nothing whether it was modified.
            measured = {(row["git_sha"], row["git_dirty"].lower() or "false") for row in csv.DictReader(file)}
        sha, modified, _ = commit.partition(", modified")
        assert measured == {(sha, "true" if modified else "false")}, name


CHARTS = sorted(path for path in MAIN.iterdir() if path.suffix == ".svg")


@pytest.mark.parametrize("chart", CHARTS, ids=lambda path: path.name)
def test_no_chart_is_older_than_its_file(chart):
    """A chart carries a stamp of the file that it was drawn from: the one with the longest name that begins its own."""
    name = max((path.stem for path in MAIN.glob("*.csv") if chart.stem.startswith(path.stem)), key=len)
    assert stamp([MAIN / f"{name}.csv"]).encode() in chart.read_bytes(), "run python scripts/draw_results.py"


@pytest.mark.parametrize("gpu", ["nvidia-h100", "nvidia-h200"])
def test_the_index_of_an_archive_has_every_file_in_order_and_its_revisions(gpu):
    revision_of = runpy.run_path(str(RESULTS.parent / "scripts/archive_results.py"))["revision_of"]
    with open(RESULTS / gpu / "archive.csv") as file, zipfile.ZipFile(RESULTS / gpu / "archive.zip") as archive:
        index = list(csv.DictReader(file))
        assert [line["file"] for line in index] == archive.namelist() == sorted(archive.namelist())
        assert {one.date_time for one in archive.infolist()} == {(1980, 1, 1, 0, 0, 0)}
        assert all(line["what"] and line["revision"] == revision_of(archive.read(line["file"])) for line in index)


def test_the_folder_stays_small():
    assert sum(path.is_file() for path in RESULTS.rglob("*")) <= 150
