"""scripts/train_text.py: its text, its layers, equal curves of equal kernels, its table and its chart."""

import sys
from pathlib import Path

import pandas as pd
import pytest
import torch
from training_scripts import assert_kept, assert_refused, command_line, names_of

ROOT = Path(__file__).parents[1]
MODULES = ("text_task.model", "text_task.training", "text_task.chart", "train_text")
TINY = ("--device", "cpu", "--seq", "16", "--batch", "1", "--layers", "3", "--dim", "32", "--heads", "2")


@pytest.fixture(scope="module")
def text():
    """The names of the script and of its modules."""
    return names_of(*MODULES)


@pytest.fixture
def command(text, monkeypatch, capsys):
    """Runs the command line; gives the exit code, standard output and standard error."""
    return command_line(text, monkeypatch, capsys, "train_text.py")


@pytest.fixture
def stand_in(monkeypatch):
    """Puts the reference in the place of the Triton kernels, its gradient of one mixer times a factor."""
    training = sys.modules["text_task.training"]
    make_model = training.make_model

    def put(mixer="head_kernel", factor=1.0):
        def made(setting, run, device):
            model, dtype = make_model(setting, "reference" if run == "triton" else run, device)
            for name, weight in model.named_parameters():
                if run == "triton" and name.removesuffix(".weight").endswith(f".{mixer}"):
                    weight.register_hook(lambda gradient: gradient * factor)
            return model, dtype

        monkeypatch.setattr(training, "make_model", made)

    return put


@pytest.fixture
def fixed_text(text, monkeypatch):
    """A text that does not change with the repository's."""
    read = torch.randint(97, 123, (1000,), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    monkeypatch.setattr(sys.modules["train_text"], "read_text", lambda root: read)


def largest_difference(path):
    rows = pd.read_csv(path)
    losses = rows.pivot(index="step", columns="backend", values="loss")
    return float((losses["triton"] - losses["reference"]).abs().max()), rows


@pytest.mark.usefixtures("fixed_text")
def test_equal_kernels_give_equal_curves(command, stand_in, text, tmp_path):
    stand_in()
    path = tmp_path / "new" / "mta-text.csv"
    code, out, _ = command(*TINY, "--steps", "4", "--backends", "reference,triton,float32", "--out", path)
    assert code == 0
    difference, rows = largest_difference(path)
    assert difference < 1e-4
    assert tuple(rows.columns) == text.COLUMNS
    assert rows.groupby("backend", sort=False).size().to_dict() == {"reference": 4, "triton": 4, "float32": 4}
    assert list(rows["step"]) == 3 * [0, 1, 2, 3]
    assert (rows["mixers_moved"] > 0).all()
    unknown = ["driver", "cuda", "triton", "git_sha", "git_dirty"]
    assert not rows.drop(columns=unknown).isna().any().any()
    for suffix in (".csv", ".svg"):
        assert str(path.with_suffix(suffix)) in out
        assert path.with_suffix(suffix).stat().st_size > 1000
    assert "fused, by Triton" in path.with_suffix(".svg").read_text()


@pytest.mark.usefixtures("fixed_text")
@pytest.mark.parametrize("mixer", ["mta_kernel", "wpsm", "mta_kernel_after_sm", "head_kernel"])
def test_a_wrong_gradient_shows_in_the_curve(command, stand_in, tmp_path, mixer):
    stand_in(mixer, -1.0)
    assert command(*TINY, "--steps", "4", "--learning-rate", "1e-2", "--out", tmp_path / "x.csv")[0] == 0
    difference, _ = largest_difference(tmp_path / "x.csv")
    assert difference > 1e-3


@pytest.mark.gpu
@pytest.mark.slow
def test_the_kernels_of_a_gpu_give_the_curve_of_eager(command, tmp_path):
    sizes = ("--seq", "256", "--batch", "4", "--dim", "128", "--heads", "4", "--steps", "30")
    assert command(*sizes, "--out", tmp_path / "x.csv")[0] == 0
    difference, rows = largest_difference(tmp_path / "x.csv")
    assert difference < 0.05
    assert set(rows["dtype"]) == {"bfloat16"}
    eager = rows[rows["backend"] == "reference"]["loss"]
    assert eager.iloc[-1] < eager.iloc[0] - 0.5


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("--backends", "reference,cuda"), "there is no backend 'cuda'; expected some of reference,triton,float32"),
        (("--backends", ""), "there is no backend ''"),
        (("--steps", "0"), "--steps is 0; expected at least 1"),
        (("--dim", "36"), "--dim is 36; expected a multiple of 8, twice the heads"),
        (("--device", "tpu"), "there is no device 'tpu'; expected auto, cuda or cpu"),
        (("--dim", "1024", "--heads", "2"), "backend 'triton' cannot run this: head_dim 512 is outside"),
    ],
)
def test_bad_input_is_one_sentence(command, tmp_path, words, sentence):
    assert_refused(command, tmp_path, ("--device", "cpu", *words), sentence)


def test_results_that_are_there_stay(command, tmp_path):
    assert_kept(command, tmp_path, *TINY)
