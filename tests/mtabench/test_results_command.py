"""`mtabench results merge` and `select`, and files of pairs put together: nothing is lost by chance."""

import gzip

import numpy as np
import pytest
from command_line import contents, printed, refused
from paired_runs import process_rounds
from written_runs import case, rounds, write_run

from mtabench.commands import results as results_command
from mtabench.comparing.pairs import merge
from mtabench.errors import UsageError
from mtabench.results.results_file import read_file, read_results, samples_path
from mtabench.results.runs import read_run
from mtabench.results.writer import Writer

LATER = "2026-01-03T03:04:05Z"


@pytest.fixture
def files(tmp_path):
    """a.csv and b.csv, of other lengths; c.csv has one of a.csv's cells again, later, and a failure."""
    write_run(tmp_path / "a.csv", {case(64): rounds(1.0), case(128): rounds(2.0)}, run_id="a")
    write_run(tmp_path / "b.csv", {case(256): rounds(4.0), case(512): ("oom", "no room")}, run_id="b")
    write_run(tmp_path / "c.csv", {case(128): rounds(3.0)}, run_id="c", started=LATER)


def lines(path):
    return path.read_text().splitlines()[1:]


def test_merge_keeps_every_row_and_sample_as_it_was(mtabench, files, tmp_path):
    code, out, err = mtabench("results", "merge", "a.csv", "b.csv", "--out", "new/all.csv")
    assert (code, out, err) == (0, "new/all.csv: 4 cells\n", "")
    new = tmp_path / "new" / "all.csv"
    for name in ("all.csv", "all.samples.csv"):
        old = [tmp_path / name.replace("all", x) for x in "ab"]
        assert lines(new.with_name(name)) == [line for path in old for line in lines(path)]
    run = read_run(new)
    assert [len(cell.rounds) for cell in run.cells.values()] == [10, 10, 10, 0]
    assert sorted(path.name for path in new.parent.iterdir()) == ["all.csv", "all.samples.csv"]


def test_a_cell_in_two_files_is_refused_and_the_latest_taken_if_asked(mtabench, files, tmp_path):
    before = contents(tmp_path)
    words = ("results", "merge", "c.csv", "a.csv", "--out", "all.csv")
    cell = "fwd eager fp32 batch 1 heads 2 seq 128 head dim 16 conv 6x11 of some, device"
    refused(mtabench(*words), f"c.csv and a.csv both have {cell};", "--latest")
    assert contents(tmp_path) == before
    out = printed(mtabench(*words, "--latest"))
    assert "1 cell in several files: the row that started last was taken" in out
    run = read_run(tmp_path / "all.csv")
    assert {cell.row["seq"]: cell.row["run_id"] for cell in run.cells.values()} == {64: "a", 128: "c"}
    assert len(lines(tmp_path / "all.samples.csv")) == 200


def test_cells_of_other_devices_stand_side_by_side_and_are_not_compared(mtabench, files, tmp_path):
    write_run(tmp_path / "d.csv", {case(64): rounds(1.1)}, run_id="d", device="other")
    assert mtabench("results", "merge", "a.csv", "d.csv", "--out", "all.csv")[0] == 0
    assert [row["device"] for row in read_file(tmp_path / "all.csv").rows()] == ["some, device"] * 2 + ["other"]
    refused(
        mtabench("compare", "all.csv", "b.csv"),
        "conv 6x11 of several devices; take one of them",
        "'device=some* device'",
    )
    assert mtabench("results", "select", "all.csv", "--where", "device=other", "--out", "one.csv")[0] == 0
    assert mtabench("compare", "one.csv", "d.csv")[0] == 2  # they hold the same run, and can be read


def test_select_and_merge_give_the_file_back(mtabench, files, tmp_path):
    for name, where in (("x", "seq=64"), ("y", "seq!=64")):
        assert mtabench("results", "select", "a.csv", "--where", where, "--out", f"{name}.csv")[0] == 0
    assert mtabench("results", "merge", "x.csv", "y.csv", "--out", "z.csv")[0] == 0
    for name in ("", ".samples"):
        assert (tmp_path / f"z{name}.csv").read_bytes() == (tmp_path / f"a{name}.csv").read_bytes()


def test_missing_samples_are_said(mtabench, files, tmp_path):
    samples_path(tmp_path / "b.csv").unlink()
    out = printed(mtabench("results", "merge", "a.csv", "b.csv", "--out", "all.csv"))
    assert "b.csv has no b.samples.csv beside it: compare needs samples of every cell" in out
    assert len(lines(tmp_path / "all.samples.csv")) == 200


def test_files_of_pairs_keep_the_samples_of_all_their_processes(mtabench, tmp_path):
    write_run(tmp_path / "a.csv", {case(64): rounds(1.0, count=2)}, run_id="one")
    for path in (tmp_path / "a.csv", tmp_path / "a.samples.csv"):
        path.write_text(path.read_text().replace("one,", "one+two,", 1 if path.name == "a.csv" else 0))
    samples = (tmp_path / "a.samples.csv").read_text()
    (tmp_path / "a.samples.csv").write_text(samples + "".join(f"two{line[3:]}\n" for line in samples.splitlines()[1:]))
    assert mtabench("results", "select", "a.csv", "--where", "seq=64", "--out", "b.csv")[0] == 0
    assert len(lines(tmp_path / "b.samples.csv")) == 40


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("merge a.csv --out all.csv", "two results files or more"),
        ("merge a.csv ./a.csv --out all.csv", "each once"),
        ("merge a.csv b.csv", "--out"),
        ("merge a.csv b.csv --out a.csv --overwrite", "is one of the files that are read"),
        ("merge a.csv b.csv --out all.txt", "expected NAME.csv"),
        ("merge a.csv b.csv --out c.csv", "c.csv already exists; give --overwrite"),
        ("merge a.csv b.csv --out left.csv", "left.samples.csv already exists"),
        ("merge a.csv more.csv --out all.csv", "more.csv has the column 'note'"),
        ("merge a.csv spoiled.csv --out all.csv", "line 2 of spoiled.samples.csv is not a sample"),
        (
            "select a.csv --where seq=1k --out all.csv",
            "no row of a.csv has seq=1k; in the column seq they have 64, 128",
        ),
    ],
)
def test_bad_words_are_one_sentence_and_write_nothing(mtabench, files, tmp_path, words, sentence):
    (tmp_path / "left.samples.csv").write_text("precious")
    text = (tmp_path / "a.csv").read_text().replace("repro\n", "repro,note\n").replace("--causal\n", "--causal,x\n")
    (tmp_path / "more.csv").write_text(text)
    write_run(tmp_path / "spoiled.csv", {case(1024): rounds(1.0)}, run_id="s")
    samples = (tmp_path / "spoiled.samples.csv").read_text().splitlines(keepends=True)
    (tmp_path / "spoiled.samples.csv").write_text("".join([samples[0], "s,cell,1,1,nan\n", *samples[1:]]))
    before = contents(tmp_path)
    refused(mtabench("results", *words.split()), sentence)
    assert contents(tmp_path) == before


def test_select_without_where_copies_a_run_and_compresses_many_samples(mtabench, files, tmp_path, monkeypatch):
    rows, samples = (tmp_path / "a.csv").read_bytes(), (tmp_path / "a.samples.csv").read_bytes()
    monkeypatch.setattr(results_command, "MOST_PLAIN", len(samples) - 1)
    assert mtabench("results", "select", "a.csv", "--out", "new/kept.csv") == (0, "new/kept.csv: 2 cells\n", "")
    new = tmp_path / "new"
    assert sorted(path.name for path in new.iterdir()) == ["kept.csv", "kept.samples.csv.gz"]
    packed = (new / "kept.samples.csv.gz").read_bytes()
    assert (new / "kept.csv").read_bytes() == rows
    assert gzip.decompress(packed) == samples
    kept, whole = (read_run(path).cells for path in (new / "kept.csv", tmp_path / "a.csv"))
    assert [cell.processes for cell in kept.values()] == [cell.processes for cell in whole.values()]
    refused(mtabench("results", "select", "c.csv", "--out", "new/kept.csv"), "already exists")
    monkeypatch.setattr(results_command, "MOST_PLAIN", len(samples))
    assert mtabench("results", "select", "a.csv", "--out", "new/kept.csv", "--overwrite")[0] == 0
    assert sorted(path.name for path in new.iterdir()) == ["kept.csv", "kept.samples.csv"]
    assert gzip.compress(samples, mtime=0) == packed  # the same run makes the same file


@pytest.mark.parametrize("spoil", [lambda x: x[:-20], lambda x: b"no gzip", lambda x: x[:40] + b"?" + x[41:]])
def test_spoiled_compressed_samples_are_one_sentence(mtabench, files, tmp_path, spoil):
    plain = samples_path(tmp_path / "a.csv")
    (tmp_path / "a.samples.csv.gz").write_bytes(spoil(gzip.compress(plain.read_bytes())))
    plain.unlink()
    refused(mtabench("compare", "a.csv", "b.csv"), "cannot read a.samples.csv.gz: it is no whole file of gzip")


def test_a_sweep_does_not_go_on_beside_compressed_samples(files, tmp_path):
    plain = samples_path(tmp_path / "a.csv")
    (tmp_path / "a.samples.csv.gz").write_bytes(gzip.compress(plain.read_bytes()))
    plain.unlink()
    with pytest.raises(UsageError, match=r"a\.samples\.csv\.gz has the samples of .*; `gunzip` it first"):
        Writer(tmp_path / "a.csv", resume=True)
    assert not plain.exists()


CELL = case(64)
KEY = "fwd/eager/conv-attention/fp32/1/2/2/64/16/6/11/true/"


@pytest.fixture
def merged(tmp_path):
    """Writes pairs of files, base and head, each given by its cells; merges them and reads what came out."""

    def make(*pairs):
        files = []
        for number, pair in enumerate(pairs):
            paths = tuple(tmp_path / f"{side}-{number}.csv" for side in ("base", "head"))
            for path, cells in zip(paths, pair, strict=True):
                for old in (path, samples_path(path)):
                    old.unlink(missing_ok=True)
                write_run(path, cells, run_id=path.stem, started=f"2026-01-0{number + 2}T03:04:05Z")
            files.append(paths)
        out = tmp_path / "base.csv", tmp_path / "head.csv"
        notes = merge(files, *out)
        return *map(read_run, out), notes

    return make


def times(*numbers, ms=1.0):
    return [{CELL: process_rounds(ms, number)} for number in numbers]


def test_a_row_sums_up_the_samples_of_all_processes(merged, tmp_path):
    sides = times(1, 2, 3), times(4, 5, 6, ms=2.0)
    base, head, notes = merged(*zip(*sides, strict=True))
    row = head.cells[KEY].row
    assert row["run_id"] == "head-0+head-1+head-2"
    assert row["started_utc"] == "2026-01-02T03:04:05Z"
    assert (row["rounds"], row["samples"]) == (30, 300)
    samples = np.array([process[CELL] for process in sides[1]])
    assert row["median_ms"] == pytest.approx(np.median(samples), rel=1e-5)
    assert row["ci95_low_ms"] < row["median_ms"] < row["ci95_high_ms"]
    np.testing.assert_allclose(head.cells[KEY].processes, samples, rtol=1e-5)
    base, head, part = (read_results(tmp_path / f"{name}.csv").iloc[0] for name in ("base", "head", "head-0"))
    assert head["useful_tflops"] == pytest.approx(base["useful_tflops"] / 2, rel=0.01)
    assert head["gbytes_s"] * head["median_ms"] == pytest.approx(part["gbytes_s"] * part["median_ms"], rel=1e-4)
    assert notes == []


def test_a_cell_that_failed_in_one_process_has_failed(merged):
    wrong, error = {CELL: ("wrong", "error 0.5")}, {CELL: ("error", "planted")}
    base, head, _ = merged(*zip(times(1, 2, 3), [*times(4), error, wrong], strict=True))
    assert base.cells[KEY].ok
    assert head.cells[KEY].outcome == "wrong: in 1 of 3 processes: error 0.5"
    _, head, _ = merged(*zip(times(1, 2), [error, error], strict=True))
    assert head.cells[KEY].outcome == "error: planted"


def test_pairs_in_which_a_cell_is_invalid_are_left_out_and_that_is_said(merged):
    throttled = {CELL: ("invalid", "throttled")}
    base, head, notes = merged(*zip(times(1, 2, 3), [*times(4), throttled, *times(5)], strict=True))
    assert [run.cells[KEY].row["run_id"] for run in (base, head)] == ["base-0+base-2", "head-0+head-2"]
    assert [len(run.cells[KEY].processes) for run in (base, head)] == [2, 2]
    assert notes == [f"{head.cells[KEY].name}: invalid in 1 of 3 pairs, which are left out"]


def test_a_cell_without_two_good_pairs_is_invalid_on_both_sides(merged):
    throttled = {CELL: ("invalid", "throttled")}
    base, head, notes = merged(*zip(times(1, 2), [*times(4), throttled], strict=True))
    assert base.cells[KEY].outcome == "invalid: too few pairs have a time in both"
    assert head.cells[KEY].outcome == "invalid: in 1 of 2 processes: throttled"
    assert notes == []
