"""scripts/convert_checkpoint.py: a checkpoint in the original's layout gives the original's logits as a Llama."""

import json
import re
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from training_scripts import command_line, names_of

from mta_kernels.multi_token_attention import MultiTokenAttention

transformers = pytest.importorskip("transformers", reason="transformers is not installed")
from test_retrofit import save_checkpoint  # noqa: E402

DIM, HEADS, KV_HEADS, HEAD_DIM, WORDS, WIDE, THETA = 32, 4, 2, 8, 40, 48, 1e5
MIXERS = {
    "published": {"pre_mix": True, "post_mix": 2, "norm": True, "gate": True},
    "others": {"pre_mix": False, "post_mix": "linear", "norm": True, "gate": "full"},
}


class Attention(MultiTokenAttention):
    """With projections beside the mixers, and a rotary embedding that turns pairs of neighbouring numbers."""

    def __init__(self, **options):
        super().__init__(HEADS, HEAD_DIM, **options)
        self.wq, self.wo = (nn.Linear(DIM, DIM, bias=False) for _ in range(2))
        self.wk, self.wv = (nn.Linear(DIM, KV_HEADS * HEAD_DIM, bias=False) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (y.unflatten(2, (-1, HEAD_DIM)).transpose(1, 2) for y in (self.wq(x), self.wk(x), self.wv(x)))
        angle = torch.arange(x.shape[1])[:, None] * THETA ** (-torch.arange(0, HEAD_DIM, 2).double() / HEAD_DIM)
        turn = torch.polar(torch.ones_like(angle), angle)
        pairs = (torch.view_as_complex(y.unflatten(3, (-1, 2)).contiguous()) for y in (q, k))
        q, k = (torch.view_as_real(y * turn).flatten(3) for y in pairs)
        return self.wo(super().forward(q, k, v).transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, **options):
        super().__init__()
        self.attention = Attention(**options)
        sizes = {"w1": (DIM, WIDE), "w2": (WIDE, DIM), "w3": (DIM, WIDE)}
        self.feed_forward = nn.ModuleDict({name: nn.Linear(*size, bias=False) for name, size in sizes.items()})
        self.attention_norm, self.ffn_norm = (nn.RMSNorm(DIM, eps=1e-5) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        first, second, third = self.feed_forward.values()
        y = self.ffn_norm(x)
        return x + second(F.silu(first(y)) * third(y))


def write_checkpoint(folder: Path, kind: str) -> nn.Module:
    """consolidated.pth and params.json with the original's names; layer 2 of 4 convolves."""
    torch.manual_seed(4)
    is_other = kind == "others"
    taps = [dict.fromkeys(["pre_conv", "post_conv"], (3, 5) if i == 2 else None) for i in range(4)]
    layers = [Block(**MIXERS[kind], **more, depth=i if is_other else None) for i, more in enumerate(taps)]
    output = nn.Linear(DIM, WORDS, bias=False)
    model = nn.Sequential(nn.Embedding(WORDS, DIM), *layers, nn.RMSNorm(DIM, eps=1e-5), output)
    for parameter in model.double().parameters():
        parameter.data += 0.05 * torch.randn_like(parameter)
    if not is_other:
        model[0].weight = output.weight
    last = "output" if is_other else "output.tied_module"
    names = ["tok_embeddings", *(f"layers.{i}" for i in range(4)), "norm", last]
    state = {names[int(x.partition(".")[0])] + x[x.index(".") :]: y for x, y in model.state_dict().items()}
    folder.mkdir()
    torch.save({"model": state}, folder / "consolidated.pth")
    sizes = {"dim": DIM, "n_layers": 4, "n_heads": HEADS, "n_kv_heads": KV_HEADS, "rope_theta": THETA}
    sizes |= {"weight_tying": not is_other, "mta": {"pad_key": "both", "layer_norm_rescale": is_other}}
    (folder / "params.json").write_text(json.dumps({"model": sizes}))
    return model


@pytest.fixture
def command(monkeypatch, capsys):
    return command_line(names_of("convert_checkpoint"), monkeypatch, capsys, "convert_checkpoint.py")


@pytest.mark.parametrize("kind", MIXERS)
def test_the_logits_are_those_of_the_original(command, tmp_path, kind):
    original = write_checkpoint(tmp_path / "given", kind)
    code, out, error = command(tmp_path / "given", tmp_path / "made")
    assert code == 0, error
    assert f"wrote {tmp_path / 'made'}" in out
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "made", attn_implementation="mta").double()
    tokens = torch.randint(WORDS, (2, 15))
    torch.testing.assert_close(model(tokens).logits, original(tokens), rtol=1e-6, atol=1e-6)


def test_the_example_of_the_page_writes_a_sentence(command, tmp_path, monkeypatch, capsys):
    write_checkpoint(tmp_path / "given", "published")
    assert command(tmp_path / "given", tmp_path / "converted")[0] == 0
    save_checkpoint(tmp_path / "tokenizer")
    page = (Path(__file__).parents[1] / "docs/coming-from.md").read_text()
    monkeypatch.chdir(tmp_path)
    exec(re.findall(r"```python\n(.*?)```", page, re.DOTALL)[0], {"tokenizer_path": "tokenizer"})
    assert capsys.readouterr().out.startswith("? n c e ? u p o n ? a ? t i m e ")


def test_what_it_cannot_convert_is_one_sentence(command, tmp_path):
    write_checkpoint(tmp_path / "given", "published")
    for place, sentence in (("none", "No such file or directory"), ("given", "exists; give a folder that is not")):
        code, _, error = command(tmp_path / place, tmp_path / ("made" if place == "none" else "given"))
        assert code == 2
        assert sentence in error.splitlines()[-1]
