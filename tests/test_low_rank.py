"""scripts/low_rank.py: ranks of its convolutions, the identity at first, models that do not touch, its table."""

import importlib
import sys
import time
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest
import torch
from training_scripts import assert_kept, assert_refused, command_line, names_of, without_interpreter  # noqa: F401

SCRIPTS = Path(__file__).parents[1] / "scripts"
MODULES = ("low_rank_task.models", "low_rank_task.training", "low_rank_task.chart", "low_rank")


@pytest.fixture(scope="module")
def study():
    """The names of the script and of its modules."""
    return names_of(*MODULES)


@pytest.fixture
def trainer(study):
    """Makes a trainer of these models of the toy task."""
    return lambda members, **more: study.SideBySide(replace(study.TASKS["cpu"][0], **more), members, "cpu")


@pytest.fixture
def command(study, monkeypatch, capsys):
    """Runs the command line on a text of its own; gives the exit code, standard output and standard error."""
    text = torch.randint(97, 123, (1000,), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    monkeypatch.setattr(sys.modules["low_rank_task.training"], "read_text", lambda root: text)

    return command_line(study, monkeypatch, capsys, "low_rank.py", "--device", "cpu")


def members_of(study, *ranks, rate=3.0):
    return [study.Member(3, 0, rank, rate if rank else 0.0) for rank in ranks]


def train(trainer, task, steps=3):
    batches = importlib.import_module("low_rank_task.training").data(task, trainer.streams, "cpu")[0]
    for _ in range(steps):
        trainer.step(torch.stack([next(stream) for stream in batches]), 1e-2)


def test_all_start_as_plain_attention_and_every_factor_has_a_gradient_of_its_own(study, trainer):
    made = trainer(members_of(study, *study.RANKS))
    weights = made.model.weights()
    assert weights.shape == (5, 2, 2, 6, 11)
    identity = torch.zeros(6, 11)
    identity[5, 5] = 1
    torch.testing.assert_close(weights, identity.expand_as(weights), atol=1e-6, rtol=0)
    weights.backward(torch.randn_like(weights))
    for parameter in (made.model.u, made.model.v):
        for index, rank in enumerate(study.RANKS):
            own = parameter.grad[index].norm(dim=-1)
            count = 0 if rank in (study.PLAIN, study.FULL) else rank
            assert (own[..., :count] > 1e-3).all()
            assert (own[..., count:] == 0).all()
    rank_three = made.model.v.grad[3]
    assert (rank_three[..., 0, :] - rank_three[..., 1, :]).norm(dim=-1).min() > 1e-3


def test_weights_are_float32_under_autocast(study, trainer):
    made = trainer(members_of(study, *study.RANKS))
    expected = made.model.weights()
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(made.model.weights(), expected)


def test_the_step_compiles_as_one_graph(study, trainer):
    eager, compiled = (trainer(members_of(study, 2, 6), layers=1) for _ in range(2))
    compiled.trained = torch.compile(compiled.model, fullgraph=True, backend="aot_eager")
    for made in (eager, compiled):
        train(made, made.task, steps=1)
    torch.testing.assert_close(compiled.loss, eager.loss)
    torch.testing.assert_close(compiled.model.weights(), eager.model.weights())


def test_trained_weights_have_their_rank(study, trainer):
    made = trainer(members_of(study, *study.RANKS))
    before = made.model.weights().detach()
    train(made, made.task)
    values = torch.linalg.svdvals(made.model.weights().detach())
    for own, rank in zip(values, study.RANKS, strict=True):
        assert ((own > 1e-5).sum(-1) == max(rank, 1)).all()
    assert torch.equal(made.model.weights()[0], before[0])


def test_models_side_by_side_train_as_alone(study, trainer):
    members = [study.Member(3, 0, 2, 3.0), study.Member(5, 1, study.FULL, 10.0), study.Member(3, 1, 1, 1.0)]
    together, alone = trainer(members), trainer(members[:1])
    for made in (together, alone):
        train(made, made.task)
    torch.testing.assert_close(together.loss[0], alone.loss[0])
    for name, parameter in alone.model.named_parameters():
        torch.testing.assert_close(dict(together.model.named_parameters())[name][:1], parameter, atol=1e-5, rtol=1e-4)


def test_a_rate_is_how_far_convolutions_move(study, trainer):
    members = [study.Member(3, 0, study.FULL, rate) for rate in (1.0, 10.0)]
    made = trainer(members)
    before = made.model.weights().detach()
    train(made, made.task, steps=1)
    moved = (made.model.weights().detach() - before).abs().amax((1, 2, 3, 4))
    torch.testing.assert_close(moved, torch.tensor([1e-2, 1e-1]), rtol=1e-3, atol=0)  # Adam's first step


def test_truncation_is_the_nearest_weight_of_its_rank(study):
    weights = torch.randn(2, 6, 11, generator=torch.Generator().manual_seed(0))
    values = torch.linalg.svdvals(weights)
    for rank in (1, 2, 3, 6):
        cut = study.truncated(weights, rank)
        assert (torch.linalg.matrix_rank(cut) == rank).all()
        torch.testing.assert_close((weights - cut).square().sum((1, 2)), values[:, rank:].square().sum(1))


@pytest.mark.parametrize("query", [3, 4, 5])
def test_toy_sequences_have_queries_of_so_many_letters(study, query):
    task = study.toy(4, width=16, heads=2, layers=1, batch=8, steps=1, learning_rate=1e-3, held_out=8)
    drawn = study.toy_sequences(task, 50, query, torch.Generator().manual_seed(1)).tolist()
    for tokens in drawn:
        assert len(tokens) == task.seq
        start = 5 - query
        blocks = [tokens[start + 6 * i : start + 6 * i + 5] for i in range(4)]
        letters, answer = tokens[start + 24 : -5], tokens[-5:]
        assert len(set(letters)) == query
        assert [block for block in blocks if set(letters) <= set(block)] == [answer]


def test_a_run_writes_rows_and_a_chart(study, command, monkeypatch, tmp_path):
    monkeypatch.setattr(sys.modules["low_rank_task.training"], "EVALUATIONS", 2)
    path = tmp_path / "new" / "x.csv"
    code, out, error = command("--seeds", 2, "--rates", "3", "--limit", 600, "--out", path)
    assert code == 0, error
    rows = pd.read_csv(path)
    assert tuple(rows.columns) == study.COLUMNS
    whole, cut = rows[rows["truncated"].isna()], rows[rows["truncated"].notna()]
    kinds = len(study.RANKS)
    assert whole.groupby("task", sort=False).size().to_dict() == {"toy": 3 * 2 * kinds * 2, "text": 2 * kinds * 2}
    assert cut.groupby("task", sort=False).size().to_dict() == {"toy": 3 * 2 * 3, "text": 2 * 3}
    assert set(cut["rank"]) == {study.FULL}
    values = whole["singular_values"].dropna()
    assert len(values) == 4 * 2
    assert all(len(head.split()) == 6 for cell in values for head in cell.split(";"))
    empty = ["singular_values", "truncated", "driver", "cuda", "triton", "git_sha", "git_dirty"]  # as on a CPU
    assert not whole.drop(columns=empty).isna().any().any()
    for suffix in (".csv", ".png", ".svg"):
        assert str(path.with_suffix(suffix)) in out
        assert path.with_suffix(suffix).stat().st_size > 1000


def test_time_that_is_up_leaves_one_step(study):
    task = study.TASKS["cpu"][0]
    rows = list(study.train(task, members_of(study, 1), "cpu", time.perf_counter()))
    assert [(row["steps"], row["step"]) for row in rows] == [(1, 1)]


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("--tasks", "toy,image"), "there is no task 'image'; expected some of toy,text"),
        (("--rates", "1,fast"), "--rates is '1,fast'; expected numbers, as 1,3,10"),
        (("--rates", "0"), "--rates is 0 and --seeds 3; expected numbers above zero"),
        (("--seeds", "0"), "--seeds 0; expected numbers above zero"),
        (("--device", "tpu"), "there is no device 'tpu'; expected auto, cuda or cpu"),
    ],
)
def test_bad_input_is_one_sentence(command, tmp_path, words, sentence):
    assert_refused(command, tmp_path, words, sentence)


def test_results_that_are_there_stay(command, tmp_path):
    assert_kept(command, tmp_path)


@pytest.mark.gpu
@pytest.mark.slow
def test_a_captured_step_trains_as_an_eager_one(study):
    members = members_of(study, *study.RANKS)
    task = replace(study.TASKS["cuda"][0], layers=2, batch=8)
    captured, eager = (study.SideBySide(task, members, "cuda") for _ in range(2))
    eager.trained = eager.model
    captured.capture()
    batch = next(study.toy_batches(task, 3, 0, "cuda"))[None]
    for _ in range(10):
        for trainer in (captured, eager):
            trainer.step(batch, 1e-3)
    torch.testing.assert_close(captured.loss, eager.loss, atol=0.1, rtol=0)
