"""Sweeps whose cells run in processes of their own: a crash, a hang or an error costs one row."""

import os
import signal
from unittest.mock import Mock

import planted_cells
import pytest

from mtabench import registry
from mtabench.measuring.timing import Settings
from mtabench.results.results_file import read_results, samples_path
from mtabench.results.writer import Writer
from mtabench.sweeps import measuring_process, this_process
from mtabench.sweeps.plan import Options, make_plan
from mtabench.sweeps.sweep import SweepInterruptedError

pytestmark = pytest.mark.slow

QUICK = Settings(min_rounds=2, max_rounds=2, samples_per_round=3)


@pytest.fixture(autouse=True)
def planted(monkeypatch):
    monkeypatch.setattr(registry, "IMPLEMENTATIONS", planted_cells.implementations())
    monkeypatch.setattr(measuring_process, "measure_group", planted_cells.measure_group)


def run(path, impl, resume=False, doing=None, **options):
    shape = {"seq": "16", "head_dim": "16", "heads": "2", "conv": "3x3", "dtype": "fp32", "device": "cpu"}
    plan = make_plan(Options("fwd", impl=impl, isolate=True, **(shape | options)))
    watcher = Mock(**{"doing.side_effect": doing})
    with Writer(path, resume=resume) as writer:
        statuses = this_process.run_isolated(plan, writer, QUICK, watcher)
    assert sum(statuses.values()) == watcher.ended.call_count
    return plan, watcher


def test_a_crash_costs_one_row(tmp_path):
    path = tmp_path / "out.csv"
    plan, watcher = run(path, "crashes,wrong,triton,eager")
    table = read_results(path).set_index("impl")
    expected = {"eager": "ok", "crashes": "error", "wrong": "wrong", "triton": "unsupported"}
    assert table["status"].to_dict() == expected
    assert table.index[0] == "eager"  # the baseline comes first, so that the others have their speedups
    assert table.loc["crashes", "reason"] == "its process was ended by SIGSEGV; last step: verifying"
    assert table.loc["eager", "speedup"] == 1
    assert table["run_id"].nunique() == 1
    assert table["repro"].str.contains(" --isolate ").all()
    assert (table.loc["eager", ["median_ms", "fraction_of_roofline"]] > 0).all()
    assert table.loc["crashes", ["median_ms", "speedup"]].isna().all()
    assert len(samples_path(path).read_text().splitlines()) == 1 + 6
    assert watcher.ended.call_count == len(plan.cases)
    assert sum("measuring what the device can do" in call.args[0] for call in watcher.doing.call_args_list) == 1


def test_a_hang_is_a_timeout(tmp_path):
    path = tmp_path / "out.csv"
    run(path, "hangs", cell_timeout=6)
    row = read_results(path).iloc[0]
    assert row["status"] == "timeout"
    assert row["reason"].startswith("stopped after 6 s; last step: ")


def test_ctrl_c_keeps_what_ended_and_resume_does_the_rest(tmp_path):
    path = tmp_path / "out.csv"
    with pytest.raises(SweepInterruptedError, match=r"1 of 3 cells.*--resume"):
        run(path, "hangs,twin,eager", doing=lambda text: "hangs" in text and os.kill(os.getpid(), signal.SIGINT))
    kept = path.read_bytes()
    _, watcher = run(path, "twin,eager", resume=True)
    assert path.read_bytes().startswith(kept)
    assert [call.args[0]["impl"] for call in watcher.ended.call_args_list] == ["twin"]
    eager, twin = read_results(path).itertuples()
    assert twin.baseline == "eager"
    assert twin.speedup == pytest.approx(eager.median_ms / twin.median_ms, rel=1e-4)
