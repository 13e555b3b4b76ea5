"""scripts/retrofit.py: the identity at first, equal batches for both models, its table and chart, checkpoints."""

import re
import sys
from pathlib import Path

import pandas as pd
import pytest
import torch
from training_scripts import assert_kept, assert_refused, command_line, names_of, without_interpreter  # noqa: F401

pytest.importorskip("transformers", reason="transformers is not installed: pip install '.[transformers]'")

ROOT = Path(__file__).parents[1]
MODULES = ("retrofit_task.models", "retrofit_task.training", "retrofit_task.chart", "retrofit")
STEPS = ("--device", "cpu", "--seq", "12", "--batch", "2", "--steps", "3", "--every", "2")
TINY = (*STEPS, "--pretrain-steps", "2", "--layers", "3", "--dim", "16", "--heads", "2")


@pytest.fixture(scope="module")
def task():
    """The names of the script and of its modules."""
    return names_of(*MODULES)


@pytest.fixture
def command(task, monkeypatch, capsys, tmp_path):
    """Runs the command line on a text of its own; gives the exit code, standard output and standard error."""
    text = torch.randint(97, 123, (600,), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    (tmp_path / "text.txt").write_bytes(text.numpy().tobytes())
    monkeypatch.setattr(sys.modules["retrofit_task.training"], "HELD_OUT", 8)

    return command_line(task, monkeypatch, capsys, "retrofit.py", "--text", str(tmp_path / "text.txt"))


def losses_of(path, attention, column="held_out_loss"):
    rows = pd.read_csv(path).query(f"phase == 'finetune' and attention == '{attention}'")
    return torch.tensor(rows.pivot(index="step", columns="seed", values=column).to_numpy())


@pytest.mark.parametrize("parts", ["conv", "all"])
def test_both_models_start_with_the_loss_of_the_trained_one_and_then_part(command, task, tmp_path, parts):
    path = tmp_path / "new" / "x.csv"
    code, out, error = command(*TINY, "--parts", parts, "--seeds", 2, "--learning-rate", "0.1", "--out", path)
    assert code == 0, error
    rows = pd.read_csv(path)
    assert tuple(rows.columns) == task.COLUMNS
    assert list(rows["step"]) == 2 * [0, 1, 2, *2 * [0, 1, 2, 3]]
    plain, mta = (losses_of(path, attention) for attention in ("plain", "mta"))
    trained = rows.query("phase == 'pretrain' and step == 2")["held_out_loss"]
    torch.testing.assert_close(plain[0], torch.tensor(trained.to_numpy()))
    torch.testing.assert_close(mta[0], plain[0], atol=1e-6, rtol=0)
    assert (mta[-1] - plain[-1]).abs().min() > 1e-4
    moved = rows.query("step > 0").groupby("attention")["mixers_moved"].min()
    assert moved["plain"] == 0 < moved["mta"]
    assert set(rows.loc[rows["step"] == 0, "train_loss"].isna()) == {True}
    for suffix in (".csv", ".svg"):
        assert str(path.with_suffix(suffix)) in out
        assert path.with_suffix(suffix).stat().st_size > 1000
    assert f"plain, {mta[-1].mean():.3f} with multi-token attention" in path.with_suffix(".svg").read_text()


def test_mixers_that_do_not_learn_give_the_curve_of_plain_attention(command, monkeypatch, tmp_path):
    """So the batches, their order and the learning rates are the same for both models."""
    monkeypatch.setattr(sys.modules["retrofit_task.training"], "MIXER_RATE", 0)
    assert command(*TINY, "--learning-rate", "0.01", "--out", tmp_path / "x.csv")[0] == 0
    for column in ("held_out_loss", "train_loss"):
        plain, mta = (losses_of(tmp_path / "x.csv", attention, column)[1:] for attention in ("plain", "mta"))
        torch.testing.assert_close(mta, plain, atol=1e-4, rtol=0)
        assert not torch.equal(plain[0], plain[-1])


def test_what_is_not_the_identity_is_refused(command, monkeypatch, task, tmp_path):
    monkeypatch.setitem(task.PARTS, "conv", {"norm": True})
    code, _, error = command(*TINY, "--out", tmp_path / "x.csv")
    assert code == 1
    assert error.startswith("retrofit.py: before the first step the losses differ (plain ")
    assert set(pd.read_csv(tmp_path / "x.csv")["attention"]) == {"plain"}


def save_checkpoint(folder):
    """A checkpoint like Llama, whose tokens are single letters."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.WordLevel({"?": 0} | {chr(97 + i): i + 1 for i in range(26)}, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="?").save_pretrained(folder)
    torch.manual_seed(1)
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2, "num_key_value_heads": 1}
    LlamaForCausalLM(LlamaConfig(vocab_size=27, num_hidden_layers=4, **sizes)).half().save_pretrained(folder)


def test_a_checkpoint_is_trained_on_with_its_own_tokens(command, task, tmp_path):
    save_checkpoint(tmp_path / "tiny")
    assert task.tokens_of(tmp_path / "tiny", b"abcz").tolist() == [1, 2, 3, 26]
    code, _, error = command(*STEPS, "--model", tmp_path / "tiny", "--out", tmp_path / "x.csv")
    assert code == 0, error
    rows = pd.read_csv(tmp_path / "x.csv")
    assert list(rows["phase"].unique()) == ["finetune"]
    assert set(zip(rows["model"], rows["layers"], rows["dim"], rows["heads"], strict=True)) == {("tiny", 4, 16, 2)}
    torch.testing.assert_close(
        *(losses_of(tmp_path / "x.csv", name)[0] for name in ("plain", "mta")), atol=1e-5, rtol=0
    )


def test_the_example_of_the_page_keeps_the_loss_and_learns_at_two_rates(tmp_path):
    save_checkpoint(tmp_path / "tiny")
    (code,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs/retrofit.md").read_text(), re.DOTALL)
    assert "[2, 6, 10]" in code
    names = {"path": tmp_path / "tiny"}
    exec(code.replace("[2, 6, 10]", "[2]"), names)
    given, loaded = torch.arange(1, 13)[None], type(names["model"]).from_pretrained(tmp_path / "tiny")
    torch.testing.assert_close(names["model"](given).logits, loaded.float()(given).logits)
    others, mixers = names["optimizer"].param_groups
    assert mixers["lr"] == pytest.approx(3 * others["lr"])
    assert [tuple(x.shape) for x in mixers["params"]] == [(2, 1, 6, 11)]
    assert len(others["params"]) == len(list(loaded.parameters()))


def test_no_step_sees_a_piece_that_is_held_out(task):
    to_train, held_out = task.split(torch.arange(10000), 9)
    assert task.HELD_OUT - 4 < len(held_out) <= task.HELD_OUT
    assert len(to_train) + held_out.numel() == 10000
    assert not set(to_train.tolist()) & set(held_out.flatten().tolist())
    assert torch.equal(held_out - held_out[:, :1], torch.arange(10).expand_as(held_out))


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("--steps", "0"), "--steps is 0; expected at least 1"),
        (("--every", "0"), "--every is 0; expected at least 1"),
        (("--every", "9"), "--every 9 leaves out all 3 layers; give a smaller one"),
        (("--dim", "18"), "--dim is 18; expected a multiple of 4, twice the heads"),
        (("--parts", "gate"), "there is no --parts 'gate'; expected conv or all"),
        (("--seq", "200"), "the text has 600 tokens; expected at least 804 for --seq 200"),
        (("--text", "nothing-such"), "cannot read --text nothing-such: No such file or directory"),
        (("--device", "tpu"), "there is no device 'tpu'; expected auto, cuda or cpu"),
        (("--model", "nothing-such"), "cannot load --model nothing-such: "),
    ],
)
def test_bad_input_is_one_sentence(command, tmp_path_factory, words, sentence):
    assert_refused(command, tmp_path_factory.mktemp("out"), (*TINY, *words), sentence)


def test_results_that_are_there_stay(command, tmp_path):
    assert_kept(command, tmp_path, *TINY)
