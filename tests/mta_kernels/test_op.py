"""The Triton backend as operators: what they say they are, and their gradients, in every way to ask for them."""

from __future__ import annotations

import pytest
import torch
from kernel_inputs import DEVICE, Stop
from operator_calls import assert_equal, decode_inputs, gradients, small
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.autograd import forward_ad

pytest.importorskip("triton")

from mta_kernels.conv_attention import conv_attention, conv_attention_decode

OPTIONS = (True, 0.3, 1, 0, None)  # causal, scale, pad, head_chunk, spans


def test_operators_are_what_they_say() -> None:
    inputs = small(12)
    torch.library.opcheck(torch.ops.mta.conv_attention.default, (*inputs, *OPTIONS, "triton"))
    tensors = [x.detach() for x in inputs]
    spans = torch.stack([torch.zeros(12), torch.full((12,), 12)]).int().to(DEVICE)
    torch.library.opcheck(torch.ops.mta.conv_attention.default, (*tensors, True, 0.3, 1, 1, spans, "triton"))
    out, logsumexp = torch.ops.mta.conv_attention(*tensors, *OPTIONS, "triton")
    backward = (*tensors, out, logsumexp, torch.randn_like(out), *OPTIONS, "triton")
    torch.library.opcheck(torch.ops.mta.conv_attention_backward.default, backward)
    decode, options = decode_inputs()
    torch.library.opcheck(
        torch.ops.mta.conv_attention_decode.default, (*decode, options["lengths"], None, None, "both", 0, "triton")
    )


def test_gradients_come_once() -> None:
    inputs = small()
    out = conv_attention(*inputs, backend="triton")
    first = torch.autograd.grad(out.square().sum(), inputs, create_graph=True)
    with pytest.raises(RuntimeError, match="backend='reference' has second derivatives"):
        torch.autograd.grad(first[0].sum(), inputs)
    assert conv_attention(*(x.detach() for x in inputs), backend="triton").grad_fn is None
    with torch.no_grad():
        assert conv_attention(*inputs, backend="triton").grad_fn is None


def test_what_is_not_wanted_has_no_gradient() -> None:
    q, k, v, weight = (x.detach() for x in small())
    conv_attention(q, k, v.requires_grad_(), weight, backend="triton").sum().backward()
    assert v.grad is not None
    assert all(x.grad is None for x in (q, k, weight))


@pytest.mark.parametrize(
    "options", [{}, {"cu_seqlens": torch.tensor([0, 8, 20], device=DEVICE)}], ids=["whole", "packed"]
)
@pytest.mark.parametrize("backend", ["reference", "triton"])
def test_an_undefined_gradient_adds_nothing(backend: str, options: dict) -> None:
    inputs = small()
    out = conv_attention(*inputs, backend=backend, **options)
    (Stop.apply(out).sum() + 2 * inputs[0].sum()).backward()
    assert (inputs[0].grad == 2).all()
    assert all(x.grad is None or not x.grad.any() for x in inputs[1:])


def test_gradients_of_an_output_that_is_expanded() -> None:
    inputs = small()
    out = conv_attention(*inputs, backend="triton")
    grad_out = torch.randn(1, 1, 20, 1, device=DEVICE).expand(out.shape)
    got = torch.autograd.grad(out, inputs, grad_out, retain_graph=True)
    assert_equal(got, torch.autograd.grad(out, inputs, grad_out.contiguous()))


FORWARD_MODE = "through backend 'triton' has no forward-mode derivatives .*; backend='reference' has them"


@pytest.mark.parametrize("place", range(4))
@pytest.mark.parametrize(
    "options", [{}, {"cu_seqlens": torch.tensor([0, 8, 20], device=DEVICE)}], ids=["whole", "packed"]
)
def test_forward_mode_is_refused(place: int, options: dict) -> None:
    inputs = [x.detach() for x in small()]

    def function(x: Tensor) -> Tensor:
        return conv_attention(*inputs[:place], x, *inputs[place + 1 :], backend="triton", **options)

    with pytest.raises(RuntimeError, match=FORWARD_MODE):
        torch.func.jvp(function, (inputs[place],), (torch.ones_like(inputs[place]),))
    with forward_ad.dual_level():
        for x in (inputs[place], inputs[place].clone().requires_grad_()):
            dual = forward_ad.make_dual(x, torch.ones_like(x))
            with pytest.raises(RuntimeError, match=FORWARD_MODE):
                function(dual)
            with pytest.raises(RuntimeError, match=FORWARD_MODE), torch.no_grad():
                function(dual)
        function(inputs[place])
    with pytest.raises(RuntimeError, match=FORWARD_MODE):  # forward over reverse
        torch.func.hessian(lambda x: function(x).sum())(inputs[place])


def test_forward_mode_of_history_backward_and_decode_is_refused() -> None:
    q, k, v, weight = inputs = small()
    tangent = torch.ones_like(q)[:, :, :12]

    def chunk(history: Tensor) -> Tensor:
        return conv_attention(q[:, :, 12:], k, v, weight, q_history=history, backend="triton")

    with pytest.raises(RuntimeError, match=FORWARD_MODE):
        torch.func.jvp(chunk, (q[:, :, :12].detach(),), (tangent,))
    out = conv_attention(*inputs, backend="triton")
    with forward_ad.dual_level(), pytest.raises(RuntimeError, match="the backward of conv_attention " + FORWARD_MODE):
        torch.autograd.grad(out, inputs, forward_ad.make_dual(torch.ones_like(out), torch.ones_like(out)))
    decode, options = decode_inputs()
    for place, x in enumerate(decode):
        with forward_ad.dual_level():
            duals = [*decode[:place], forward_ad.make_dual(x, torch.ones_like(x)), *decode[place + 1 :]]
            with pytest.raises(RuntimeError, match="conv_attention_decode " + FORWARD_MODE):
                conv_attention_decode(*duals, **options, backend="triton")


@pytest.mark.parametrize(
    "options", [{}, {"cu_seqlens": torch.tensor([0, 8, 20], device=DEVICE)}], ids=["whole", "packed"]
)
def test_transforms_of_torch_func(options: dict) -> None:
    inputs = tuple(x.detach() for x in small())

    def loss(*inputs: Tensor, backend: str = "triton") -> Tensor:
        return conv_attention(*inputs, backend=backend, **options).square().sum()

    want = gradients(lambda *x: conv_attention(*x, backend="triton", **options), small())[1:]
    assert_equal(torch.func.grad(loss, argnums=(0, 1, 2, 3))(*inputs), want)
    twice = [torch.stack([x, x / 2]) for x in inputs]
    each = [torch.func.grad(loss, argnums=(0, 1, 2, 3))(*x) for x in zip(*twice, strict=True)]
    mapped = torch.func.vmap(torch.func.grad(loss, argnums=(0, 1, 2, 3)))(*twice)
    assert_equal(mapped, [torch.stack(x) for x in zip(*each, strict=True)])
    with pytest.raises(RuntimeError, match="backend='reference' has second derivatives"):
        torch.func.grad(lambda q: torch.func.grad(loss)(q, *inputs[1:]).sum())(inputs[0])


def test_decode_within_transforms_of_torch_func() -> None:
    (q_window, *others), options = decode_inputs()
    windows = torch.stack([q_window, q_window / 2])

    def token(q_window: Tensor) -> Tensor:
        return conv_attention_decode(q_window, *others, **options, backend="triton")

    assert torch.equal(torch.func.vmap(token)(windows), torch.stack([token(x) for x in windows]))
    with pytest.raises(RuntimeError, match="not differentiable through backend 'triton'; use backend='reference'"):
        torch.func.grad(lambda q: token(q).sum())(q_window)


def test_lengths_of_decode_within_vmap() -> None:
    """Where a CPU has them they are checked, which vmap does not let anybody do."""
    tensors, options = decode_inputs()
    lengths = torch.stack([options["lengths"], options["lengths"] - 1])

    def token(lengths: Tensor) -> Tensor:
        return conv_attention_decode(*tensors, **options | {"lengths": lengths}, backend="reference")

    torch.testing.assert_close(torch.func.vmap(token)(lengths), torch.stack([token(x) for x in lengths]))


def test_fake_tensors() -> None:
    """They have no numbers, of which a CPU would check those of lengths and bounds."""
    inputs, bounds = [x.detach() for x in small()], torch.tensor([0, 8, 20], device=DEVICE)
    with FakeTensorMode() as mode:
        q, k, v, weight, bounds = map(mode.from_tensor, (*inputs, bounds))
        packed = conv_attention(q, k, v, weight, cu_seqlens=bounds, backend="triton")
        token = conv_attention_decode(q[:, :, :3], k, v, weight, lengths=bounds[:1], backend="triton")
    assert (packed.shape, token.shape) == (q.shape, q[:, :, :1].shape)


def test_decode_says_that_it_has_no_gradient() -> None:
    (q_window, *others), options = decode_inputs()
    want = conv_attention_decode(q_window, *others, **options, backend="triton")
    assert not want.requires_grad
    out = conv_attention_decode(q_window.requires_grad_(), *others, **options, backend="triton")
    assert torch.equal(out, want)
    with pytest.raises(RuntimeError, match="not differentiable through backend 'triton'; use backend='reference'"):
        out.sum().backward()
    with torch.no_grad():
        assert not conv_attention_decode(q_window, *others, **options, backend="triton").requires_grad


def test_raw_operators_refuse_what_the_public_functions_refuse() -> None:
    (q, k, v, weight), options = decode_inputs()
    apart = k.mT.contiguous().mT
    with pytest.raises(ValueError, match=r"backend .triton. cannot run this: the caches have strides .* side by side"):
        torch.ops.mta.conv_attention_decode(q, apart, v, weight, options["lengths"], None, None, "both", 0, "triton")
    for backend, words in (("hopper", "has no decode"), ("reference", "has no decode"), ("tritn", "expected 'auto'")):
        with pytest.raises(ValueError, match=words):
            torch.ops.mta.conv_attention_decode(q, k, v, weight, options["lengths"], None, None, "both", 0, backend)
    with pytest.raises(ValueError, match="backend 'reference' has no forward"):
        torch.ops.mta.conv_attention(*(x.detach() for x in small()), *OPTIONS, "reference")


def test_decode_by_the_reference_has_the_gradients_of_the_last_row() -> None:
    inputs = small(17, dtype=torch.float64)
    whole = conv_attention(*inputs, backend="reference")[:, :, -1:]
    want = torch.autograd.grad(whole.square().sum(), inputs)
    q, *others = inputs
    lengths = torch.tensor([17], device=DEVICE)
    token = conv_attention_decode(q[:, :, -3:], *others, lengths=lengths, backend="reference")
    got = torch.autograd.grad(token.square().sum(), inputs)
    assert all(x.any() for x in got)
    torch.testing.assert_close(got, want)


@pytest.mark.parametrize("backend", ["reference", "auto"])
def test_shapes_on_the_meta_device(backend: str) -> None:
    q, k, v, weight = (x.to("meta") for x in small())
    out = conv_attention(q[:, :, 8:], k, v, weight, q_history=q[:, :, :8], backend=backend)
    assert out.shape == (1, 2, 12, 16)
    assert out.requires_grad
