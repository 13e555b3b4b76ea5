"""Cells of a sweep that are wrong, raise, do not fit or cannot be believed: each a row, none with a time."""

import pytest
import torch
from planted_sweeps import TIME_COLUMNS, make_plant, raising, run, statuses, without_warm_up

from mtabench import environment
from mtabench.results.results_file import read_results, samples_path
from mtabench.sweeps import sweep

LAST = torch.tensor([15])


@pytest.fixture(autouse=True)
def ceilings(monkeypatch):
    return without_warm_up(monkeypatch)


@pytest.fixture
def plant(monkeypatch):
    return make_plant(monkeypatch)


@pytest.mark.parametrize("pass_", ["fwd", "bwd", "decode"])
@pytest.mark.parametrize(
    "spoil",
    [
        pytest.param(lambda out: out * 1.001, id="a little too large"),
        pytest.param(lambda out: out * torch.ones_like(out).index_fill_(3, LAST, float("nan")), id="nan"),
        pytest.param(lambda out: out.roll(1, dims=1), id="heads mixed up"),
    ],
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


def test_a_wrong_baseline_gives_no_speedup(tmp_path, plant):
    plant("planted", lambda case, closure: lambda: closure() * 1.01)
    run(tmp_path / "out.csv", "planted,eager", baseline="planted")
    table = read_results(tmp_path / "out.csv").set_index("impl")
    assert table.loc["eager", "speedup"].isna().all()
    assert set(table.loc["eager", "baseline"]) == {""}


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


def test_an_implementation_that_raises_while_timed_is_a_row(tmp_path, plant):
    path = tmp_path / "out.csv"
    calls = []

    def change(case, closure):
        def call():
            calls.append(case)
            if len(calls) > 2:
                raise RuntimeError("tired")
            return closure()

        return call

    plant("planted", change)
    run(path, "planted,eager", seq="16")
    assert statuses(path) == {("planted", 16): "error", ("eager", 16): "ok"}
    assert read_results(path)["median_ms"].isna().tolist() == [True, False]


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


def test_a_check_that_has_no_room_is_a_row(tmp_path, monkeypatch):
    path = tmp_path / "out.csv"

    def no_room(case, inputs, seed):
        raise torch.OutOfMemoryError("no room")

    monkeypatch.setattr(sweep, "Judge", no_room)
    run(path, "eager,sdpa-math", seq="16")
    assert set(statuses(path).values()) == {"oom"}


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
