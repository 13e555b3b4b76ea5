"""A sweep: what it writes, cells that get no time, going on after a stop, and the ceilings of its device."""

import pytest
import torch
from planted_sweeps import TIME_COLUMNS, make_plant, raising, run, statuses, without_warm_up
from typer.main import get_command

from mta_kernels.operation import Operation
from mtabench import environment, registry
from mtabench.cli import app
from mtabench.errors import MtabenchError
from mtabench.measuring import timing
from mtabench.measuring.ceilings import Ceilings, keep_ceilings
from mtabench.problem.case import Case
from mtabench.problem.work import bytes_moved
from mtabench.results.results_file import key_of, read_file, read_results, samples_path
from mtabench.results.rows import RunFacts, timed_row
from mtabench.results.writer import Writer
from mtabench.sweeps import sweep
from mtabench.sweeps.plan import Options, make_plan
from mtabench.sweeps.settings import make_settings, measuring_words
from mtabench.sweeps.table import roof_lines


@pytest.fixture(autouse=True)
def ceilings(monkeypatch):
    return without_warm_up(monkeypatch)


@pytest.fixture
def plant(monkeypatch):
    return make_plant(monkeypatch)


@pytest.mark.parametrize("pass_", ["fwd", "bwd", "decode"])
def test_a_sweep_fills_its_columns(tmp_path, monkeypatch, ceilings, pass_):
    path = tmp_path / "out.csv"
    if pass_ == "fwd":  # measured, which takes seconds
        monkeypatch.setattr(sweep, "measure_ceilings", ceilings)
    plan, _ = run(path, "eager,sdpa-math", pass_=pass_, kv_heads="1")
    table = read_results(path)
    assert (table["status"] == "ok").all(), table["reason"].tolist()
    assert len(table) == len(plan.cases) == 4
    assert "nan" not in path.read_text().lower().replace("nanoseconds", "")
    positive = [name for name in TIME_COLUMNS if name != "speedup"]
    assert (table[positive] > 0).all(axis=None)
    assert (table["p10_ms"] <= table["median_ms"]).all()
    assert (table["median_ms"] <= table["p90_ms"]).all()
    assert (table["rounds"] == 2).all()
    assert (table["rel_error"] < 1e-4).all()
    rival, yardstick = table[table["impl"] == "eager"], table[table["impl"] == "sdpa-math"]
    assert rival["baseline"].tolist() == ["eager"] * 2
    assert rival["speedup"].tolist() == [1.0, 1.0]
    assert yardstick["baseline"].tolist() == ["", ""]
    assert yardstick["speedup"].isna().all()
    assert (table["splits"] == "").all()
    assert (table["splits_used"] == "").all()
    assert set(table["timer"]) == {"cpu"}
    assert set(table["torch"]) == {torch.__version__}
    assert table["run_id"].nunique() == 1
    assert (table["device"] != "").all()
    assert table["started_utc"].str.fullmatch(r"20\d\d-\d\d-\d\dT\d\d:\d\d:\d\dZ").all()
    assert table["repro"].tolist() == [f"{case.repro()} --seed {plan.seed}" for case in plan.cases]


def test_the_options_of_the_repro_line_measure_as_those_given():
    typed = {"timer": "cpu", "rounds": 3, "time_limit": 2.5, "isolate": True, "cell_timeout": 90.0, "seed": 7}
    for options in ({}, {"rounds": 200, "time_limit": 10.0}, typed):
        plan = make_plan(Options("fwd", device="cpu", **options))
        settings = make_settings(plan)
        words = measuring_words(plan.options)
        parsed = get_command(app).commands["fwd"].make_context("fwd", [*words]).params
        again = make_plan(Options("fwd", device="cpu", **{name: parsed[name] for name in typed}))
        assert make_settings(again) == settings
        assert (again.options.isolate, again.options.cell_timeout) == (plan.options.isolate, plan.options.cell_timeout)
        assert again.seed == plan.seed
        assert (words[:-2] != []) == (options is typed)


def splitting(case, closure):
    """An implementation whose output is wrong with 3 splits and which cannot take 4."""
    if case.splits == 4:
        raise RuntimeError("too many")
    return (lambda: closure() * 1.01) if case.splits == 3 else closure


def test_splits_are_cells_of_their_own(tmp_path, plant):
    path = tmp_path / "out.csv"
    plant("planted", splitting, splits=True)
    plan, _ = run(path, "eager,planted,sdpa-math", pass_="decode", seq="16", splits="auto,2..4:+1")
    table = read_results(path)
    assert len(table) == len(plan.cases) == 6
    assert set(zip(table["impl"], table["splits"], table["splits_used"], table["status"], strict=True)) == {
        ("eager", "", "", "ok"),
        ("planted", "auto", "7", "ok"),
        ("planted", "2", "2", "ok"),
        ("planted", "3", "3", "wrong"),
        ("planted", "4", "", "error"),
        ("sdpa-math", "", "", "ok"),
    }
    eager_ms = table.loc[table["impl"] == "eager", "median_ms"].item()
    timed = table[table["splits"].isin(["auto", "2"])]
    assert timed["speedup"].tolist() == pytest.approx((eager_ms / timed["median_ms"]).tolist(), rel=1e-4)
    assert set(timed["repro"].str.extract(r" --splits (\w+) --seed ")[0]) == {"auto", "2"}


LAST = torch.tensor([15])


@pytest.mark.parametrize(
    ("pass_", "spoil"),
    [
        ("fwd", lambda out: out * 1.001),
        ("bwd", lambda out: out * torch.ones_like(out).index_fill_(3, LAST, float("nan"))),
        ("decode", lambda out: out.roll(1, dims=1)),
    ],
    ids=["a little too large", "nan", "heads mixed up"],
)
def test_a_wrong_kernel_gets_no_time(tmp_path, plant, pass_, spoil):
    path = tmp_path / "out.csv"
    plant("planted", lambda case, closure: lambda: spoil(closure()))
    run(path, "eager,planted", pass_=pass_, seq="32")
    table = read_results(path).set_index("impl")
    assert table["status"].to_dict() == {"eager": "ok", "planted": "wrong"}
    assert table.loc["planted", TIME_COLUMNS].isna().all()
    assert table.loc["planted", "timer"] == ""
    assert table.loc["planted", "reason"]
    assert "planted" not in samples_path(path).read_text()


@pytest.mark.parametrize(
    ("error", "status", "reason"),
    [
        (RuntimeError("bad launch\nwith a long story"), "error", "RuntimeError: bad launch"),
        (NotImplementedError(), "error", "NotImplementedError"),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 8 GiB"), "oom", "Tried to allocate 8 GiB"),
        (MemoryError(), "oom", "out of memory"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried"), "oom", "can't allocate memory"),
    ],
)
def test_an_implementation_that_raises_is_a_row(tmp_path, plant, error, status, reason):
    path = tmp_path / "out.csv"
    plant("planted", raising(error, at=16))
    run(path, "planted,eager")
    assert statuses(path) == {
        ("planted", 16): status, ("eager", 16): "ok", ("planted", 32): "ok", ("eager", 32): "ok",
    }  # fmt: skip
    row = read_results(path).iloc[0]
    assert reason in row["reason"]
    assert "long story" not in row["reason"]
    assert "\n" not in row["reason"]


def test_unsupported_cells_say_why(tmp_path, plant):
    path = tmp_path / "out.csv"
    plant("planted", lambda case, closure: closure, passes=("fwd",))
    run(path, "planted,triton,sdpa-cudnn,eager", pass_="bwd", seq="16")
    table = read_results(path).set_index("impl")
    assert table["status"].to_dict() == {
        "planted": "unsupported", "triton": "unsupported", "sdpa-cudnn": "unsupported", "eager": "ok",
    }  # fmt: skip
    assert "no bwd pass" in table.loc["planted", "reason"]
    assert (table.loc[["planted", "triton", "sdpa-cudnn"], "reason"] != "").all()


def test_what_cannot_fit_into_a_cpus_memory_is_not_tried(tmp_path, plant, monkeypatch):
    path = tmp_path / "out.csv"
    monkeypatch.setattr(environment, "available_memory_bytes", lambda device: 2**20)
    plant("planted", raising(AssertionError("this was to be left alone"), at=4096))
    run(path, "planted", seq="16,4096")
    assert statuses(path) == {("planted", 16): "ok", ("planted", 4096): "oom"}
    assert "GiB" in read_results(path)["reason"][1]


def test_a_throttled_or_impossible_time_is_invalid_and_gives_no_speedup(tmp_path, monkeypatch):
    path = tmp_path / "out.csv"
    measure = sweep.timing.measure

    def throttled(cells, device, settings):
        found = measure(cells, device, settings)
        for case, measurement in found.items():
            measurement.throttled = case.impl == "eager"
        return found

    monkeypatch.setattr(sweep.timing, "measure", throttled)
    run(path, "eager,sdpa-math", seq="16")
    table = read_results(path).set_index("impl")
    assert table["status"].to_dict() == {"eager": "invalid", "sdpa-math": "ok"}
    assert "throttled" in table.loc["eager", "reason"]
    assert table["throttled"].to_dict() == {"eager": "true", "sdpa-math": "false"}
    assert table["speedup"].isna().all()


def test_ctrl_c_keeps_what_ended_and_resume_does_the_rest(tmp_path, plant, monkeypatch):
    path = tmp_path / "out.csv"
    plant("planted", raising(KeyboardInterrupt(), at=32))
    with pytest.raises(sweep.SweepInterruptedError) as caught:
        run(path, "eager,planted", seq="16,32,48")
    assert caught.value.exit_code == 130
    assert f"2 of 6 cells in {path}" in str(caught.value)
    assert "--resume" in str(caught.value)
    kept = path.read_bytes()
    assert set(statuses(path)) == {("eager", 16), ("planted", 16)}
    assert not list(tmp_path.glob(".*.lock"))

    monkeypatch.setattr(registry, "IMPLEMENTATIONS", registry.IMPLEMENTATIONS[:-1])
    plant("planted", lambda case, closure: closure)
    plan, watcher = run(path, "eager,planted", seq="16,32,48", resume=True)
    assert path.read_bytes().startswith(kept)
    assert len(watcher.rows) == 4
    with Writer(path, resume=True) as writer:
        assert list(writer.done) == [key_of(case) for case in plan.cases]
    assert read_results(path)["run_id"].nunique() == 2


def test_a_rival_added_later_is_timed_beside_its_baseline(tmp_path, plant):
    path = tmp_path / "out.csv"
    run(path, "eager", seq="16")
    calls = []

    def change(case, closure):
        calls.append(case)
        return closure

    plant("planted", change)
    _, watcher = run(path, "eager,planted", seq="16", resume=True)
    assert [row["impl"] for row in watcher.rows] == ["planted"]
    table = read_results(path)
    assert table["impl"].tolist() == ["eager", "planted"]
    assert table["speedup"][1] > 0
    assert table["speedup"][1] * table["median_ms"][1] != pytest.approx(table["median_ms"][0], rel=1e-5)


def test_a_broken_gpu_context_ends_the_sweep_with_what_was_measured(tmp_path, plant, monkeypatch):
    path = tmp_path / "out.csv"
    broken = []

    def change(case, closure):
        def call():
            if case.seq == 32:
                broken.append(case)
                raise RuntimeError("CUDA error: an illegal memory access was encountered")
            return closure()

        return call

    plant("planted", change)
    monkeypatch.setattr(sweep.environment, "device_works", lambda device: not broken)
    with pytest.raises(MtabenchError, match=r"context is broken.*seq 32.*--resume") as caught:
        run(path, "planted,eager", seq="16,32,48")
    assert caught.value.exit_code == 1
    assert statuses(path) == {("planted", 16): "ok", ("eager", 16): "ok", ("planted", 32): "error"}
    broken.clear()
    run(path, "planted,eager", seq="16,32,48", resume=True)
    assert len(statuses(path)) == 6


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


def test_a_busy_cpu_gives_no_share_of_the_roofline_and_says_why(tmp_path, monkeypatch):
    def busy(device, dtype):
        raise MtabenchError("another job runs")

    monkeypatch.setattr(sweep, "measure_ceilings", busy)
    run(tmp_path / "out.csv", "eager", seq="16")
    (text,) = roof_lines(read_file(tmp_path / "out.csv").rows())
    assert text.startswith("no share of the roofline: another job had the cores")
    assert not (tmp_path / "ceilings.json").exists()


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
