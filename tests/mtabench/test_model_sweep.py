"""`mtabench model`: its plan, what it finds wrong, its rows, and the commands that read them."""

import re
import shlex
from dataclasses import replace
from functools import partial

import pytest
import torch
from command_line import printed, refused
from planted_sweeps import Watcher, without_warm_up

from mta_kernels.multi_token_attention import MultiTokenAttention
from mtabench.cli import app
from mtabench.implementations import models
from mtabench.measuring.failures import WrongResultError
from mtabench.measuring.timing import Settings
from mtabench.problem.case import Case
from mtabench.results.results_file import read_results
from mtabench.results.rows import add_speedups
from mtabench.results.writer import Writer
from mtabench.sweeps import sweep
from mtabench.sweeps.cells_plan import any_plan
from mtabench.sweeps.plan import Options
from mtabench.transformer import cache, model, shared
from mtabench.transformer.problem import ModelProblem, Training

SMALL = {"layers": "4", "heads": "2", "dim": "32", "seq": "12", "batch": "2", "conv": "3x5"}
WORDS = shlex.split("--layers 3 --heads 2 --dim 32 --seq 16 --batch 2 --conv 3x5 --device cpu")


def plan_of(**typed):
    return any_plan(Options("model", device="cpu", seed=7, **(SMALL | typed)), "cpu")


@pytest.fixture(autouse=True)
def few_words(monkeypatch):
    """A vocabulary that takes no time."""
    monkeypatch.setattr(shared, "VOCABULARY", 64)


def test_the_plan_has_the_plain_model_once_and_each_attention_by_each_implementation():
    plan = plan_of(mode="train,prefill", impl="plain,compile,auto")
    found = [(case.pass_, case.impl, case.op, case.conv_every) for case in plan.cases]
    others = [("conv-attention", 1), ("conv-attention", 4), ("mta", 4)]
    assert found == [
        ("train", "plain", "attention", None),
        *(("train", impl, *other) for other in others for impl in ("compile", "auto")),
        ("prefill", "plain", "attention", None),
        *(("prefill", "auto", *other) for other in others),
    ]
    assert plan.baseline == "plain"
    assert {(case.layers, case.heads, case.head_dim, case.conv.taps) for case in plan.cases if case.conv_every} == {
        (4, 2, 16, (3, 5))
    }
    presets = any_plan(Options("model", preset="mta-300m,mta-1b", impl="auto"), "cuda").cases
    assert {(case.layers, case.heads, case.head_dim) for case in presets} == {(20, 16, 64), (24, 16, 128)}
    assert any_plan(Options("fwd", seq="64"), "cpu").pass_ == "fwd"


@pytest.mark.parametrize("attention", ["conv", "conv/4", "mta/4", "mta", "mix"])
def test_a_cell_is_told_by_its_columns_and_by_its_command_line(attention):
    for case in plan_of(mode="train,prefill,generate", impl="plain,auto", attention=attention).cases:
        assert Case.of_row(case.columns, "cpu") == case
        words = shlex.split(case.repro())
        assert words[:2] == ["mtabench", "model"]
        import typer

        typed = typer.main.get_command(app).commands["model"].make_context("model", words[2:]).params
        given = {name: typed[name] for name in (*SMALL, "mode", "attention", "impl", "dtype")}
        assert case in plan_of(**given).cases


@pytest.mark.parametrize(
    ("mode", "attention"),
    [("train", "conv/4"), ("train", "mta/4"), ("prefill", "mta/4"), ("generate", "mta/4")],
)
@pytest.mark.usefixtures("without_interpreter")
def test_right_attention_passes_and_wrong_attention_does_not(mode, attention, monkeypatch):
    (case,) = plan_of(mode=mode, impl="auto", attention=attention).cases
    problem = ModelProblem(case, 3)
    check = problem.check(case)
    assert check.ok
    assert check.rel_error < 1e-5
    given = MultiTokenAttention.mixers

    def shifted(module):
        found = given(module)
        if module.backend == "auto" and "pre_conv" in found:
            found["pre_conv"] = found["pre_conv"].roll(1, -1)
        return found

    monkeypatch.setattr(MultiTokenAttention, "mixers", shifted)
    wrong = problem.check(case)
    assert not wrong.ok
    assert "differs from the eager model in float64" in wrong.reason


@pytest.mark.usefixtures("without_interpreter")
def test_compiled_parts_take_all_lengths_and_layouts_of_a_cell(monkeypatch):
    """torch.compile refuses a function's ninth variant: several lengths, outputs of attention of two layouts."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))  # takes no time, counts the same
    parts, attend, make = shared.compiled_parts.__wrapped__(), model.plain_attention, shared.Shared.model

    def as_of_cudnn(q, k, v):
        return attend(q, k, v).transpose(1, 2).contiguous().transpose(1, 2)

    def made(*arguments, **options):
        found = make(*arguments, **options)
        found.parts = parts
        return found

    monkeypatch.setattr(shared.Shared, "model", made)
    monkeypatch.setattr(cache, "plain_attention", as_of_cudnn)
    monkeypatch.setattr(model, "plain_attention", as_of_cudnn)
    (case,) = plan_of(mode="generate", impl="auto", attention="conv/4", seq="512", batch="3").cases
    problem = ModelProblem(case, 3)
    assert problem.check(case).ok
    assert problem.timed(case)


def test_a_gradient_that_is_lost_is_found(monkeypatch):
    (case,) = plan_of(impl="auto", attention="conv/4").cases
    problem, build = ModelProblem(case, 3), models.build

    def scaled(case, weights, **options):
        model = build(case, weights, **options)
        attend = model.parts.attention
        half = lambda module, q, k, v: attend(module, q, 0.5 * k + 0.5 * k.detach(), v)  # noqa: E731
        model.parts = replace(model.parts, attention=half)
        return model

    entry = replace(models.ENTRIES[-1], build=lambda case, weights: scaled(case, weights, backend="auto"))
    monkeypatch.setattr("mtabench.transformer.problem.implementation_of", lambda case: entry)
    wrong = problem.check(case)
    assert not wrong.ok
    assert "the gradient of" in wrong.reason


def test_another_loss_after_some_steps_is_wrong(monkeypatch):
    cases = plan_of(impl="eager,compile", attention="conv/4").cases
    problem = ModelProblem(cases[0], 3)
    first = problem.timed(cases[0]).loss
    monkeypatch.setattr(Training, "loss_after", lambda training, steps: 1.02 * first)
    with pytest.raises(WrongResultError, match=r"the loss after 8 steps is .* with eager"):
        problem.timed(cases[1])


def test_a_sweep_fills_the_columns_of_models(tmp_path, monkeypatch):
    without_warm_up(monkeypatch)
    plan = plan_of(mode="train,prefill", impl="plain,eager", attention="mta/4", layers="3", seq="16")
    with Writer(tmp_path / "x.csv", resume=False, command="") as writer:
        statuses = sweep.run(plan, writer, Settings(min_rounds=1, max_rounds=1, samples_per_round=1), Watcher())
    assert statuses == {"ok": 4}
    rows = read_results(tmp_path / "x.csv")
    assert (rows["layers"] == "3").all()
    assert list(rows["conv_every"]) == ["", "4"] * 2
    assert (rows["baseline"] == "plain").all()
    plain_ms = rows["median_ms"].iloc[[0, 0, 2, 2]].to_numpy()
    assert (rows["speedup"] - plain_ms / rows["median_ms"]).abs().max() < 1e-3
    of_a_call = 32  # two sequences of 16
    assert (rows["tokens_s"] * rows["median_ms"] / 1e3 / of_a_call - 1).abs().max() < 1e-3
    shares = rows["attention_share"].dropna()  # empty where a busy CPU took longer for attention alone
    assert len(shares)
    assert shares.between(0, 1, inclusive="right").all()
    assert list(rows["loss"] > 0) == [True] * 2 + [False] * 2
    assert (rows["rel_error"] < 1e-5).all()


def test_a_speedup_is_over_the_plain_model_or_over_the_same_attention():
    for baseline, expected in (("plain", [1, 1 / 2, 1 / 3, 1 / 4, 1 / 5]), ("eager", [None, 1, 2 / 3, 1, 4 / 5])):
        plan = plan_of(impl="plain,eager,auto", attention="conv,mta/4", baseline=baseline)
        rows = {case: {"status": "ok", "median_ms": float(n)} for n, case in enumerate(plan.cases, 1)}
        add_speedups(rows, plan.is_baseline)
        assert [row.get("speedup") for row in rows.values()] == expected


def test_a_timed_call_that_is_wrong_is_found():
    (case,) = plan_of(mode="generate", impl="eager", attention="conv/4").cases
    timed = ModelProblem(case, 3).timed(case)
    training = ModelProblem(replace(case, pass_="train"), 3).timed(replace(case, pass_="train"))
    for one, wrong, says in (
        (timed, lambda result: result.roll(1), "differ from those of the first"),
        (training, lambda result: result * float("nan"), "not finite"),
    ):
        one.watch.look([one.run(None)])
        one.watch.end(judged=True)
        one.watch.look([wrong(one.run(None))])
        with pytest.raises(WrongResultError, match=says):
            one.watch.end(judged=True)
    assert training.confirm() == ""


@pytest.mark.slow
def test_the_command_and_those_that_read_its_file(mtabench, tmp_path):
    more = ("--impl", "plain,eager", "--attention", "conv", "--rounds", "1", "--time-limit", "5", "--no-plot")
    code, out, error = mtabench("model", *WORDS, *more, "--out", "a.csv")
    assert (code, error) == (0, "")
    assert "conv every" not in error
    out = printed(mtabench("show", "a.csv"))
    assert "tokens/s" in out
    assert "3 layers" in out
    assert mtabench("plot", "a.csv", "--kind", "overhead", "--formats", "svg", "--out", "charts")[0] == 0
    assert (tmp_path / "charts/train-overhead.svg").exists()
    assert mtabench("report", "a.csv")[0] == 0
    finding = r"Training step: eager (takes|is) [^<]* as (long|fast) as plain"
    assert re.search(finding, (tmp_path / "a-report.html").read_text())


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("--mode", "fwd"), "there is no mode 'fwd'; expected one or more of train, prefill, generate"),
        (("--attention", "mix/4"), "--attention cannot read 'mix/4'; expected conv, conv/4"),
        (("--attention", "conv,conv/1"), "names one attention twice"),
        (("--attention", "conv/8"), "convolves layer 5 first, and the model has 3"),
        (("--impl", "triton"), "--impl triton is a kernel; models run by plain, eager"),
        (("--impl", "compile", "--mode", "prefill"), "--impl compile has the modes train alone"),
        (("--preset", "mta-1b"), "--layers is part of --preset mta-1b; give one of the two"),
        (("--dim", "40"), "--dim 40 with --heads 2 is 20 a head; expected a multiple of 16"),
        (("--conv", "6x11,3x3"), "names 3 convolutions; a sweep of models takes one"),
        (("--timer", "graph"), "--timer graph measures on a GPU"),
        (("--baseline", "eager", "--impl", "plain,auto"), "--baseline eager is not measured in this sweep"),
        (("--cell-timeout", "5"), "--cell-timeout needs --isolate"),
    ],
)
def test_bad_input_is_one_sentence(mtabench, words, sentence):
    refused(mtabench("model", *WORDS, *words), sentence)


def test_what_is_missing_of_a_model_is_told(mtabench):
    refused(mtabench("model", "--layers", "3"), "--heads is missing; a model is --layers, --heads and --dim")
    refused(
        mtabench("fwd", "--impl", "plain"), "--impl plain runs whole models: `mtabench model --impl plain` measures it"
    )
