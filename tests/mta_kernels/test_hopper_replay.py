"""Hopper's calls that repeat an earlier one, with kernels that are stood in for: which do, and with what."""

from __future__ import annotations

import ctypes
from dataclasses import replace

import pytest
import torch
from counted_launches import Machine
from kernel_inputs import Stop, make
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.overrides import TorchFunctionMode
from watching import Seen, Subclass

from mta_kernels import call_memory
from mta_kernels.conv_attention import conv_attention, operators, replay
from mta_kernels.conv_attention.backends import CONV_ATTENTION
from mta_kernels.conv_attention.hopper import backend, backward, forward, prepare, tensor_maps

BF16 = torch.bfloat16


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    found = Machine()
    found.take_over(monkeypatch, prepare)
    for module in (prepare, forward, backward):
        monkeypatch.setattr(module, "kernel", lambda constants, device: constants.kernel_name)
    for module in (forward, backward):
        monkeypatch.setattr(
            module, "tensor_map", lambda x, **box: tensor_maps.TensorMap((ctypes.c_uint64 * 16)(x.data_ptr()))
        )
        monkeypatch.setattr(module, "_launches", {})
    for name in ("_seen", "_seen_backward"):
        monkeypatch.setattr(replay, name, call_memory.CallMemory())
    monkeypatch.setattr(backend, "platform_unsupported", lambda device: None)
    return found


def inputs(seed: int = 0, **options) -> list[Tensor]:
    return [x.cpu() for x in make(1, 2, 1, 70, 64, (6, 11), BF16, seed=seed, **options)]  # the machine reads addresses


def first(*tensors: Tensor, **options) -> float:
    """What out begins with."""
    return conv_attention(*tensors, backend="hopper", **options)[0, 0, 0, 0].item()


def expected(*tensors: Tensor) -> float:
    return torch.tensor(sum(x.flatten()[0].item() for x in tensors), dtype=BF16).item()


@pytest.fixture
def operator_calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple]:
    """Arguments of the operator, at each call of it."""
    calls: list[tuple] = []
    operator = operators.CONV_ATTENTION
    monkeypatch.setattr(operators, "CONV_ATTENTION", lambda *x: (calls.append(x), operator(*x))[1])
    return calls


def test_this_pytorch_can_be_asked_who_watches(monkeypatch: pytest.MonkeyPatch, operator_calls) -> None:
    """One that could not would lose the shortcut, and nothing else."""
    assert call_memory.CAN_COMPARE
    monkeypatch.setattr(call_memory, "CAN_COMPARE", False)
    tensors = inputs()
    assert first(*tensors) == first(*tensors) == expected(*tensors)
    assert len(operator_calls) == 2


def test_a_repeated_call_has_its_own_tensors_and_no_operator(machine: Machine, operator_calls) -> None:
    for seed in range(3):
        tensors = inputs(seed)
        assert first(*tensors) == expected(*tensors)
    assert len(operator_calls) == 1
    assert machine.launched == ["hopper_prepare", "hopper_forward"] * 3


def test_addresses_that_return_are_described_once(monkeypatch: pytest.MonkeyPatch) -> None:
    described = []
    describe = forward.tensor_map
    monkeypatch.setattr(forward, "tensor_map", lambda x: (described.append(x), describe(x))[1])
    one, other = inputs(0), inputs(1)
    for tensors in (one, other, one, other):
        assert first(*tensors) == expected(*tensors)
    assert len(described) == 6


@pytest.mark.parametrize(
    "change",
    [
        {"causal": False},
        {"scale": 0.3},
        {"pad_key": "left"},
        {"backend": "auto"},
        {"k": lambda k: k.transpose(1, 2).contiguous().transpose(1, 2).expand(1, 2, 70, 64)},
        {"weight": lambda weight: weight.float()},
        {"weight": lambda weight: weight.transpose(1, 2).contiguous().transpose(1, 2)},
        {"head_chunk": 1},
    ],
    ids=[
        "causal",
        "scale",
        "pad_key",
        "backend",
        "strides of k",
        "dtype of the weight",
        "strides of the weight",
        "heads",
    ],
)
def test_another_call_is_looked_at(operator_calls, change: dict) -> None:
    tensors = dict(zip(("q", "k", "v", "weight"), inputs(), strict=True))
    conv_attention(**tensors, backend="hopper")
    changed = {name: x(tensors[name]) if callable(x) else x for name, x in change.items()}
    if "k" in changed:
        changed["v"] = changed["k"]
    conv_attention(**({"backend": "hopper"} | tensors | changed))
    assert len(operator_calls) == 2


def test_inputs_that_the_copy_engine_cannot_describe_are_copied(operator_calls) -> None:
    q, k, v, weight = inputs()
    first(q, k, v, weight)
    shifted = torch.cat([q.new_zeros(1), q.flatten()])[1:].view(q.shape)
    assert shifted.data_ptr() % 16
    strided = torch.stack([q, q], dim=4)[..., 0]
    for tensors in ((shifted, k, v, weight), (strided, k, v, weight), (strided, k, v, weight)):
        assert first(*tensors) == expected(*tensors)
    assert len(operator_calls) == 2


def test_what_does_not_fit_is_told_as_before() -> None:
    q, k, v, weight = inputs()
    first(q, k, v, weight)
    for tensors, options, words in (
        ((q, k, v[:, :, 1:], weight), {}, "they must be the same"),
        ((q, k, v.half(), weight), {}, "v has dtype torch.float16"),
        ((q, k, v, weight.to("meta")), {}, "weight is on meta"),
        ((q, k, v, weight), {"pad_key": ["both"]}, "pad_key is"),
        ((q, k, v, weight), {"head_chunk": 7}, "head_chunk is 7"),
    ):
        with pytest.raises((ValueError, TypeError), match=words):
            first(*tensors, **options)
    with pytest.raises(ValueError, match="backend is \\['hopper'\\]"):
        conv_attention(q, k, v, weight, backend=["hopper"])


class Functions(TorchFunctionMode):
    def __torch_function__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning")
def test_those_who_watch_see_the_operator(operator_calls) -> None:
    tensors = inputs()
    first(*tensors)
    with Seen() as seen:
        conv_attention(*tensors, backend="hopper")
    assert torch.ops.mta.conv_attention.default in seen.ops
    with torch.profiler.profile() as profile:
        conv_attention(*tensors, backend="hopper")
    assert "mta::conv_attention" in [event.name for event in profile.events()]
    with Functions():
        conv_attention(*tensors, backend="hopper")
    conv_attention(tensors[0].as_subclass(Subclass), *tensors[1:], backend="hopper")
    torch.func.vmap(lambda x: (conv_attention(*tensors, backend="hopper"), x)[1])(torch.zeros(2))
    torch.jit.trace(lambda x: conv_attention(x, *tensors[1:], backend="hopper"), tensors[0], check_trace=False)
    assert len(operator_calls) == 7
    conv_attention(*tensors, backend="hopper")
    assert len(operator_calls) == 7


def test_numbers_that_are_not_in_memory_are_made_first() -> None:
    q, k, v, weight = inputs()
    first(q, k, v, weight)
    negative, zero = torch._neg_view(q), torch._efficientzerotensor(q.shape, dtype=BF16)
    assert first(negative, k, v, weight) == expected(-q, k, v, weight)
    assert first(zero, k, v, weight) == expected(torch.zeros_like(q), k, v, weight)


def test_dual_tensors_are_seen() -> None:
    """They look like the tensors of the call before."""
    tensors = inputs()
    first(*tensors)
    for place, x in enumerate(tensors):
        with forward_ad.dual_level(), pytest.raises(RuntimeError, match="no forward-mode derivatives"):
            first(*tensors[:place], forward_ad.make_dual(x, torch.ones_like(x)), *tensors[place + 1 :])
    for _ in range(3):
        gradients(*tensors)
    out = conv_attention(*(x.requires_grad_() for x in tensors), backend="hopper")
    with forward_ad.dual_level(), pytest.raises(RuntimeError, match="no forward-mode derivatives"):
        out.backward(forward_ad.make_dual(torch.ones_like(out), torch.ones_like(out)))


def test_an_undefined_gradient_stays_undefined(machine: Machine) -> None:
    leaves = [x.requires_grad_() for x in inputs()]
    for _ in range(3):  # the first by the operator, the others as calls like it
        out = Stop.apply(conv_attention(*leaves, backend="hopper"))
        assert torch.autograd.grad(out.sum(), leaves, allow_unused=True) == (None,) * 4
    assert "hopper_backward" not in machine.launched


def test_autocast_casts_before(operator_calls) -> None:
    """To what it casts just then: a call is not like one before it that needed no cast."""
    q, k, v, weight = inputs()
    first(q, k, v, weight)
    for calls in (2, 2):
        with torch.autocast("cpu", BF16):
            assert first(q.float(), k, v, weight) == expected(q, k, v, weight)
            assert first(q, k, v, weight) == expected(q, k, v, weight)
        assert len(operator_calls) == calls
    with torch.autocast("cpu", torch.float16):
        assert conv_attention(q, k, v, weight, backend="hopper").dtype == torch.float16
    assert len(operator_calls) == 3
    assert first(q, k, v, weight) == expected(q, k, v, weight)
    assert len(operator_calls) == 3


@pytest.mark.parametrize("inference", [torch.no_grad, torch.inference_mode])
def test_gradients_are_asked_of_a_repeated_call_too(monkeypatch: pytest.MonkeyPatch, operator_calls, inference) -> None:
    def backward(operation, q, k, v, weight, out, logsumexp, grad_out, **options):
        assert (operation.causal, operation.scale, options) == (True, 64**-0.5, {"head_chunk": 0, "spans": None})
        return q * 2, k * 3, v * 4, weight * 5

    planted = replace(backend.HOPPER, backward=backward, replay_backward=None)
    monkeypatch.setattr(CONV_ATTENTION, "kernels", (planted,))
    q, k, v, weight = inputs()
    with inference():
        for _ in range(2):
            assert not conv_attention(q, k, v, nn.Parameter(weight), backend="hopper").requires_grad
    assert len(operator_calls) == 1
    operator_calls.clear()
    for _ in range(2):
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        parameter = nn.Parameter(weight)
        out = conv_attention(leaves[0], leaves[1], v, parameter, backend="hopper")
        out.sum().backward()
        for x, factor in ((leaves[0], 2), (leaves[1], 3), (parameter, 5)):
            assert torch.equal(x.grad, x.detach() * factor)
        assert len(operator_calls) == 1
    with inference():
        assert not conv_attention(*leaves, parameter, backend="hopper").requires_grad


def gradients(*tensors: Tensor, seed: int = 0, grad_out: Tensor | None = None, **options) -> list[Tensor]:
    """Those that a machine of this file computes, checked."""
    leaves = [x.detach().requires_grad_() for x in tensors]
    with torch.enable_grad():  # which is off in another's backward
        out = conv_attention(*leaves, backend="hopper")
    if grad_out is None:
        grad_out = torch.randn(out.shape, generator=torch.Generator().manual_seed(seed)).to(BF16)
    dq, dk, dv, dweight = found = torch.autograd.grad(out, leaves, grad_out, **options)
    begin = [x.flatten()[0] for x in (*tensors, out.detach(), grad_out)]
    assert dq.flatten()[0] == torch.tensor(sum(x.item() for x in begin), dtype=BF16)
    for x, value in ((dk, begin[5]), (dv, begin[2]), (dweight, begin[3])):
        assert torch.equal(x, torch.full_like(x, 2 * value.item()))
    assert [(x.shape, x.dtype, x.stride()) for x in found] == [(x.shape, x.dtype, x.stride()) for x in tensors]
    return found


@pytest.fixture
def backward_calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple]:
    """Arguments of the backward, each time that the operator runs it."""
    calls: list[tuple] = []
    run = backend.HOPPER.backward
    counted = replace(backend.HOPPER, backward=lambda *x, **options: (calls.append(x), run(*x, **options))[1])
    monkeypatch.setattr(CONV_ATTENTION, "kernels", (counted,))
    return calls


def test_a_repeated_backward_has_its_own_tensors_and_no_operator(machine: Machine, backward_calls) -> None:
    """The operator runs that of the first call, and then that of the first repeated one."""
    for seed in range(5):
        gradients(*inputs(seed), seed=seed)
    assert len(backward_calls) == 2
    assert (
        machine.launched
        == ["hopper_prepare", "hopper_forward", "hopper_prepare", "hopper_backward", "backward_exact"] * 5
    )


def test_gradients_that_lie_otherwise_are_looked_at(backward_calls) -> None:
    for seed in range(3):
        gradients(*inputs(seed))
    grad_out = torch.randn(1, 2, 70, 64).to(BF16)
    shifted = torch.cat([grad_out.new_zeros(1), grad_out.flatten()])[1:].view(grad_out.shape)
    gradients(*inputs(), grad_out=shifted)  # copied
    assert len(backward_calls) == 2
    for calls, other in ((3, grad_out.transpose(1, 2).contiguous().transpose(1, 2)), (4, grad_out[:, :, :1, :1])):
        for _ in range(2):
            gradients(*inputs(), grad_out=other.expand(grad_out.shape))
            assert len(backward_calls) == calls
    gradients(*inputs(), grad_out=torch._neg_view(grad_out))
    assert len(backward_calls) == 5


def test_those_who_watch_see_the_backward_s_operator(backward_calls) -> None:
    for seed in range(3):
        gradients(*inputs(seed))
    leaves = [x.requires_grad_() for x in inputs()]
    grad_out = torch.randn(2, 1, 2, 70, 64).to(BF16)

    def again() -> Tensor:
        return conv_attention(*leaves, backend="hopper")

    def backward_of(out: Tensor) -> None:
        torch.autograd.grad(out, leaves, grad_out[0])

    backward_calls.clear()
    backward_of(again())
    assert not backward_calls
    out = again()
    with Seen() as seen:
        backward_of(out)
    assert torch.ops.mta.conv_attention_backward.default in seen.ops
    out = again()
    with torch.profiler.profile() as profile:
        backward_of(out)
    assert "mta::conv_attention_backward" in [event.name for event in profile.events()]
    torch.autograd.grad(again(), leaves, grad_out[0].as_subclass(Subclass))
    torch.autograd.grad(again(), leaves, grad_out, is_grads_batched=True)
    with torch.autocast("cpu", BF16):
        backward_of(again())
    assert len(backward_calls) == 6  # of a batch of gradients one each
    twice = torch.autograd.grad(again(), leaves[:1], grad_out[0], create_graph=True)
    with pytest.raises(RuntimeError, match="differentiable once through backend 'hopper'"):
        twice[0].sum().backward()
    calls = len(backward_calls)
    backward_of(again())
    assert len(backward_calls) == calls


def test_backwards_within_backwards_share_no_arguments(machine: Machine) -> None:
    """As those of two threads may."""
    for seed in range(3):
        gradients(*inputs(seed))
    leaves = [x.requires_grad_() for x in inputs(1)]
    out, grad_out = conv_attention(*leaves, backend="hopper"), torch.ones(1, 2, 70, 64, dtype=BF16)
    found = []
    machine.interrupt = lambda: found.append(gradients(*inputs(2), seed=2))
    dq, dk, dv, _ = torch.autograd.grad(out, leaves, grad_out)
    assert found
    assert (dk.unique(), dv.unique()) == (2, 2 * leaves[2].flatten()[0])
    assert dq.flatten()[0] == expected(*leaves, out, grad_out)


def test_calls_within_calls_share_no_arguments(machine: Machine) -> None:
    """As two threads may: the second call begins between the launches of the first."""
    one, other = inputs(0), inputs(1)
    first(*one)
    found = []
    machine.interrupt = lambda: found.append(first(*other))
    assert first(*one) == expected(*one)
    assert found == [expected(*other)]
