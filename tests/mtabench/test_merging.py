"""Files of processes in pairs, put together: one row a cell, with the samples of all its processes."""

import numpy as np
import pytest
from paired_runs import process_rounds
from written_runs import case, write_run

from mtabench.results.merging import merge
from mtabench.results.results_file import read_results, samples_path
from mtabench.results.runs import read_run

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
    assert row["useful_tflops"] == pytest.approx(base.cells[KEY].row["useful_tflops"] / 2, rel=0.01)
    assert row["gbytes_s"] * row["median_ms"] == pytest.approx(
        read_results(tmp_path / "head-0.csv").eval("gbytes_s * median_ms")[0], rel=1e-4
    )
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


def test_cells_of_one_side_and_cells_of_some_pairs(merged):
    """A cell that only the head knows, and one that was measured again in two more pairs."""
    new = case(128)
    pairs = [
        *zip(times(1, 2), [{CELL: process_rounds(1.0, n), new: process_rounds(3.0, n)} for n in (3, 4)], strict=True)
    ]
    base, head, _ = merged(*pairs, *zip(times(5, 6), times(7, 8), strict=True))
    assert list(base.cells) == [KEY]
    assert {len(cell.processes) for cell in head.cells.values()} == {2, 4}
    assert len(base.cells[KEY].processes) == 4
