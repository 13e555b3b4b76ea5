"""A machine's own noise: what is counted, the smallest change that is found, and the command."""

import csv
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from command_line import make_runner
from paired_runs import process_rounds
from written_runs import case

from mtabench.commands import noise as noise_command
from mtabench.comparing.compare import judge
from mtabench.comparing.inference import by_pairs, paired_ratios, pooled
from mtabench.comparing.noise import find_noise

CELLS = case(64), case(128)
SWEEP = ("fwd", "--impl", "eager", "--seq", "64,128", "--head-dim", "16", "--heads", "2", "--device", "cpu")
THRESHOLD = 0.02


def side(count, offset, cells=12, seed=0):
    """Samples by cell, process and round; each process of each cell has an offset of its own."""
    generator = np.random.default_rng(seed)
    offsets = generator.normal(0, offset, (cells, count, 1, 1))
    return np.exp(offsets + generator.normal(0, 0.005, (cells, count, 5, 10))).tolist()


def test_a_quiet_machine_has_no_false_alarms_and_sees_little_more_than_the_threshold():
    found = find_noise(side(4, 0.0005), side(4, 0.0005, seed=1), pairs=5, threshold=THRESHOLD)
    assert (found.single.any, found.paired.any) == (0, 0)
    assert found.single.comparisons == 8 * 7
    assert found.paired.comparisons == 2**4
    assert (found.smallest_change > THRESHOLD).all()
    assert (found.smallest_change < 1.5 * THRESHOLD).all()
    assert np.median(found.pair_noise) == pytest.approx(0.0015, rel=0.5)


def test_processes_that_differ_fail_compare_and_not_ab():
    found = find_noise(side(5, 0.03), side(5, 0.03, seed=1), pairs=5, threshold=THRESHOLD)
    assert found.single.any > 0.9 * found.single.comparisons
    assert found.paired.any <= 0.1 * found.paired.comparisons
    assert sum(found.single.cells) > found.single.any
    assert (found.smallest_change > 0.07).all()


def test_of_many_pairs_comparisons_of_some_are_drawn_the_same_each_time():
    many = side(12, 0.01), side(12, 0.01, seed=1)
    found = find_noise(*many, pairs=5, threshold=THRESHOLD)
    assert found.paired.comparisons == 1000
    assert find_noise(*many, pairs=5, threshold=THRESHOLD).paired == found.paired


@pytest.mark.parametrize("threshold", [0.001, 0.02])
def test_the_smallest_change_is_found_in_95_percent(threshold):
    """Planted in fresh comparisons of five pairs of the same noise, in the last of 12 cells."""
    generator, cells, offset = np.random.default_rng(5), 12, 0.003

    def processes(count):
        return np.exp(generator.normal(0, offset, (cells, count, 1, 1))).tolist()

    change = find_noise(processes(40), processes(40), 5, threshold).smallest_change.mean()
    found, comparisons = 0, 400
    for _ in range(comparisons):
        estimates = pooled(by_pairs(processes(5), processes(5)))
        planted = estimates.values + np.log1p(change) * (np.arange(cells) == cells - 1)
        found += judge(paired_ratios(replace(estimates, values=planted)), threshold)[-1] == "slower"
    assert found / comparisons == pytest.approx(0.95, abs=0.03)


@pytest.fixture
def mtabench(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(noise_command, "announce", lambda *_: None)
    return make_runner(monkeypatch, capsys, tmp_path)


def test_the_command_prints_and_writes_a_line_a_cell(mtabench, processes):
    stand_in = processes(lambda folder, words, number: {cell: process_rounds(1.0, number) for cell in CELLS})
    code, out, err = mtabench("noise", "--pairs", "3", *SWEEP, "--out", "noise.csv")
    assert (code, err) == (0, "")
    assert stand_in.sides == ["base", "head", "head", "base", "base", "head"]
    assert len({folder for folder, _ in stand_in.calls}) == 1
    assert "ab, 3 of 3 pairs with either process of each as the base: 0 of 8 (0.0 %) had any" in out
    assert "in all pairings: 0 of 30 (0.0 %) had any" in out
    with Path("noise.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["seq"] for row in rows] == ["64", "128"]
    for row in rows:
        assert (row["pairs"], row["ab_pairs"], row["ab_false_alarms"]) == ("3", "3", "0")
        assert 0 < float(row["pair_noise"]) < 0.01 < float(row["smallest_change"])
        assert row["device"] == "some, device"
    assert len(list(Path("noise-processes").glob("*-0?.csv"))) == 6


def test_a_terminal_of_80_columns_has_whole_names_and_numbers(mtabench, processes, monkeypatch):
    processes(lambda folder, words, number: {cell: process_rounds(1.0, number, 0.1) for cell in CELLS})
    monkeypatch.setenv("COLUMNS", "80")
    out = mtabench("noise", "--pairs", "2", *SWEEP, "--out", "noise.csv")[1]
    assert "all cells: fwd, fp32, batch 1, heads 2, head dim 16, conv 6x11" in out.splitlines()
    assert len([line for line in out.splitlines() if line.startswith("eager ")]) == len(CELLS)
    assert max(map(len, out.splitlines())) <= 80
    assert "times did not settle: the 95 % interval is wider than ±0.5 %" in out


def test_cells_without_a_time_in_every_process_are_named(mtabench, processes):
    def results(folder, words, number):
        return {CELLS[0]: process_rounds(1.0, number), CELLS[1]: ("oom", "no room") if number == 2 else
                process_rounds(2.0, number)}  # fmt: skip

    processes(results)
    code, out, _ = mtabench("noise", "--pairs", "2", *SWEEP, "--out", "noise.csv")
    assert code == 0
    assert "seq 128 head dim 16 conv 6x11: not every process has a time (oom: no room)" in out
    assert len(Path("noise.csv").read_text().splitlines()) == 2
    processes(lambda *_: {cell: ("oom", "no room") for cell in CELLS})
    code, _, err = mtabench("noise", "--pairs", "2", *SWEEP, "--out", "none.csv")
    assert (code, len(err.splitlines())) == (1, 1)
    assert "no cell has a time in every process" in err
    assert not Path("none.csv").exists()


def test_what_ended_before_it_was_stopped_is_kept(mtabench, processes):
    def stopped(folder, words, number):
        if number == 4:
            raise KeyboardInterrupt
        return {cell: process_rounds(1.0, number) for cell in CELLS[: 1 if number == 3 else 2]}

    processes(stopped)
    code, _, err = mtabench("noise", "--pairs", "3", *SWEEP, "--out", "noise.csv")
    assert (code, "the processes that ended are kept in noise-processes" in err) == (130, True)
    before = {path: path.read_text() for path in Path("noise-processes").glob("*-01.csv")}
    again = processes(lambda folder, words, number: {cell: process_rounds(1.0, 9 + number) for cell in CELLS})
    code, out, err = mtabench("noise", "--pairs", "3", *SWEEP, "--out", "noise.csv", "--resume")
    assert (code, err) == (0, "")
    assert out.count(": kept") == 2
    assert again.sides == ["head", "base", "base", "head"]  # the third process had measured one cell of two
    assert len(before) == 2
    assert before.items() <= {path: path.read_text() for path in Path("noise-processes").glob("*.csv")}.items()
    with Path("noise.csv").open() as file:
        assert [row["pairs"] for row in csv.DictReader(file)] == ["3", "3"]


def test_a_measurement_that_ended_can_get_more_pairs(mtabench, processes):
    measured = processes(lambda folder, words, number: {cell: process_rounds(1.0, number) for cell in CELLS})
    words = ("noise", *SWEEP, "--out", "noise.csv", "--resume", "--pairs")
    assert mtabench(*words, "2")[0] == 0
    first = Path("noise.csv").read_text()
    code, out, err = mtabench(*words, "2")
    assert (code, err, out.count(": kept")) == (0, "", 4)
    assert Path("noise.csv").read_text() == first
    assert len(measured.sides) == 4
    assert mtabench(*words, "3")[0] == 0
    assert len(measured.sides) == 6
    with Path("noise.csv").open() as file:
        assert [row["pairs"] for row in csv.DictReader(file)] == ["3", "3"]
    assert mtabench("noise", *SWEEP, "--out", "noise.csv")[0] == 2  # not without --resume


def test_processes_of_other_code_are_no_noise(mtabench, processes):
    processes(lambda folder, words, number: {cell: process_rounds(1.0, number) for cell in CELLS})
    assert mtabench("noise", "--pairs", "2", *SWEEP, "--out", "noise.csv")[0] == 0
    Path("noise.csv").unlink()
    one = Path("noise-processes/base-02.csv")
    one.write_text(one.read_text().replace("some, device", "another, device"))
    code, _, err = mtabench("noise", "--pairs", "2", *SWEEP, "--out", "noise.csv", "--resume")
    assert (code, len(err.splitlines())) == (1, 1)
    assert "noise-processes differ in device: another, device, some, device" in err
    assert not Path("noise.csv").exists()


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("--pairs", "1", *SWEEP), "--pairs is 1; it must be 2 or more"),
        (("--threshold", "5", *SWEEP), "expected a percentage"),
        (("--out", "there.csv", *SWEEP), "there.csv already exists; give another --out"),
        (("--out", "/proc/nowhere.csv", *SWEEP, "--dry-run"), "/proc takes no file"),
        (("--out", "old.csv", *SWEEP), "old-processes already exists; give another --out, or --resume"),
        (("--resume", *SWEEP), "give its --out"),
        (("--resume", "--out", "there.csv", *SWEEP), "there.csv already exists; give another --out"),
        (("forward",), "'forward' is no pass"),
        (("fwd", "--timer", "sundial"), "--timer 'sundial' is not known"),
        ((), "PASS"),
    ],
)
def test_wrong_usage_starts_nothing(mtabench, processes, words, sentence):
    Path("there.csv").write_text("mine")
    Path("old-processes").mkdir()
    stand_in = processes(lambda *_: {})
    code, _, err = mtabench("noise", *words)
    assert (code, len(err.splitlines())) == (2, 1), err
    assert sentence in err
    assert stand_in.calls == []
    assert Path("there.csv").read_text() == "mine"
