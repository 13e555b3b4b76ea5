"""The toy task: sequences checked in plain Python, the model, its step, a short run by the command line, bad input."""

import sys

import pandas as pd
import pytest
import torch
from training_scripts import command_line, names_of, without_interpreter  # noqa: F401

MODULES = ("toy_task.sequences", "toy_task.model", "toy_task.training", "toy_task.chart", "train_toy")
TINY = ("--device", "cpu", "--blocks", "2", "--batch", "16", "--seeds", "1")


@pytest.fixture(scope="module")
def toy():
    """The names of the script and of its modules."""
    return names_of(*MODULES)


@pytest.fixture
def command(toy, monkeypatch, capsys, tmp_path):
    """Runs the command line in an empty folder; gives the exit code, standard output and standard error."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys.modules["toy_task.training"], "HELD_OUT", 32)
    return command_line(toy, monkeypatch, capsys, "train_toy.py")


@pytest.mark.parametrize("variant", ["all", "first", "last"])
@pytest.mark.parametrize("blocks", [1, 30])
def test_one_block_alone_answers_the_query(toy, variant, blocks):
    drawn = toy.draw_sequences(300, blocks, variant, torch.Generator().manual_seed(1)).tolist()
    places = set()
    for tokens in drawn:
        context, query, answer = tokens[: blocks * 6], tokens[blocks * 6 : blocks * 6 + 2], tokens[blocks * 6 + 2 :]
        letters = [context[i : i + 5] for i in range(0, blocks * 6, 6)]
        assert context[5::6] == [toy.MARK] * (blocks - 1) + [toy.QUERY_MARK]
        assert all(len(set(block)) == 5 and set(block) <= set(range(26)) for block in letters)
        assert len(set(query)) == 2
        (place,) = (i for i, block in enumerate(letters) if set(query) <= set(block))
        places.add(place)
        assert answer == {"all": letters[place], "first": letters[place][:1], "last": letters[place][-1:]}[variant]
    assert len(places) == blocks


@pytest.fixture
def setting(toy):
    """Makes a setting of three blocks."""
    return lambda attention="conv", seed=3: toy.Setting(attention, seed, "all", **toy.SIZES["cpu"] | {"blocks": 3})


def test_rivals_differ_in_their_own_weights_alone_and_convolutions_start_as_the_identity(toy, setting):
    models = {}
    for attention in ("plain", "conv", "mta", "mta-eager"):
        torch.manual_seed(3)
        models[attention] = toy.Transformer(setting(attention))
    plain, conv, fused, eager = (dict(model.named_parameters()) for model in models.values())
    assert set(conv) - set(plain) == {f"layers.{i}.attention.conv.weight" for i in range(toy.SIZES["cpu"]["layers"])}
    assert all(torch.equal(parameter, x[name]) for name, parameter in plain.items() for x in (conv, fused))
    tokens = toy.draw_sequences(4, 3, "all", torch.Generator().manual_seed(1))[:, :-1]
    torch.testing.assert_close(models["conv"](tokens), models["plain"](tokens))
    assert {name.split(".mta.")[1] for name in set(fused) - set(plain)} == {
        "mta_kernel", "mta_kernel_after_sm", "wpsm.weight", "head_kernel", "subln.weight", "gate.weight", "gate.bias",
    }  # fmt: skip
    assert all(torch.equal(parameter, eager[name]) for name, parameter in fused.items())
    for layer in models["mta"].layers:
        assert torch.equal(layer.attention.mta.wpsm.weight, torch.eye(setting().heads))
    assert [models[name].layers[0].attention.mta.backend for name in ("mta", "mta-eager")] == ["auto", "reference"]


def weights(trainer):
    return torch.cat([weight.detach().flatten() for weight in trainer.model.parameters()])


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize("attention", ["conv", "plain", "mta", "mta-eager"])
def test_a_captured_step_trains_as_an_eager_one(toy, setting, attention):
    captured, eager = (toy.Trainer(setting(attention), "cuda") for _ in range(2))
    eager.trained = eager.model
    captured.capture()
    assert captured.advance != captured.train_on_batch
    assert torch.equal(weights(captured), weights(eager))
    batch = next(toy.draw_batches(setting(), torch.Generator("cuda").manual_seed(1)))
    losses = []
    for _ in range(10):
        for trainer in (captured, eager):
            trainer.loss.zero_()
            trainer.step(batch, 3e-4)
        losses.append([float(trainer.loss) for trainer in (captured, eager)])
    found, expected = torch.tensor(losses).T
    torch.testing.assert_close(found, expected, atol=1e-2, rtol=0)
    assert found[-1] < found[0] - 0.3


def test_a_run_writes_rows_and_a_chart_and_the_loss_falls(toy, command, tmp_path):
    code, out, _ = command(*TINY, "--steps", "32", "-o", "here")
    assert code == 0
    rows = pd.read_csv(tmp_path / "here" / "toy-all.csv")
    assert tuple(rows.columns) == toy.COLUMNS
    assert len(rows) == 2 * 25
    assert not rows.drop(columns=["git_sha", "git_dirty", "triton"]).isna().any().any()
    assert rows["error_rate"].between(0, 1).all()
    assert (rows["tokens"] == rows["step"] * 16 * (2 * 6 + 2 + 5)).all()
    for _, run in rows.groupby(["attention", "seed"]):
        assert run["step"].is_monotonic_increasing
        assert run["step"].iloc[-1] == 32
        assert run["train_loss"].iloc[-1] < run["train_loss"].iloc[0] - 0.3
    for name in ("toy-all.csv", "toy-all.svg"):
        assert f"here/{name}" in out
        assert (tmp_path / "here" / name).stat().st_size > 1000
    assert "Conv attention errs on" in (tmp_path / "here" / "toy-all.svg").read_text()


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("--variant", "middle"), "there is no variant 'middle'; expected all or first or last"),
        (("--attention", "conv,linear"), "there is no attention 'linear'; expected conv or plain or mta or mta-eager"),
        (("--attention", ""), "--attention"),
        (("--device", "tpu"), "there is no device 'tpu'; expected auto, cuda or cpu"),
        (("--batch", "-1"), "--batch"),
        (("--steps", "0"), "--steps"),
        (("--blocks", "many"), "--blocks"),
    ],
)
def test_bad_input_is_one_sentence_and_touches_nothing(command, tmp_path, words, sentence):
    code, out, error = command(*words, "-o", "here")
    assert code == 2
    assert out == ""
    assert error.startswith("train_toy.py: ")
    assert error.count("\n") == 1
    assert sentence in error
    assert not list(tmp_path.iterdir())
