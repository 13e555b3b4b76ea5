"""compare --rerun-unclear: unclear cells are measured again where that is the same code on the same device."""

from pathlib import Path

import pytest
from command_line import contents, make_runner, refused
from paired_runs import git, make_repository, process_rounds
from written_runs import case, rounds, write_run

from mtabench.environment import cpu_name

UNCLEAR, SAME = case(64), case(128, splits=None)


@pytest.fixture
def repository(tmp_path):
    return make_repository(tmp_path)


@pytest.fixture
def mtabench(monkeypatch, capsys, repository):
    return make_runner(monkeypatch, capsys, repository)


@pytest.fixture
def runs(repository):
    """Writes base.csv and head.csv of both revisions on this device, one cell with much noise."""

    def write(noise=0.3, base=None, head=None):
        for number, (name, changes) in enumerate((("base", base), ("head", head))):
            sha = git(repository, "rev-parse", "--short=12", f"HEAD~{1 - number}")
            facts = {"device": cpu_name(), "git_sha": sha, "git_dirty": False} | (changes or {})
            cells = {UNCLEAR: rounds(1.0, noise=noise, seed=number), SAME: rounds(2.0, seed=number)}
            write_run(repository / f"{name}.csv", cells, run_id=name, **facts)

    return write


def one_cell(ms_of_head):
    def results(folder, words, number):
        head = "head-" in words[words.index("--out") + 1]
        return {UNCLEAR: process_rounds(ms_of_head if head else 1.0, number)}

    return results


@pytest.mark.parametrize(("head", "code", "verdict"), [(1.0, 0, "2 same"), (1.1, 1, "1 slower, 1 same")])
def test_unclear_cells_are_decided_by_pairs_of_both_revisions(
    mtabench, runs, processes, repository, head, code, verdict
):
    runs()
    before = contents(repository)
    stand_in = processes(one_cell(head))
    got, out, err = mtabench("compare", "base.csv", "head.csv", "--rerun-unclear")
    assert (got, err) == (code, "")
    assert f"{verdict}; changes below" in out
    assert "measuring 1 unclear cell again" in out
    assert stand_in.sides == [
        f"rerun1-cell1-{side}" for side in ("base", "head", "head", "base") * 2 + ("base", "head")
    ]
    assert all("--seq 64 --head-dim 16" in " ".join(words) for _, words in stand_in.calls)
    assert all("--timer cpu --cache warm --out" in " ".join(words) for _, words in stand_in.calls)
    assert contents(repository) == before
    assert len(git(repository, "worktree", "list").splitlines()) == 1


def test_nothing_is_measured_where_nothing_is_unclear(mtabench, runs, processes):
    runs(noise=0.002)
    stand_in = processes(one_cell(1.0))
    assert mtabench("compare", "base.csv", "head.csv", "--rerun-unclear")[0] == 0
    assert stand_in.calls == []
    assert not Path("mtabench-results").exists()


@pytest.mark.parametrize(
    ("base", "head", "sentence"),
    [
        ({}, {"git_dirty": True}, "head.csv cannot be measured again: it was measured with uncommitted changes"),
        ({"git_dirty": None}, {}, "base.csv cannot be measured again: it was measured with uncommitted changes"),
        ({"git_sha": ""}, {}, "base.csv cannot be measured again: its rows are of no known revisions"),
        ({"git_sha": "0123456789ab"}, {}, "the revision of base.csv, '0123456789ab' is no revision of"),
        ({"device": "other"}, {"device": "other"}, "head.csv cannot be measured again here: it was measured on other"),
    ],
)
def test_what_cannot_be_the_same_is_refused(mtabench, runs, processes, repository, base, head, sentence):
    runs(base=base, head=head)
    before = contents(repository)
    stand_in = processes(one_cell(1.0))
    refused(mtabench("compare", "base.csv", "head.csv", "--rerun-unclear", "--junit", "out.xml"), sentence)
    assert stand_in.calls == []
    assert contents(repository) == before


def test_outside_a_checkout(mtabench, runs, repository, monkeypatch):
    runs()
    monkeypatch.chdir(repository.parent)
    refused(
        mtabench("compare", "repository/base.csv", "repository/head.csv", "--rerun-unclear"), "run this in a checkout"
    )
