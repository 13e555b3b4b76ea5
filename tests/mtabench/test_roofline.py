"""Where results stand below the roofline."""

import csv
import re
from pathlib import Path

import pytest
from command_line import printed, refused
from written_runs import case, rounds, write_run

from mta_kernels.operation import Operation
from mtabench.measuring.settled import settled
from mtabench.prediction.roofline import planned_bytes, standing
from mtabench.problem.case import Case
from mtabench.profiling.tables import COUNTER_COLUMNS
from mtabench.results.results_file import key_of, read_results

RESULTS = Path(__file__).parents[2] / "results" / "nvidia-h200"
CELL = Case("fwd", "triton", Operation.of((6, 11), 64), "bf16", 4, 16, 16, 4096, 64, None, "cuda")


def test_the_roof_is_the_longer_of_work_and_bytes():
    pairs = 64 * 4096 * 4097 // 2
    one = standing(CELL, 1.0, 800.0, 4000.0)
    assert one.compute_bound
    assert one.roof_ms == pytest.approx(2 * pairs * (2 * 64 + 66) / 800e9)
    assert one.own_roof_ms == pytest.approx(2 * pairs * 7 * 64 / 800e9)
    assert one.fraction == pytest.approx(one.roof_ms)
    assert one.speedup_left == pytest.approx(1 / one.roof_ms)
    slow = standing(CELL, 1.0, 800.0, 100.0)
    assert not slow.compute_bound
    assert slow.roof_ms == pytest.approx(4 * 64 * 4096 * 64 * 2 / 100e6)
    assert slow.own_roof_ms == pytest.approx(planned_bytes(CELL) / 100e6)


def test_times_that_did_not_settle_are_marked(mtabench):
    code, out, _ = mtabench("roofline", RESULTS / "fwd.csv")
    count = sum(settled(row) is False for row in read_results(RESULTS / "fwd.csv").to_dict("records"))
    assert (code, len(re.findall(r" ~\d", out))) == (0, count)
    assert f"~ {count} of 60 times did not settle: the 95 % interval is wider than ±0.5 %" in " ".join(out.split())


def test_counted_bytes_come_before_those_of_the_plan():
    one = standing(CELL, 1.0, 1e9, 1000.0, counted_bytes=5e9)
    assert one.own_roof_ms == pytest.approx(5.0)


def table_of(out):
    return [line for line in out.splitlines() if re.search(r"[\d.]+% .*x ", line)]


def test_the_table_of_the_committed_results_agrees_with_their_own_column(mtabench, monkeypatch):
    monkeypatch.setenv("COLUMNS", "250")
    out = printed(mtabench("roofline", RESULTS / "fwd.csv"))
    assert re.search(r"matrix products \d{3} TFLOP/s from the rows", out)
    with (RESULTS / "fwd.csv").open() as results:
        rows = list(csv.DictReader(results))
    assert len(table_of(out)) == len(rows) == 60
    for line, row in zip(table_of(out), rows, strict=True):
        (share,) = re.findall(r"([\d.]+)%", line)
        assert float(share) == pytest.approx(100 * float(row["fraction_of_roofline"]), abs=0.06)
        assert float(re.findall(r"([\d.]+)x", line)[-1]) >= 1  # own left
        assert f" {row['impl']} " in line


@pytest.mark.parametrize("columns", [80, 120, 200])
def test_a_table_too_wide_for_the_terminal_leaves_out_columns_and_cuts_no_number(mtabench, monkeypatch, columns):
    monkeypatch.setenv("COLUMNS", str(columns))
    out = printed(mtabench("roofline", RESULTS / "fwd.csv", RESULTS / "hopper-bwd.csv"))
    assert "\u2026" not in out
    table = [line for line in out.splitlines() if "sdpa-" in line]
    files = (RESULTS / name for name in ("fwd.csv", "hopper-bwd.csv"))
    assert len(table) == sum(file.read_text().count(",sdpa-") for file in files)
    assert max(map(len, table)) <= columns
    assert ("left out for 80 columns: model MB" in out) == (columns == 80)
    assert "bf16, batch" not in out  # it differs, and is a column


def counters_file(path, cell, *counted):
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, COUNTER_COLUMNS)
        writer.writeheader()
        key = dict(zip(COUNTER_COLUMNS, key_of(cell), strict=False))
        for number, value in enumerate(counted):
            writer.writerow(key | {"kernel": f"k{number}", "memory_bytes": value})
    return path


def test_bytes_that_a_profiler_counted_stand_beside(mtabench, tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "250")
    (tmp_path / "profile").mkdir()
    counters_file(tmp_path / "profile" / "counters.csv", CELL, 3e8, 5e8)
    plain = table_of(mtabench("roofline", RESULTS / "fwd.csv")[1])
    words = ("roofline", RESULTS / "fwd.csv", "--profile", "profile")
    both = zip(plain, table_of(mtabench(*words)[1]), strict=True)
    (counted,) = [line.split() for before, line in both if len(line.split()) > len(before.split())]
    assert {"64", "4k", "triton", "800"} <= set(counted)
    # A kernel without a count: the table shows nothing rather than too little.
    counters_file(tmp_path / "half.csv", CELL, 3e8, "")
    assert table_of(mtabench(*words[:-1], "half.csv")[1]) == plain
    (tmp_path / "other.csv").write_text("a,b\n1,2\n")
    refused(mtabench("roofline", RESULTS / "fwd.csv", "--profile", "other.csv"), "other.csv is no file of counters")


def test_results_without_ceilings_are_not_placed(mtabench, tmp_path):
    (tmp_path / "my runs").mkdir()
    write_run(tmp_path / "my runs" / "run.csv", {case(): rounds(1.0)})
    code, out, err = mtabench("roofline", "my runs/run.csv")
    assert code == 2
    assert "not placed" in out
    assert "no cell can be placed" in err
    # That is where they are looked up: what is typed without --out would change nothing.
    assert "`mtabench env --measure --out 'my runs/ceilings.json'` measures them" in err
