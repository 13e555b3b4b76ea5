"""Two revisions measured in pairs of processes: turns, revisions, verdicts, and what is kept when it goes wrong."""

import re
from pathlib import Path

import pytest
from command_line import make_runner, printed, refused
from paired_runs import git, make_repository, process_rounds
from written_runs import case

from mtabench.commands import ab
from mtabench.results.runs import read_run

SWEEP = ("fwd", "--impl", "eager", "--seq", "64,128", "--head-dim", "16", "--heads", "2", "--device", "cpu")
CELLS = case(64), case(128)


@pytest.fixture
def repository(tmp_path):
    return make_repository(tmp_path)


@pytest.fixture
def mtabench(monkeypatch, capsys, repository):
    monkeypatch.setattr(ab, "announce", lambda *_: None)
    return make_runner(monkeypatch, capsys, repository)


def sides(base=1.0, head=1.0, noise=0.002):
    """Results of both cells, the first as long as its side says."""

    def results(folder, words, number):
        slow = head if "/head-" in words[words.index("--out") + 1] else base
        return {CELLS[0]: process_rounds(slow, number, noise), CELLS[1]: process_rounds(2.0, number + 100)}

    return results


def test_turns_and_revisions(mtabench, processes, repository):
    stand_in = processes(sides())
    out = printed(mtabench("ab", "--base", "HEAD~1", "--pairs", "3", *SWEEP, "--out", "out"))
    assert "2 same" in out
    assert "pair 3, head, the working tree (" in out
    assert stand_in.sides == ["base", "head", "head", "base", "base", "head"]
    assert all(words[: len(SWEEP)] == SWEEP for _, words in stand_in.calls)
    shas = [git(repository, "rev-parse", "--short=12", name) for name in ("HEAD~1", "HEAD")]
    for name, sha in zip(("base", "head"), shas, strict=True):
        run = read_run(repository / f"out/{name}.csv")
        assert (run.values("git_sha"), run.values("git_dirty")) == ({sha}, {"false"})
        assert {len(cell.processes) for cell in run.cells.values()} == {3}
    assert len(git(repository, "worktree", "list").splitlines()) == 1


def test_a_slower_head_fails_and_compare_says_the_same_of_the_files(mtabench, processes):
    processes(sides(head=1.05))
    reports = ("--markdown", "ab.md", "--junit", "ab.xml")
    code, out, _ = mtabench("ab", "--base", "HEAD~1", *SWEEP, "--out", "out", *reports)
    assert code == 1
    table = [line for line in out.splitlines() if line.startswith("eager ")]
    assert (table[0].split()[1], table[0].endswith("  slower")) == ("64", True)
    assert "1 slower, 1 same" in Path("ab.md").read_text()
    code, again, _ = mtabench("compare", "out/base.csv", "out/head.csv")
    assert code == 1
    assert [line for line in again.splitlines() if line.startswith("eager ")] == table


def test_a_dirty_working_tree_is_measured_as_it_is(mtabench, processes, repository):
    (repository / "mtabench/code.py").write_text("revision = 2\n")
    stand_in = processes(sides())
    out = printed(mtabench("ab", "--base", "HEAD", "--pairs", "2", *SWEEP, "--out", "out"))
    assert "with uncommitted changes), measured as it is" in out
    assert {folder for folder, _ in stand_in.calls} > {repository}
    assert read_run(Path("out/head.csv")).values("git_dirty") == {"true"}


def test_unclear_cells_are_measured_again(mtabench, processes):
    """The first pairs are noisy; the rerun's pairs are not, and are of the unclear cell alone."""

    def results(folder, words, number):
        head = "head-" in words[words.index("--out") + 1]
        if number <= 4:
            return {CELLS[0]: process_rounds(1.0 + 0.2 * (number == 4), number), CELLS[1]: process_rounds(2.0, number)}
        return {CELLS[0]: process_rounds(1.3 if head else 1.0, number)}

    stand_in = processes(results)
    words = ("ab", "--base", "HEAD~1", "--pairs", "2", *SWEEP, "--rounds", "7", "--rerun-unclear")
    code, out, _ = mtabench(*words, "--out", "out")
    assert "measuring 1 unclear cell again, 1 of at most 2 times" in out
    again = [" ".join(words) for _, words in stand_in.calls[4:]]
    assert all(" --seq 64 " in words and " --rounds 7 " in words for words in again)
    run = read_run(Path("out/head.csv"))
    assert sorted(len(cell.processes) for cell in run.cells.values())[0] == 2
    assert len(run.cells["fwd/eager/conv-attention/fp32/1/2/2/64/16/6/11/true/"].processes) == 2 + len(again) // 2
    assert len(again) in (4, 8)
    assert code in (0, 1)


def test_what_stays_unclear_is_measured_no_more_than_twice(mtabench, processes):
    numbers = iter(range(10**6))
    stand_in = processes(lambda *_: {CELLS[0]: process_rounds(1 + 0.1 * (next(numbers) % 3), 1)})
    words = ("ab", "--base", "HEAD~1", "--pairs", "2", *SWEEP, "--rerun-unclear", "--fail-on", "slower,unclear")
    code, out, _ = mtabench(*words, "--out", "out")
    assert code == 3
    assert "2 of at most 2 times" in out
    assert len(stand_in.calls) == 4 + 2 * 4


@pytest.mark.parametrize(
    ("result", "code", "sentence"),
    [
        ((2, "mtabench: No such option: --seq"), 2, "HEAD~1 .* cannot run `mtabench fwd .*`: No such option: --seq"),
        (
            (-11, "Fatal"),
            1,
            "a process of base, HEAD~1 .* was ended by SIGSEGV: Fatal; .* with --isolate a crash costs",
        ),
        ((1, "mtabench: the GPU's context is broken"), 1, "ended with exit code 1: the GPU's context is broken"),
    ],
)
def test_a_process_that_fails_is_one_sentence(mtabench, processes, repository, result, code, sentence):
    processes(lambda *_: result)
    got, _, err = mtabench("ab", "--base", "HEAD~1", *SWEEP, "--out", "out")
    assert (got, len(err.splitlines())) == (code, 1)
    assert re.search(sentence, err), err
    assert Path("out").exists() == (code != 2)
    assert len(git(repository, "worktree", "list").splitlines()) == 1


def test_a_process_of_another_revision_is_refused(mtabench, processes, monkeypatch):
    monkeypatch.setattr("paired_runs.git_state", lambda folder: ("0123456789ab", False))
    processes(sides())
    code, _, err = mtabench("ab", "--base", "HEAD~1", *SWEEP, "--out", "out")
    assert (code, len(err.splitlines())) == (1, 1)
    assert "measured another revision, 0123456789ab; is another mtabench found before" in err


def test_ctrl_c_keeps_what_ended(mtabench, processes, repository):
    def results(folder, words, number):
        if number == 3:
            raise KeyboardInterrupt
        return sides()(folder, words, number)

    processes(results)
    code, _, err = mtabench("ab", "--base", "HEAD~1", *SWEEP, "--out", "out")
    assert (code, err.splitlines()) == (130, ["mtabench: stopped; the processes that ended are kept in out/processes"])
    assert {path.name for path in Path("out/processes").glob("*-0?.csv")} == {"base-01.csv", "head-01.csv"}
    assert len(git(repository, "worktree", "list").splitlines()) == 1


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("--base", "HEAD~9", *SWEEP), "--base 'HEAD~9' is no revision of"),
        (("--base", "HEAD", "--head", "nope", *SWEEP), "--head 'nope' is no revision of"),
        (SWEEP, "--base"),
        (("--base", "HEAD"), "PASS"),
        (("--base", "HEAD", "--seq", "64", "fwd"), "'--seq' is no pass; expected fwd, bwd, decode or model"),
        (("--base", "HEAD", "fwd", "--sequence", "64"), "No such option: --sequence"),
        (("--base", "HEAD", "fwd", "--seq", "many"), "--seq"),
        (("--base", "HEAD", "fwd", "--resume"), "--resume is for one sweep"),
        (("--base", "HEAD", "fwd", "--plot"), "--plot is for one sweep"),
        (("--base", "HEAD", "--pairs", "1", *SWEEP), "--pairs is 1; it must be 2 or more"),
        (("--base", "HEAD", "--threshold", "2", *SWEEP), "expected a percentage"),
        (("--base", "HEAD", "--junit", "out/base.csv", "--out", "out", *SWEEP), "is one of the files that are read"),
        (("--base", "HEAD", "--junit", "mtabench/code.py/x", *SWEEP), "cannot write"),
        (("--base", "HEAD", "--out", "mtabench", *SWEEP), "mtabench already exists; give another --out"),
        (("--base", "HEAD", "--out", "mtabench/code.py/x", *SWEEP), "is a file, not a folder"),
    ],
)
def test_wrong_usage_starts_nothing(mtabench, processes, repository, words, sentence):
    stand_in = processes(sides())
    refused(mtabench("ab", *words), sentence)
    assert stand_in.calls == []
    assert git(repository, "status", "--porcelain") == ""
    assert not (repository / "out").exists()


def test_a_dry_run_touches_nothing(mtabench, processes, repository):
    stand_in = processes(sides())
    out = printed(mtabench("ab", "--base", "HEAD~1", *SWEEP, "--dry-run", "--out", "out"))
    assert "dry run: nothing was measured; the results would go to out" in out
    assert stand_in.calls == []
    refused(
        mtabench("ab", "--base", "HEAD~1", *SWEEP, "--dry-run", "--out", "/proc/nowhere/out"), "/proc takes no file"
    )
    assert git(repository, "status", "--porcelain") == ""
