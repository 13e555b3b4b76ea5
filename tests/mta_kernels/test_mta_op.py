"""Backends of the whole multi-token attention as operators: compiled, exported, checkpointed, under autocast."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from fake_mta_backend import FAKE
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint

from mta_kernels.backend import Backend, Request
from mta_kernels.conv_attention import conv_attention
from mta_kernels.multi_token_attention import (
    MultiTokenAttention,
    explain,
    multi_token_attention,
    unsupported,
)
from mta_kernels.multi_token_attention.backends import MULTI_TOKEN_ATTENTION
from mta_kernels.multi_token_attention.choice import choose
from mta_kernels.multi_token_attention.documents import document_bounds
from mta_kernels.multi_token_attention.dropout import kept, seed_tensor
from mta_kernels.multi_token_attention.mixers import Mixers
from mta_kernels.operation import HeadMix, Operation
from mta_kernels.torch_compile import missing

MIXERS = ("pre_conv", "pre_mix", "post_conv", "post_mix")
NUMBERS = (True, 0.3, 0, 1, 1, 2)  # causal, scale, pads, groups


@pytest.fixture(autouse=True)
def fake(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MULTI_TOKEN_ATTENTION, "kernels", (FAKE,))


def small(tokens: int = 12) -> dict[str, Tensor]:
    torch.manual_seed(0)
    shapes = {"q": (1, 4, tokens, 8), "k": (1, 2, tokens, 8), "v": (1, 2, tokens, 8)}
    shapes |= {"pre_conv": (4, 3, 2), "pre_mix": (4, 4), "post_conv": (4, 2, 3), "post_mix": (2, 2, 2)}
    return {name: torch.randn(shape).mul(0.5).requires_grad_() for name, shape in shapes.items()}


def gradients(function: Any, inputs: dict[str, Tensor], **options: Any) -> list[Tensor]:
    """The output and the gradients of a sum of its squares."""
    out = function(**inputs, **options)
    return [out.detach(), *torch.autograd.grad(out.float().square().sum(), list(inputs.values()))]


def assert_close(got: list[Tensor], want: list[Tensor]) -> None:
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


def without(inputs: dict[str, Tensor], *names: str) -> dict[str, Tensor]:
    return {name: x for name, x in inputs.items() if name not in names}


def test_operators_are_what_they_say(monkeypatch: pytest.MonkeyPatch) -> None:
    def zeros(operation: Operation, q: Tensor, *others: Any, **options: Any) -> tuple[Tensor, Tensor]:
        return torch.zeros_like(q), torch.zeros(q.shape[:3])

    def no_gradients(
        _: Operation, q: Tensor, k: Tensor, v: Tensor, mixers: Mixers, *others: Any, **options: Any
    ) -> Any:
        return *map(torch.zeros_like, (q, k, v)), Mixers(*(None if x is None else torch.zeros_like(x) for x in mixers))

    idle = Backend("idle", FAKE.why_not, FAKE.rank, zeros, no_gradients)  # each inner step is checked, and costs
    monkeypatch.setattr(MULTI_TOKEN_ATTENTION, "kernels", (FAKE, idle))
    tensors = list((small(6) | {"post_mix": torch.randn(4, 4, requires_grad=True)}).values())
    op, backward = torch.ops.mta.multi_token_attention.default, torch.ops.mta.multi_token_attention_backward.default
    torch.library.opcheck(op, (*tensors, *NUMBERS, None, "fake"), test_utils="test_aot_dispatch_dynamic")
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    documents = document_bounds(torch.tensor([0, 2, 6]), 6)
    torch.library.opcheck(op, (*tensors, *NUMBERS, documents, "idle"), test_utils=checks)
    some = [x.detach() if name != "pre_conv" else None for name, x in zip(small(6), tensors, strict=True)]
    out, logsumexp = op(*some, *NUMBERS, None, "fake")
    arguments = (*some, logsumexp, torch.randn_like(out), *NUMBERS, documents)
    torch.library.opcheck(backward, (*arguments, "idle"), test_utils=checks)
    torch.library.opcheck(backward, (*arguments, "fake"), test_utils="test_faketensor")


def test_what_is_not_wanted_has_no_gradient() -> None:
    inputs = {name: x.detach() for name, x in small().items()}
    inputs["post_mix"].requires_grad_()
    multi_token_attention(**inputs, backend="fake").sum().backward()
    assert inputs["post_mix"].grad is not None
    assert all(x.grad is None for name, x in inputs.items() if name != "post_mix")


def test_nothing_but_inputs_and_row_sums_is_kept() -> None:
    inputs = without(small(), "pre_conv", "post_conv")
    inputs["post_mix"] = torch.randn(4, 4, requires_grad=True)  # groups would be kept as a matrix
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        multi_token_attention(**inputs, backend="fake")
    addresses = {x.data_ptr() for x in inputs.values()}
    assert [x.shape for x in kept if x.data_ptr() not in addresses] == [(1, 4, 12)]


def test_gradients_come_once_and_backwards() -> None:
    inputs = small()
    out = multi_token_attention(**inputs, backend="fake")
    first = torch.autograd.grad(out.square().sum(), inputs["q"], create_graph=True)
    with pytest.raises(RuntimeError, match="backend='reference' has second derivatives"):
        torch.autograd.grad(first[0].sum(), inputs["q"])
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(inputs["q"].detach(), torch.ones_like(inputs["q"]))
        with pytest.raises(RuntimeError, match="no forward-mode derivatives"):
            multi_token_attention(**inputs | {"q": dual}, backend="fake")


@pytest.mark.parametrize("backend", ["fake", "reference"])
def test_an_undefined_gradient_adds_nothing(backend) -> None:
    inputs = small()

    class Stop(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> None:
            return None

    (Stop.apply(multi_token_attention(**inputs, backend=backend)).sum() + inputs["q"].sum()).backward()
    assert torch.equal(inputs["q"].grad, torch.ones_like(inputs["q"]))
    assert not inputs["pre_mix"].grad


@pytest.mark.parametrize(("dynamic", "packed"), [(False, False), (True, True)])
def test_compiles_without_a_break(dynamic, packed) -> None:
    torch._dynamo.reset()
    options: dict[str, Any] = {"cu_seqlens": torch.tensor([0, 4, 9])} if packed else {}
    run = torch.compile(multi_token_attention, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    inputs = small(9)
    got = gradients(run, inputs, **options, backend="fake")
    assert_close(got, gradients(multi_token_attention, inputs, **options, backend="fake"))


def test_the_module_compiles_and_exports() -> None:
    torch._dynamo.reset()
    attention = MultiTokenAttention(4, 16, pre_conv=(2, 3), post_conv=(3, 2), post_mix=2, backend="fake")
    q, k, v = torch.randn(3, 1, 4, 7, 16)
    want = attention(q, k, v)
    run = torch.compile(attention, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(run(q, k, v), want)
    program = torch.export.export(attention, (q, k, v))
    torch.testing.assert_close(program.module()(q, k, v), want)
    assert any("mta.multi_token_attention" in str(node.target) for node in program.graph.nodes)


def test_auto_and_dropout_compile() -> None:
    torch._dynamo.reset()
    run = torch.compile(multi_token_attention, fullgraph=True, backend="aot_eager")
    inputs = small(9)
    assert_close(gradients(run, inputs), gradients(multi_token_attention, inputs, backend="fake"))
    assert_close(
        gradients(run, inputs, dropout=0.5, seed=7), gradients(multi_token_attention, inputs, dropout=0.5, seed=7)
    )
    assert not torch.equal(run(**inputs, dropout=0.5), run(**inputs, dropout=0.5))


def test_a_seed_drops_the_same_in_compiled_code() -> None:
    """By inductor, which computes positions and a constant seed as it computes addresses."""
    if reason := missing("cpu"):
        pytest.skip(reason)
    torch._dynamo.reset()

    def cut(x: Tensor) -> Tensor:
        return x * kept(0.5, seed_tensor(7, x.device), 1, 2, (0, 9), (0, 9))

    x = torch.ones(1, 2, 9, 9)
    assert torch.equal(torch.compile(cut, fullgraph=True)(x), cut(x))


def test_checkpointing_and_torch_func() -> None:
    inputs = small()
    want = gradients(multi_token_attention, inputs, backend="fake")

    def checkpointed(**inputs: Any) -> Tensor:
        return checkpoint(multi_token_attention, **inputs, use_reentrant=False)

    assert_close(gradients(checkpointed, inputs, backend="fake"), want)

    def loss(inputs: dict[str, Tensor]) -> Tensor:
        return multi_token_attention(**inputs, backend="fake").square().sum()

    got = torch.func.grad(loss)({name: x.detach() for name, x in inputs.items()})
    assert_close(list(got.values()), want[1:])


def test_dropout_is_repeated_by_a_checkpoint() -> None:
    inputs = small()

    def checkpointed(**inputs: Any) -> Tensor:
        return checkpoint(multi_token_attention, **inputs, use_reentrant=False)

    torch.manual_seed(1)
    want = gradients(multi_token_attention, inputs, dropout=0.5)  # by the reference: the fake has none
    torch.manual_seed(1)
    got = gradients(checkpointed, inputs, dropout=0.5)
    assert_close(got, want)
    assert not torch.equal(got[0], gradients(multi_token_attention, inputs, dropout=0.5)[0])
    with pytest.raises(ValueError, match="'fake' cannot run this: the fake has no dropout"):
        multi_token_attention(**inputs, dropout=0.5, backend="fake")


def test_autocast_casts_all_but_float32_mixers() -> None:
    inputs = small()
    inputs["pre_conv"] = inputs["pre_conv"].detach().half().requires_grad_()
    with pytest.raises(TypeError, match=r"pre_conv has dtype torch\.float16"):
        multi_token_attention(**inputs, backend="fake")
    with torch.autocast("cpu", torch.bfloat16):
        out = multi_token_attention(**inputs, backend="fake")
        assert explain(**inputs).backend == "fake"
        assert explain(**inputs | {"k": inputs["k"].half(), "v": inputs["v"].half()}).backend == "fake"
    assert out.dtype == torch.bfloat16
    out.sum().backward()
    assert all(x.grad is not None and x.grad.dtype == x.dtype for x in inputs.values())
    wide = {name: x.detach().double() for name, x in inputs.items()}
    with torch.autocast("cpu", torch.bfloat16):
        assert multi_token_attention(**wide, backend="fake").dtype == torch.float64


def test_what_conv_attention_computes_is_computed_by_it(monkeypatch: pytest.MonkeyPatch) -> None:
    from mta_kernels.multi_token_attention import api

    calls: list[str] = []

    def watched(*arguments: Any, **options: Any) -> Tensor:
        calls.append(options["backend"])
        return conv_attention(*arguments, **options)

    monkeypatch.setattr(api, "conv_attention", watched)
    inputs = without(small(), "pre_mix", "post_conv", "post_mix")
    assert torch.equal(
        multi_token_attention(**inputs, pad_key="right"), conv_attention(*inputs.values(), pad_key="right")
    )
    plain = without(inputs, "pre_conv")
    want = torch.nn.functional.scaled_dot_product_attention(*plain.values(), is_causal=True, enable_gqa=True)
    torch.testing.assert_close(multi_token_attention(**plain, backend="reference"), want)
    assert calls == ["auto", "reference"]
    multi_token_attention(**plain, backend="fake")  # named, and conv_attention has none of that name
    multi_token_attention(**plain, dropout=0.1)
    assert len(calls) == 2
    assert explain(**inputs).reason.startswith("conv_attention computes this")


def test_a_choice_says_why() -> None:
    inputs = small()
    assert str(explain(**inputs)) == "fake: the fastest backend for these arguments"
    assert str(explain(**inputs, backend="reference")) == "reference: asked for"
    assert explain(**inputs, dropout=0.1).reason == "fake cannot run this: the fake has no dropout"
    with pytest.raises(ValueError, match=r"backend 'hopper' runs .*; expected 'auto' or one of 'reference', 'fake'"):
        explain(**inputs, backend="hopper")
    cell: dict[str, Any] = {"device": "cpu", "dtype": torch.float32, "head_dim": 8, "heads": 4}
    operation = Operation(None, 1.0, True, pre_mix=HeadMix())
    assert unsupported("fake", operation=operation, **cell) is None
    assert unsupported("reference", operation=operation, **cell) is None
    assert unsupported("fake", operation=operation, **cell, dropout=0.1) == "the fake has no dropout"
    on_gpu = Request(operation, "cuda", torch.float32, 8, heads=4, dropout=0.1)
    with pytest.warns(UserWarning, match="eager reference computes this on a GPU.*the fake has no dropout"):
        assert choose("auto", on_gpu) is None


def test_bounds_of_documents() -> None:
    bounds = document_bounds(torch.tensor([0, 0, 2, 2, 5]), 5)
    assert bounds.tolist() == [[0, 0, 2, 2, 2], [2, 2, 5, 5, 5]]
    assert bounds.dtype == torch.int32
