"""What a sweep writes: its columns, samples and splits, and the command that measures a cell again."""

import csv

import pytest
import torch
from planted_sweeps import TIME_COLUMNS, make_plant, run, without_warm_up
from typer.main import get_command

from mtabench.cli import app
from mtabench.results.results_file import read_results, samples_path
from mtabench.sweeps import sweep
from mtabench.sweeps.plan import Options, make_plan
from mtabench.sweeps.settings import make_settings, measuring_words


@pytest.fixture(autouse=True)
def ceilings(monkeypatch):
    return without_warm_up(monkeypatch)


@pytest.fixture
def plant(monkeypatch):
    return make_plant(monkeypatch)


@pytest.mark.parametrize("pass_", ["fwd", "bwd", "decode"])
def test_a_sweep_fills_its_columns(tmp_path, monkeypatch, ceilings, pass_):
    path = tmp_path / "out.csv"
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


def test_the_repro_line_says_how_it_was_measured(tmp_path):
    given = {"cache": "warm", "timer": "cpu", "rounds": 1}
    plan, _ = run(tmp_path / "out.csv", "eager", seq="16", **given)
    row = read_results(tmp_path / "out.csv").iloc[0]
    assert row["repro"] == f"{plan.cases[0].repro()} --timer cpu --cache warm --rounds 1 --seed {plan.seed}"


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


def test_another_seed_is_drawn_each_time():
    plans = [make_plan(Options("fwd", device="cpu", seed=seed)) for seed in (None, None, 3)]
    assert plans[0].seed != plans[1].seed
    assert plans[2].seed == 3


def test_every_sample_is_kept(tmp_path):
    path = tmp_path / "out.csv"
    run(path, "eager", seq="16")
    with samples_path(path).open() as file:
        samples = list(csv.DictReader(file))
    table = read_results(path)
    assert len(samples) == table["samples"][0] == 6
    assert {sample["run_id"] for sample in samples} == set(table["run_id"])
    times = sorted(float(sample["ms"]) for sample in samples)
    assert table["median_ms"][0] == pytest.approx((times[2] + times[3]) / 2, rel=1e-4)


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


def test_the_baselines_auto_is_what_speedups_refer_to(tmp_path, plant):
    path = tmp_path / "out.csv"
    plant("planted", lambda case, closure: closure, splits=True)
    run(path, "eager,planted", pass_="decode", seq="16", splits="2,auto", baseline="planted")
    table = read_results(path)
    assert table.set_index("splits").loc["auto", "speedup"] == 1
    assert set(table["baseline"]) == {"planted"}
    auto_ms = table.loc[table["splits"] == "auto", "median_ms"].item()
    assert table["speedup"].tolist() == pytest.approx((auto_ms / table["median_ms"]).tolist(), rel=1e-4)
