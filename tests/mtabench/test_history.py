"""Past commits measured in worktrees: which, in files dated as they are, and what is left out, kept and refused."""

import csv
import json
from pathlib import Path

import pytest
from command_line import make_runner, printed, refused
from paired_runs import git, make_repository, process_rounds
from written_runs import case

from mtabench.commands import history

SWEEP = ("fwd", "--impl", "eager", "--seq", "64", "--head-dim", "16", "--heads", "2", "--device", "cpu")
TIMES = ("2026-01-05T10:00:00Z", "2026-01-04T10:00:00Z", "2026-01-06T10:00:00Z", "2099-01-01T00:00:00Z")


@pytest.fixture
def repository(tmp_path, monkeypatch):
    """Four commits, the second of which has an earlier time than the first, and the last one of the future."""
    monkeypatch.setenv("GIT_COMMITTER_DATE", TIMES[0])
    folder = make_repository(tmp_path, 1)
    for number, time in enumerate(TIMES[1:], start=1):
        monkeypatch.setenv("GIT_COMMITTER_DATE", time)
        (folder / "mtabench/code.py").write_text(f"revision = {number}\n")
        git(folder, "commit", "--quiet", "--all", "--message", f"revision {number}")
    return folder


@pytest.fixture
def mtabench(monkeypatch, capsys, repository):
    monkeypatch.setattr(history, "announce", lambda *_: None)
    return make_runner(monkeypatch, capsys, repository)


def revision(folder):
    return int((folder / "mtabench/code.py").read_text().split()[-1])


def slower_since(first):
    """Results of a cell that takes 1.3 times as long since a revision."""
    return lambda folder, words, number: {case(64): process_rounds(1.3 if revision(folder) >= first else 1.0, number)}


def dates(folder):
    """When each commit was measured, as a dashboard reads it, in the order of the commits."""
    found = {}
    for path in Path("past").glob("*.csv"):
        if not path.name.endswith(".samples.csv"):
            (row,) = csv.DictReader(path.open())
            found[row["git_sha"]] = row["started_utc"]
    shas = git(folder, "log", "--reverse", "--format=%H").split()
    return [found[sha[:12]] for sha in shas if sha[:12] in found]


def test_a_dashboard_has_a_past_in_the_order_of_the_commits(mtabench, processes, repository):
    stand_in = processes(slower_since(2))
    out = printed(mtabench("history", "main", *SWEEP, "--out", "past"))
    assert "results of 4 of 4 commits: past" in out
    assert len(stand_in.calls) == 4
    found = dates(repository)
    assert found == sorted(found)
    assert found[:3] == ["2026-01-04T09:59:59Z", "2026-01-04T10:00:00Z", TIMES[2]]
    assert found[3] < "2099"
    assert len(list(Path("past").glob("*.samples.csv"))) == 4
    assert not Path("past/.processes").exists()
    assert len(git(repository, "worktree", "list").splitlines()) == 1
    assert mtabench("dashboard", "past", "--out", "site")[0] == 0
    (event,) = json.loads(Path("site/data.json").read_text())["events"]
    assert event["change"] == pytest.approx(0.3, abs=0.02)


def measured(found):
    """Results of a cell; the revision of each process goes to `found`."""
    return lambda folder, words, number: found.append(revision(folder)) or {case(64): process_rounds(1.0, number)}


def test_what_is_there_is_kept_and_another_sweep_has_other_files(mtabench, processes):
    processes(measured(found := []))
    assert mtabench("history", "HEAD~2..", *SWEEP, "--out", "past")[0] == 0
    assert mtabench("history", "main", *SWEEP, "--out", "past")[0] == 0
    assert sorted(found) == [0, 1, 2, 3]
    assert mtabench("history", "HEAD~1..", *SWEEP, "--rounds", "7", "--out", "past")[0] == 0
    assert found[4:] == [3]


@pytest.mark.parametrize(("most", "expected"), [(1, [3]), (2, [1, 3]), (3, [0, 1, 3]), (9, [0, 1, 2, 3])])
def test_the_most_are_spread_evenly_with_the_newest(mtabench, processes, most, expected):
    processes(measured(found := []))
    assert mtabench("history", "main", *SWEEP, "--most", most, "--out", "past")[0] == 0
    assert sorted(found) == expected


def test_a_commit_that_cannot_be_measured_is_left_out(mtabench, processes, repository):
    def results(folder, words, number):
        number = revision(folder)
        return (-11, "Fatal") if number == 1 else (2, "mtabench: No such option: --seq") if number == 2 else \
            {case(64): process_rounds(1.0, number)}  # fmt: skip

    processes(results)
    git(repository, "rm", "--quiet", "mtabench/__main__.py")
    git(repository, "commit", "--quiet", "--message", "no suite")
    (repository / "mtabench/__main__.py").touch()
    out = printed(mtabench("history", "main", *SWEEP, "--out", "past"))
    assert "results of 2 of 5 commits: past" in out
    assert len([line for line in out.splitlines() if "] left out: " in line]) == 3
    for words in ("was ended by SIGSEGV: Fatal", "No such option: --seq", "has no mtabench in it"):
        assert words in out
    processes(lambda *_: (2, "mtabench: No such option: --seq"))
    code, _, err = mtabench("history", "HEAD~1", *SWEEP, "--out", "nothing")
    assert (code, err) == (5, "mtabench: none of the 4 commits could be measured; see above\n")


def test_ctrl_c_keeps_what_ended_and_the_same_command_goes_on(mtabench, processes, repository):
    def results(folder, words, number):
        if number == 2:
            raise KeyboardInterrupt
        return {case(64): process_rounds(1.0, number)}

    stand_in = processes(results)
    code, _, err = mtabench("history", "main", *SWEEP, "--out", "past")
    assert code == 130
    assert err == "mtabench: stopped; past has the commits that ended, and the same command goes on\n"
    assert len(dates(repository)) == 1
    assert len(git(repository, "worktree", "list").splitlines()) == 1
    assert mtabench("history", "main", *SWEEP, "--out", "past")[0] == 0
    assert (len(stand_in.calls), len(dates(repository))) == (5, 4)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("nope..main", *SWEEP), "'nope..main' is no range of commits of"),
        (("--all", *SWEEP), "'--all' is no range of commits of"),
        (("main..HEAD~1", *SWEEP), "main..HEAD~1 has no commit; give the older one first"),
        (("main", "--most", "0", *SWEEP), "--most is 0; expected a number of commits, 1 or more"),
        (("main", *SWEEP, "--resume"), "--resume is for one sweep"),
        (("main",), "PASS"),
        (("main", "--out", "mtabench/code.py", *SWEEP), "is a file, not a folder"),
    ],
)
def test_wrong_usage_starts_nothing(mtabench, processes, repository, words, sentence):
    stand_in = processes(slower_since(9))
    refused(mtabench("history", *words, *([] if "--out" in words else ["--out", "past"])), sentence)
    assert stand_in.calls == []
    assert git(repository, "status", "--porcelain") == ""
