"""The module: the original's names and shapes, what it starts as, and the layers of the paper's models."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mta_kernels.multi_token_attention import (
    MultiTokenAttention,
    explain,
    layer_entries,
    multi_token_attention_reference,
)
from mta_kernels.multi_token_attention.module import PRESETS
from mta_ladder import attention_reference


def entries(heads: int, head_dim: int, *, head_kernel: int | None, full_gate: bool = False) -> dict[str, Tensor]:
    """The state of an attention layer of the original, with its projections."""
    dim, gate = heads * head_dim, head_dim if full_gate else 1
    shapes = {f"{name}.weight": (dim, dim) for name in ("wq", "wk", "wv", "wo")} | {
        "mta_kernel": (heads, 1, 2, 3), "wpsm.weight": (heads, heads), "mta_kernel_after_sm": (heads, 1, 3, 3),
        "subln.weight": (head_dim,), "gate.weight": (gate, head_dim), "gate.bias": (gate,),
    }  # fmt: skip
    if head_kernel is None:
        shapes["wposm.weight"] = (heads, heads)
    else:
        shapes["head_kernel"] = (heads // head_kernel, head_kernel, head_kernel)
    return {name: torch.randn(shape) for name, shape in shapes.items()}


def as_the_original_states(q: Tensor, k: Tensor, v: Tensor, state: dict[str, Tensor]) -> Tensor:
    """The original's steps in its own layout, where a mixing is a linear layer over the last dimension."""
    heads, tokens = q.shape[1:3]
    future = torch.ones(tokens, tokens, dtype=torch.bool).triu(1)

    def convolved(x: Tensor, kernel: Tensor) -> Tensor:
        rows, columns = kernel.shape[2:]
        padded = F.pad(x.masked_fill(future, 0), ((columns - 1) // 2, (columns - 1) // 2, rows - 1, 0))
        return F.conv2d(padded, kernel, groups=heads)

    x = convolved(q @ k.mT * q.shape[3] ** -0.5, state["mta_kernel"])
    x = F.linear(x.movedim(1, -1), state["wpsm.weight"]).movedim(-1, 1)
    x = x.masked_fill(future, float("-inf")).softmax(-1)
    x = convolved(x, state["mta_kernel_after_sm"]).masked_fill(future, 0)
    if "wposm.weight" in state:
        x = F.linear(x.movedim(1, -1), state["wposm.weight"]).movedim(-1, 1)
    else:
        groups = zip(x.split(state["head_kernel"].shape[1], 1), state["head_kernel"], strict=True)
        x = torch.cat([(part.movedim(1, -1) @ kernel).movedim(-1, 1) for part, kernel in groups], 1)
    x = F.rms_norm(x @ v, (v.shape[3],), state["subln.weight"], 1e-5)
    return x * torch.sigmoid(F.linear(x, state["gate.weight"], state["gate.bias"]))


@pytest.mark.parametrize(("post_mix", "head_kernel"), [(True, 4), (2, 2), ("linear", None)])
@pytest.mark.parametrize("gate", [True, "full"])
def test_a_layer_of_the_original_is_loaded(post_mix, head_kernel, gate) -> None:
    torch.manual_seed(0)
    state = entries(4, 8, head_kernel=head_kernel, full_gate=gate == "full")
    checkpoint = {f"layers.{at}.attention.{name}": x + at for at in (2, 12) for name, x in state.items()}
    checkpoint["layers.2.feed_forward.w1.weight"] = torch.ones(2, 2)
    attention = MultiTokenAttention(4, 8, pre_conv=(2, 3), post_conv=(3, 3), post_mix=post_mix, gate=gate)
    attention.load_state_dict(layer_entries(checkpoint, 2))
    q, k, v = torch.randn(3, 2, 4, 9, 8)
    want = as_the_original_states(q, k, v, {name: x + 2 for name, x in state.items()})
    torch.testing.assert_close(attention(q, k, v), want)


def test_entries_that_are_missing_or_too_many_are_seen() -> None:
    state = {f"layers.1.attention.{name}": x for name, x in entries(4, 8, head_kernel=4).items()}
    attention = MultiTokenAttention(4, 8, pre_conv=(2, 3), post_conv=None)
    with pytest.raises(RuntimeError, match=r"Unexpected key.*mta_kernel_after_sm"):
        attention.load_state_dict(layer_entries(state, 1))
    with pytest.raises(ValueError, match=r"no mixer named layers\.0\.attention"):
        layer_entries(state, 0)
    projections = {name: x for name, x in state.items() if name.split(".")[3] in ("wq", "wk", "wv", "wo")}
    assert len(projections) == 4
    with pytest.raises(ValueError, match=r"no mixer named layers\.1\.attention"):
        layer_entries(projections, 1)


@pytest.mark.usefixtures("without_interpreter")
def test_at_first_it_is_plain_attention_but_for_norm_and_gate() -> None:
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 1, 4, 9, 16)
    for post_mix in (True, 2, "linear", False):
        attention = MultiTokenAttention(4, 16, post_mix=post_mix, norm=False, gate=False)
        torch.testing.assert_close(attention(q, k, v), attention_reference(q, k, v))
    attention = MultiTokenAttention(4, 16)
    plain = F.rms_norm(attention_reference(q, k, v), (16,), eps=1e-5)
    torch.testing.assert_close(attention(q, k, v), plain * torch.sigmoid(attention.gate(plain)))
    assert 0 < attention.gate.weight.detach().abs().max() <= 3 / 8
    for parameter in attention.parameters():
        nn.init.normal_(parameter)
    attention.reset_parameters()
    plain_gate = plain * torch.sigmoid(attention.gate(plain))
    torch.testing.assert_close(attention(q, k, v), plain_gate)


@pytest.mark.parametrize("name", PRESETS)
def test_layers_of_the_papers_models(name) -> None:
    heads, head_dim, layers = PRESETS[name]
    with_convolutions = []
    for layer in range(layers):
        attention = MultiTokenAttention.preset(name, layer=layer, device="meta")
        names = {x for x, _ in attention.named_parameters()}
        assert names >= {"wpsm.weight", "head_kernel", "subln.weight", "gate.weight", "gate.bias"}
        assert attention.head_kernel.shape == (1, heads, heads)
        assert attention.gate.weight.shape == (1, head_dim)
        assert attention.depth is None
        if attention.mta_kernel is not None:
            with_convolutions.append(layer)
            assert attention.mta_kernel.shape == attention.mta_kernel_after_sm.shape == (heads, 1, 6, 11)
    assert with_convolutions == list(range(2, layers, 4))


def test_options_reach_the_function() -> None:
    torch.manual_seed(0)
    options: dict[str, Any] = {"causal": False, "scale": 0.3, "pad_key": "left", "depth": 4}
    attention = MultiTokenAttention(
        4, 8, pre_conv=(2, 3), post_conv=(2, 2), dropout=0.5, backend="reference", **options
    )
    for parameter in attention.parameters():
        nn.init.normal_(parameter)
    q, k, v = torch.randn(3, 1, 4, 9, 8)
    want = multi_token_attention_reference(q, k, v, **attention.mixers(), **options, dropout=0.5, seed=3)
    assert torch.equal(attention(q, k, v, seed=3), want)
    attention.eval()
    bounds = torch.tensor([0, 4, 9])
    want = multi_token_attention_reference(q, k, v, **attention.mixers(), **options, cu_seqlens=bounds)
    assert torch.equal(attention(q, k, v, cu_seqlens=bounds), want)
    whole = attention(q, k, v)
    assert torch.allclose(attention(q[:, :, 5:], k, v, q_history=q[:, :, :5]), whole[:, :, 5:], atol=1e-5)
    assert str(attention.explain(q, k, v)) == "reference: asked for"
    assert "depth=4" in repr(attention)


def test_every_parameter_learns() -> None:
    attention = MultiTokenAttention(4, 8, pre_conv=(2, 3), post_conv=(2, 3), post_mix=2)
    q, k, v = torch.randn(3, 1, 4, 9, 8)
    attention(q, k, v).square().sum().backward()
    assert all(x.grad is not None and x.grad.any() for x in attention.parameters())
    only_first = MultiTokenAttention(4, 8, pre_mix=False, post_conv=None, post_mix=False, norm=False, gate=False)
    assert only_first.explain(q, k, v).reason.startswith("conv_attention computes this")
    assert explain(q, k, v, **only_first.mixers()) == only_first.explain(q, k, v)


def test_gradients_have_the_strides_of_parameters_in_channels_last() -> None:
    given: dict[str, Any] = {"heads": 2, "head_dim": 16, "pre_conv": (2, 3), "post_conv": None}
    module = MultiTokenAttention(**given).to(memory_format=torch.channels_last)
    q = torch.randn(1, 2, 5, 16)
    module(q, q, q).sum().backward()
    assert {x.stride() == x.grad.stride() for x in module.parameters() if x.grad is not None} == {True}
    assert torch.equal(module.mta_kernel, MultiTokenAttention(**given).mta_kernel)


def test_parameters_are_reset_where_they_are_under_another_default_device() -> None:
    """As transformers builds a model: beside a default device on which nothing has values."""
    with torch.device("meta"):
        attention = MultiTokenAttention(4, 8, device="cpu", post_mix=2)
    for weight in (attention.mta_kernel, attention.head_kernel):
        assert weight.device.type == "cpu"
        assert weight.sum() > 0


@pytest.mark.usefixtures("without_interpreter")
@pytest.mark.parametrize("pages", [False, True])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"depth": 3, "scale": 0.5, "pad_key": "left"},
        {"pre_conv": None, "pre_mix": False, "post_mix": "linear", "gate": "full"},
        {"post_conv": None, "post_mix": 2},
        {"post_conv": None, "pre_mix": False, "post_mix": False, "norm": False, "pad_key": "right"},
    ],
    ids=["all", "depth, scale, padding", "after alone", "no state", "convolution alone"],
)
def test_steps_of_the_module_are_rows_of_its_forward(options, pages):
    attention = MultiTokenAttention(4, 16, **({"pre_conv": (3, 2), "post_conv": (2, 3)} | options), dropout=0.5)
    with torch.no_grad():
        for parameter in attention.parameters():
            parameter += 0.2 * torch.randn_like(parameter)
    q, k, v = torch.randn(3, 2, 4, 32, 16)
    full = attention.eval()(q, k, v)
    attention.train()  # a step drops nothing
    lengths = torch.tensor([20, 26])
    table = {"block_table": torch.tensor([[0, 1], [2, 3]], dtype=torch.int32)} if pages else {}
    if pages:
        k, v = (x.unflatten(2, (2, 16)).transpose(1, 2).flatten(0, 1) for x in (k, v))

    def last(count):
        return torch.stack([x[:, length - count : length] for x, length in zip(q, lengths.tolist(), strict=True)])

    state = attention.prefill_state(last(5), k, lengths=lengths, **table)
    assert (state is None) == (options.get("post_conv", 1) is None)
    for _ in range(3):
        lengths += 1
        out = attention.decode(last(3), k, v, lengths=lengths, state=state, **table)
        rows = torch.stack([x[:, length - 1 : length] for x, length in zip(full, lengths.tolist(), strict=True)])
        torch.testing.assert_close(out, rows, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["q_window", "k_cache", "v_cache"])
def test_a_decode_step_does_not_drop_gradients_without_a_word(name: str) -> None:
    """Parameters that train may stand in a step; a gradient of its tensors is refused, also within torch.func."""
    attention = MultiTokenAttention(4, 16, post_conv=None)
    tensors = dict(zip(("q_window", "k_cache", "v_cache"), torch.randn(3, 1, 4, 6, 16), strict=True))
    lengths = torch.tensor([6])
    assert not attention.decode(**tensors, lengths=lengths).requires_grad

    def token(x: torch.Tensor) -> torch.Tensor:
        return attention.decode(**tensors | {name: x}, lengths=lengths).sum()

    with pytest.raises(RuntimeError, match=r"^multi_token_attention_decode is not differentiable; call it under"):
        token(tensors[name].requires_grad_())
    with pytest.raises(RuntimeError, match=r"^multi_token_attention_decode is not differentiable"):
        torch.func.grad(token)(tensors[name].detach())
