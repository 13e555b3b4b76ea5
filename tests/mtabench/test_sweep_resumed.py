"""Sweeps that go on: after Ctrl-C or a broken GPU context, with splits or rivals that were added."""

import pytest
from planted_sweeps import make_plant, raising, run, statuses, without_warm_up

from mtabench import registry
from mtabench.errors import MtabenchError
from mtabench.results.results_file import key_of, read_results
from mtabench.results.writer import Writer
from mtabench.sweeps import sweep


@pytest.fixture(autouse=True)
def ceilings(monkeypatch):
    return without_warm_up(monkeypatch)


@pytest.fixture
def plant(monkeypatch):
    return make_plant(monkeypatch)


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


def test_resume_with_nothing_left_measures_nothing(tmp_path, plant):
    path = tmp_path / "out.csv"
    plant("planted", raising(RuntimeError("once is enough"), at=16))
    run(path, "eager,planted")
    before = path.read_bytes()
    _, watcher = run(path, "eager,planted", resume=True)
    assert watcher.rows == []
    assert path.read_bytes() == before


def test_resume_measures_the_splits_that_are_missing(tmp_path, plant):
    path = tmp_path / "out.csv"
    built = []

    def change(case, closure):
        built.append(case.splits)
        return closure

    plant("planted", change, splits=True)
    run(path, "planted", pass_="decode", seq="16", splits="auto,2", baseline="planted")
    built.clear()
    _, watcher = run(path, "planted", pass_="decode", seq="16", splits="auto,1..4", baseline="planted", resume=True)
    assert [row["splits"] for row in watcher.rows] == ["1", "4"]
    assert set(built) == {"auto", 1, 4}  # the baseline takes part again, and the other splits in the file do not
    assert read_results(path)["splits"].tolist() == ["auto", "2", "1", "4"]
    assert (read_results(path)["speedup"] > 0).all()


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


def test_of_cells_that_fail_with_a_broken_context_only_the_first_gets_a_row(tmp_path, monkeypatch):
    path = tmp_path / "out.csv"
    broken = []

    def measure(cells, device, settings):
        broken.append(True)
        return {case: RuntimeError("CUDA error") for case in cells}

    monkeypatch.setattr(sweep.timing, "measure", measure)
    monkeypatch.setattr(sweep.environment, "device_works", lambda device: not broken)
    with pytest.raises(MtabenchError, match="context is broken"):
        run(path, "eager,sdpa-math", seq="16")
    assert statuses(path) == {("eager", 16): "error"}
