"""`mtabench dashboard` from the command line: the files of the site, and what it refuses."""

import json
import re
from pathlib import Path

import pytest
from command_line import printed, refused
from simulated_histories import a_year, row, sha, write

from mtabench.dashboard.data import badge

DOCUMENTATION = Path(__file__).parents[2] / "docs/dashboard.md"
FILES = [".mtabench-dashboard", "badge.json", "data.json", "index.html"]


@pytest.fixture(scope="module")
def year(tmp_path_factory):
    return a_year(tmp_path_factory.mktemp("year"))


@pytest.fixture
def site(mtabench, year, tmp_path):
    """The files of a dashboard with links, as texts by name, and what the command printed."""
    out = printed(mtabench("dashboard", year, "-o", "site", "--repo-url", "https://github.com/owner/name.git"))
    return {path.name: path.read_text() for path in (tmp_path / "site").iterdir()}, out


def test_a_site_is_static_files_and_the_command_says_what_got_slower(site):
    files, out = site
    assert sorted(files) == FILES
    assert out.splitlines() == [
        "read 40 files: 40 runs of 40 revisions, 29 cells, 1,160 rows",
        f"14 cells 5.9 % slower on average: {sha(30)}..{sha(31)}",
        f"fwd compile bf16 batch 1 heads 16 seq 2048 head dim 64 conv 6x11 5.1 % slower: {sha(0)}..{sha(39)}",
        "1 cell fails that did not before",
        "site: site/index.html",
    ]


def test_data_hold_everything_for_other_tools(site):
    data = json.loads(site[0]["data.json"])
    assert (data["format"], data["version"]) == ("mtabench-dashboard", 1)
    cells, runs = data["cells"], data["runs"]
    assert runs["git_sha"] == [sha(run) for run in range(40)]
    assert {len(column) for column in cells.values()} == {29}
    assert len(set(cells["id"])) == 29
    assert data["timelines"] == [list(range(40))]  # shared by all cells
    failing = cells["label"].index("fwd compile 8192 d64")
    history = data["histories"][failing]
    assert history["median_ms"][36:] == [None] * 4
    assert history["failed"]["36"] == ["error", "error because"]
    assert all(len(str(value).replace(".", "").lstrip("0")) <= 5 for value in history["median_ms"][:36])
    event = data["events"][0]
    assert (runs["git_sha"][event["good"]], runs["git_sha"][event["bad"]]) == (sha(30), sha(31))
    assert {data["changes"][number]["evidence"] for number in event["changes"]} == {"step"}
    assert data["counts"] == {
        "slower": 15, "maybe_slower": 0, "faster": 1, "maybe_faster": 0, "unexplained": 0, "broken": 1, "compared": 28,
    }  # fmt: skip
    assert [(one["status"], one["broken"]) for one in data["failures"]] == [("error", True), ("oom", False)]


def test_no_line_names_what_no_commit_explains(mtabench, tmp_path):
    """Between two runs of a commit triton is 9 % slower; between two commits 8 %, and plain attention 7 %."""
    plain = {"op": "attention", "impl": "sdpa-flash", "conv_q": "", "conv_k": ""}
    for run, (name, ms, plain_ms) in enumerate((("a", 1.0, 1.0), ("a", 1.09, 1.0), ("b", 1.18, 1.07))):
        rows = [row(run, ms, git_sha=sha(name)), row(run, plain_ms, git_sha=sha(name), **plain)]
        write(tmp_path / f"results/{run}.csv", rows)
    out = printed(mtabench("dashboard", "results", "-o", "site"))
    assert out.splitlines()[1:] == [
        "nothing got slower that a commit may explain",
        "2 changes to slower, probably the machine: the same commit before and after, or plain attention changed alike",
        "site: site/index.html",
    ]
    data = json.loads((tmp_path / "site/data.json").read_text())
    assert [event["unexplained"] for event in data["events"]] == [True, True]
    assert (data["counts"]["maybe_slower"], data["counts"]["unexplained"]) == (0, 2)
    assert json.loads((tmp_path / "site/badge.json").read_text())["message"] == "nothing slower"


def test_every_field_is_in_the_documentation(site):
    data = json.loads(site[0]["data.json"])
    parts = [data, data["rules"], data["read"], data["counts"], data["runs"], data["environments"][0]]
    parts += [data[name][0] for name in ("histories", "changes", "events", "failures")]
    named = set(re.findall("`([a-z0-9_]+)`", DOCUMENTATION.read_text()))
    assert set().union(*parts) <= named


@pytest.mark.parametrize(
    ("counts", "message", "colour"),
    [
        ({}, "nothing compared", "lightgrey"),
        ({"compared": 1}, "nothing slower", "brightgreen"),
        ({"maybe_slower": 2}, "2 maybe slower", "yellow"),
        ({"broken": 1}, "1 broken", "red"),
    ],
)
def test_the_badge_is_green_only_if_nothing_may_have_got_slower(counts, message, colour):
    counts = dict.fromkeys(("slower", "maybe_slower", "broken", "compared"), 0) | counts
    assert (badge(counts)["message"], badge(counts)["color"]) == (message, colour)


def test_a_site_is_written_again_but_never_over_anything_else(mtabench, year, tmp_path):
    assert mtabench("dashboard", year, "-o", "site")[0] == 0
    assert mtabench("dashboard", year, "-o", "site", "--title", "Second")[0] == 0
    assert "<title>Second</title>" in (tmp_path / "site/index.html").read_text()
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/notes.txt").write_text("mine")
    (tmp_path / "file").write_text("mine")
    (tmp_path / "link").symlink_to(tmp_path / "site")
    for out, expected in (("mine", "did not make"), ("file", "is not a folder"), ("link", "is not a folder")):
        refused(mtabench("dashboard", year, "-o", out), expected)
    assert [path.name for path in (tmp_path / "mine").iterdir()] == ["notes.txt"]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("--repo-url", "javascript:alert(1)"), "--repo-url 'javascript:alert(1)' is not an address"),
        (("--repo-url", "https://user:word@host/a"), "is not an address"),
        (("--repo-url", "https://host/a?b=<script>"), "is not an address"),
        (("--days", "999999999"), "expected 1 to 36500"),
    ],
)
def test_wrong_options_are_one_sentence_and_write_nothing(mtabench, year, tmp_path, words, expected):
    refused(mtabench("dashboard", year, "-o", "site", *words), expected)
    assert not (tmp_path / "site").exists()
