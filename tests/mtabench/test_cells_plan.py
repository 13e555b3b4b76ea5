"""`--cells FILE`: the cells of a results file, in the place of axes."""

import csv
from pathlib import Path

import pytest
from command_line import make_runner, refused
from planted_sweeps import without_warm_up

from mtabench.problem.case import MODES
from mtabench.results.results_file import key_of, key_of_row, read_file
from mtabench.sweeps.cells_plan import any_plan
from mtabench.sweeps.plan import Options

RESULTS = Path(__file__).parents[2] / "results"
SWEEPS = [path for path in sorted(RESULTS.glob("nvidia-h200/*.csv")) if path.open().read(14) == "schema_version"]
TINY = ("--device", "cpu", "--head-dim", "16", "--heads", "2", "--seq", "16,24", "--impl", "eager,sdpa-math")
MEASURED = ("--device", "cpu", "--rounds", "1", "--no-plot")


@pytest.fixture
def mtabench(monkeypatch, capsys, tmp_path):
    """Runs the command line in an empty folder; gives the exit code, standard output and standard error."""
    without_warm_up(monkeypatch)
    return make_runner(monkeypatch, capsys, tmp_path)


@pytest.mark.parametrize("path", SWEEPS, ids=lambda path: path.stem)
def test_cells_of_committed_files_are_theirs(path):
    rows = read_file(path).rows()
    for pass_ in {"model" if row["pass"] in MODES else row["pass"] for row in rows}:
        plan = any_plan(Options(pass_, cells=path, device="cuda"), "cuda")
        of_pass = [row for row in rows if row["pass"] == pass_ or row["pass"] in MODES]
        assert sorted(map(key_of, plan.cases)) == sorted(map(key_of_row, of_pass))
        shapes = [case.shape_key for case in plan.cases]
        assert len(set(shapes)) == sum(one != before for one, before in zip(shapes, [None, *shapes], strict=False))


def test_a_file_is_measured_again_and_compared(mtabench, tmp_path):
    assert mtabench("fwd", *TINY, *MEASURED, "--conv", "2x3,none", "--op", "mta", "--out", "a.csv")[0] == 0
    code, out, _ = mtabench("fwd", "--cells", "a.csv", *MEASURED, "--out", "b.csv")
    assert code == 0
    assert "cells of  a.csv" in out
    a, b = (list(csv.DictReader((tmp_path / name).open())) for name in ("a.csv", "b.csv"))
    assert list(map(key_of_row, a)) == list(map(key_of_row, b))
    assert [row["baseline"] for row in a] == [row["baseline"] for row in b]
    assert mtabench("compare", "a.csv", "b.csv", "--threshold", "99%")[0] != 2
    code, _, _ = mtabench("fwd", "--cells", "a.csv", "--impl", "eager", *MEASURED, "--out", "c.csv")
    assert {row["impl"] for row in read_file(tmp_path / "c.csv").rows()} == {"eager"}


def test_what_is_no_file_of_such_cells_is_refused(mtabench):
    fwd = RESULTS / "nvidia-h200" / "fwd.csv"
    refused(mtabench("bwd", "--cells", fwd), "has no cell of bwd, but of fwd; give mtabench fwd --cells")
    train = RESULTS / "nvidia-h200" / "model-1b-train.csv"
    refused(mtabench("fwd", "--cells", train), "but of train; give mtabench model --cells")
    refused(mtabench("fwd", "--cells", fwd, "--seq", "1k"), "leave out --seq, or --cells")
    refused(mtabench("fwd", "--cells", fwd, "--no-causal"), "leave out --no-causal")
    refused(mtabench("decode", "--cells", fwd, "--splits", "4"), "leave out --splits")
    refused(mtabench("fwd", "--cells", fwd, "--impl", "compile"), "no cell of --impl compile; its cells are of eager, ")
    refused(mtabench("fwd", "--cells", fwd, "--baseline", "compile"), "--baseline compile is not measured")
    refused(mtabench("fwd", "--cells", "none.csv"), "there is no file none.csv")


def test_a_group_stands_for_those_of_it_that_the_file_has():
    ladder = RESULTS / "nvidia-h200" / "ladder.csv"
    of_all, of_group = (
        any_plan(Options("fwd", cells=ladder, impl=impl, device="cuda"), "cuda") for impl in (None, "ladder")
    )
    assert of_group.cases == of_all.cases


def test_a_plan_shows_what_its_cells_have():
    train = any_plan(Options("model", cells=RESULTS / "nvidia-h200" / "model-300m-train.csv"), "cuda")
    assert (train.axes["mode"], train.axes["layers"], train.axes["heads"]) == ("train", "20", "16")
    assert train.axes["steps"].endswith("; conv 6x11, conv in all layers")
    decode = any_plan(Options("decode", cells=RESULTS / "nvidia-h200" / "decode-pages.csv"), "cuda")
    assert decode.axes["heads"] == "16 on 8, 32 on 8, 64 on 8, 64 on 4"
    assert (decode.axes["batch"], decode.axes["page size"]) == ("1, 16, 64", "none, 128")


def test_cells_of_no_implementation_here_name_those_that_are(mtabench, tmp_path):
    fwd = RESULTS / "nvidia-h200" / "fwd.csv"
    (tmp_path / "theirs.csv").write_text(fwd.read_text().replace(",hopper,", ",theirs,"))
    refused(
        mtabench("fwd", "--cells", "theirs.csv", "--device", "cpu"),
        "has cells of theirs, which is no implementation here; give --impl eager,cuda-conv,",
    )
    (tmp_path / "own.csv").write_text(fwd.read_text().replace(",hopper,", ",mine:theirs,"))
    refused(mtabench("fwd", "--cells", "own.csv", "--device", "cpu"), "name its file, as --impl ./mine.py:theirs")
    (tmp_path / "heads.csv").write_text(fwd.read_text().replace(",16,16,", ",16,3,"))
    refused(mtabench("fwd", "--cells", "heads.csv", "--device", "cpu"), "3 heads cannot share 16 KV heads")


def test_processes_of_ab_find_the_file_from_other_folders(monkeypatch, tmp_path):
    from mtabench.cli import _sweep_words

    monkeypatch.chdir(tmp_path)
    assert _sweep_words(["fwd", "--cells", "a.csv"]).words[-2:] == ("--cells", str(tmp_path / "a.csv"))
    assert "--cells" not in _sweep_words(["fwd", "--seq", "16"]).words
