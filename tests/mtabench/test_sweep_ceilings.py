"""A sweep and the ceilings of its device: kept ones, those of reading, and times beyond them."""

import pytest
from planted_sweeps import run, without_warm_up

from mta_kernels.operation import Operation
from mtabench import environment
from mtabench.commands import roofline
from mtabench.errors import MtabenchError
from mtabench.measuring import timing
from mtabench.measuring.ceilings import Ceilings
from mtabench.measuring.kept_ceilings import keep_ceilings, read_ceilings
from mtabench.problem.case import Case
from mtabench.problem.work import bytes_moved
from mtabench.results.facts import RunFacts
from mtabench.results.results_file import read_file, read_results
from mtabench.results.rows import timed_row
from mtabench.sweeps import sweep
from mtabench.sweeps.table import roof_lines


@pytest.fixture(autouse=True)
def ceilings(monkeypatch):
    return without_warm_up(monkeypatch)


def test_ceilings_kept_beside_the_file_are_not_measured_again(tmp_path, monkeypatch):
    measured = []
    monkeypatch.setattr(sweep, "measure_ceilings", lambda device, dtype: measured.append(dtype) or Ceilings(1.0, 1.0))
    kept = Ceilings(copy_gbytes_s=1e-3, matmul_tflops=1e3, read_gbytes_s=2e-3)
    keep_ceilings(tmp_path / "ceilings.json", environment.describe("cpu"), {"fp32": kept})
    plan, _ = run(tmp_path / "out.csv", "eager", seq="16", dtype="fp32,fp16")
    assert measured == ["fp16"]
    row = read_results(tmp_path / "out.csv").iloc[0]
    seconds = bytes_moved(plan.cases[0]) / (kept.copy_gbytes_s * 1e9)
    assert row["fraction_of_roofline"] == pytest.approx(1e3 * seconds / row["median_ms"], rel=1e-4)


def test_ceilings_of_a_sweep_are_kept_for_its_roofline(tmp_path, monkeypatch, capsys):
    known = Ceilings(copy_gbytes_s=2.0, matmul_tflops=0.25, read_gbytes_s=3.0)
    monkeypatch.setattr(sweep, "measure_ceilings", lambda device, dtype: known)
    run(tmp_path / "out.csv", "eager", seq="16")
    assert read_ceilings(tmp_path / "ceilings.json", environment.describe("cpu")) == {"fp32": known}
    assert roofline.run([tmp_path / "out.csv"], [], None, False) == 0
    assert "250 GFLOP/s from ceilings.json" in " ".join(capsys.readouterr().out.split())


def test_a_busy_cpu_gives_no_share_of_the_roofline_and_says_why(tmp_path, monkeypatch):
    def busy(device, dtype):
        raise MtabenchError("another job runs")

    monkeypatch.setattr(sweep, "measure_ceilings", busy)
    run(tmp_path / "out.csv", "eager", seq="16")
    (text,) = roof_lines(read_file(tmp_path / "out.csv").rows())
    assert text.startswith("no share of the roofline: another job had the cores")
    assert not (tmp_path / "ceilings.json").exists()


def test_decode_is_held_against_reading_and_the_other_passes_against_copying(tmp_path, monkeypatch):
    known = Ceilings(copy_gbytes_s=1e-3, matmul_tflops=1e3, read_gbytes_s=2e-3)
    monkeypatch.setattr(sweep, "measure_ceilings", lambda device, dtype: known)
    for pass_, rate, told in (("decode", 2e-3, 2e-3), ("fwd", 1e-3, None)):
        plan, _ = run(tmp_path / f"{pass_}.csv", "eager", seq="16", pass_=pass_)
        (row,) = read_results(tmp_path / f"{pass_}.csv").to_dict("records")
        seconds = bytes_moved(plan.cases[0]) / (rate * 1e9)
        assert row["fraction_of_roofline"] == pytest.approx(1e3 * seconds / row["median_ms"], rel=1e-4)
        assert row["read_gbytes_s"] == told or (told is None and row["read_gbytes_s"] != row["read_gbytes_s"])


def test_kept_ceilings_without_reading_are_measured_again(tmp_path, monkeypatch):
    found = Ceilings(2e-3, 2e3, read_gbytes_s=4e-3)
    monkeypatch.setattr(sweep, "measure_ceilings", lambda device, dtype: found)
    keep_ceilings(tmp_path / "ceilings.json", environment.describe("cpu"), {"fp32": Ceilings(1e-3, 1e3)})
    run(tmp_path / "out.csv", "eager", seq="16")
    assert read_ceilings(tmp_path / "ceilings.json", environment.describe("cpu")) == {"fp32": found}


def test_a_decode_as_fast_as_the_device_reads_is_valid(monkeypatch):
    """cuDNN on an H200, 16 sequences of 65536 keys: 4652 GB/s, where a copy moves 4240."""
    case = Case("decode", "sdpa-cudnn", Operation.of(None, 64), "bf16", 16, 16, 16, 65536, 64, None, "cuda")
    facts = RunFacts("a", "2026-01-02T03:04:05Z", {"device": "NVIDIA H200"})
    measurement = timing.Measurement("graph", "cold", [[0.923] * 10] * 5)
    row = timed_row(case, facts, measurement, 1e-3, Ceilings(4220.0, 784.0, 4700.0))
    assert row["gbytes_s"] == pytest.approx(4652, rel=1e-3)
    assert row["status"] == "ok"
    assert row["fraction_of_roofline"] == pytest.approx(0.99, abs=0.001)
    slow = timed_row(case, facts, measurement, 1e-3, Ceilings(3000.0, 784.0, 4200.0))
    assert (slow["status"], slow["reason"]) == (
        "invalid", "1.11 times as fast as the device's measured ceilings allow",
    )  # fmt: skip


def test_ceilings_that_cannot_be_measured_leave_their_column_empty(tmp_path, monkeypatch):
    def fail(device, dtype):
        raise RuntimeError("no room")

    monkeypatch.setattr(sweep, "measure_ceilings", fail)
    run(tmp_path / "out.csv", "eager", seq="16")
    row = read_results(tmp_path / "out.csv").iloc[0]
    assert row["status"] == "ok"
    assert row[["fraction_of_roofline"]].isna().all()
