"""Calls that repeat an earlier one: by tensors of their own, refused as before, and seen by all who watch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from emulated_hopper import emulator  # noqa: F401
from kernel_inputs import DEVICE, make
from torch import Tensor
from torch.autograd import forward_ad
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

pytest.importorskip("triton")

from mta_kernels import gpu_limits
from mta_kernels.conv_attention import conv_attention
from mta_kernels.multi_token_attention import multi_token_attention

ON_HOPPER = DEVICE == "cuda" and torch.cuda.get_device_capability() == (9, 0)
BF16, FP32 = torch.bfloat16, torch.float32


class Seen(TorchDispatchMode):
    """Keeps the operators that run, which belong to a first call: nothing is repeated beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.names.append(str(function))
        return function(*args, **(kwargs or {}))


class Functions(TorchFunctionMode):
    def __torch_function__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))


class Subclass(Tensor):
    """May be anything."""


class Calls:
    """Calls of a backend with named tensors."""

    def __init__(self, name: str) -> None:
        self.name, self.is_mta = name, name == "mta"
        self.backend = "hopper" if name == "hopper" else "triton"
        self.function: Callable[..., Tensor] = multi_token_attention if self.is_mta else conv_attention
        self.operator = "mta.multi_token_attention" if self.is_mta else "mta.conv_attention"
        self.dtype = BF16 if name == "hopper" else FP32

    def tensors(self, seed: int = 0) -> dict[str, Tensor]:
        q, k, v, weight = make(1, 2, 1, 5, 16, (2, 3), self.dtype, seed=seed)
        mix = torch.randn(2, 2, generator=torch.Generator().manual_seed(seed)).to(DEVICE)
        return {"q": q, "k": k, "v": v} | ({"pre_mix": mix, "post_mix": mix.mT} if self.is_mta else {"weight": weight})

    def __call__(self, tensors: dict[str, Tensor], **options: Any) -> Tensor:
        return self.function(**{"backend": self.backend, **tensors, **options})

    def results(self, tensors: dict[str, Tensor], grad_out: Tensor | None = None, **options: Any) -> list[Tensor]:
        """The output and all gradients."""
        leaves = {name: x.detach().requires_grad_() for name, x in tensors.items() if x is not None}
        out = self(leaves, **options)
        return [
            out.detach(),
            *torch.autograd.grad(out, [*leaves.values()], out.detach() if grad_out is None else grad_out),
        ]


@pytest.fixture(params=["hopper", "triton", "mta"])
def calls(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Calls:
    """Of a backend, three of which were made, one of them without gradients."""
    monkeypatch.setattr(gpu_limits, "INTERPRETED_SM_COUNT", 2)
    if request.param == "hopper" and not ON_HOPPER:
        request.getfixturevalue("emulator")
    found = Calls(request.param)
    for seed in range(2):
        found.results(found.tensors(seed))
    with torch.no_grad():
        found(found.tensors())
    return found


def as_first(run: Callable[[], Any]) -> Any:
    with Seen():
        return run()


def assert_equal(got: list[Tensor], want: list[Tensor]) -> None:
    for a, b in zip(got, want, strict=True):
        assert torch.equal(a, b)
        assert a.stride() == b.stride()


def test_a_repeated_call_has_its_own_tensors(calls: Calls) -> None:
    for seed in (3, 4, 3):
        tensors = calls.tensors(seed)
        assert_equal(calls.results(tensors), as_first(lambda x=tensors: calls.results(x)))


CHANGES: dict[str, Any] = {
    "causal": False, "scale": 0.3, "pad_key": "left", "backend": "auto",
    "q": lambda q: q.transpose(1, 2).contiguous().transpose(1, 2),
    "k": lambda k: torch.stack([k, k], 4)[..., 0],
    "v": lambda v: torch.cat([v.new_zeros(1), v.flatten()])[1:].view(v.shape),
    "weight": lambda weight: weight.mT.contiguous().mT.float(),
    "pre_mix": lambda mix: mix.half().float().mT.contiguous().mT,
}  # fmt: skip


def test_another_call_is_looked_at(calls: Calls) -> None:
    """With other options, strides, addresses or dtypes, and as often as it is made."""
    for name, change in CHANGES.items():
        tensors, options = calls.tensors(5), {}
        if callable(change):
            if name not in tensors:
                continue
            tensors[name] = change(tensors[name])
        else:
            options = {name: change}
        want = as_first(lambda x=tensors, y=options: calls.results(x, **y))
        for _ in range(2):
            assert_equal(calls.results(tensors, **options), want)


def test_gradients_that_lie_otherwise_are_looked_at(calls: Calls) -> None:
    tensors = calls.tensors(5)
    normal = torch.randn(1, 2, 5, 16, generator=torch.Generator().manual_seed(1)).to(tensors["q"])
    shifted = torch.cat([normal.new_zeros(1), normal.flatten()])[1:].view(normal.shape)
    turned, expanded = normal.transpose(1, 2).contiguous().transpose(1, 2), normal[:, :, :1, :1].expand(normal.shape)
    for grad_out in (normal, shifted, turned, expanded, torch._neg_view(normal)):
        want = as_first(lambda x=grad_out: calls.results(tensors, x))
        for _ in range(2):
            assert_equal(calls.results(tensors, grad_out), want)


def test_what_does_not_fit_is_refused_as_before(calls: Calls) -> None:
    tensors = calls.tensors()
    for change, words in (
        ({"v": tensors["v"][:, :, 1:]}, "they must be the same"),
        ({"v": tensors["v"].double()}, "v has dtype torch.float64"),
        ({"q": [1]}, "q is a list"),
        ({"pad_key": ["both"]}, "pad_key is"),
        ({"causal": "no"}, "causal is 'no'"),
        ({"backend": ["hopper"]}, r"backend is \['hopper'\]"),
        ({"pre_mix": tensors["v"].to("meta")[0, 0, :2, :2]}, "pre_mix is on meta"),
        ({"depth": True, "norm_weight": tensors["q"][0, 0, 0]}, "depth is True"),
        ({"weight": tensors["q"].to("meta")}, "weight has shape|weight is on meta"),
        ({"head_chunk": 7}, "head_chunk is 7"),
    ):
        if ({"pre_mix", "depth"} & {*change} and not calls.is_mta) or (
            {"weight", "head_chunk"} & {*change} and calls.is_mta
        ):
            continue
        with pytest.raises((ValueError, TypeError), match=words):
            calls(tensors | change)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning")
def test_those_who_watch_see_the_operators(calls: Calls) -> None:
    tensors = calls.tensors()
    with Seen() as seen:
        calls.results(tensors)
    names = [f"{calls.operator}.default", f"{calls.operator}_backward.default"]
    assert {*names} <= {*seen.names}
    with torch.profiler.profile() as profile:
        calls.results(tensors)
    profiled = [event.name for event in profile.events()]
    assert {name.removesuffix(".default").replace(".", "::") for name in names} <= {*profiled}
    want = calls.results(tensors)
    with Functions():
        assert_equal(calls.results(tensors), want)
    assert_equal(calls.results(tensors | {"k": tensors["k"].as_subclass(Subclass)}), want)
    assert_equal(calls.results(tensors | {"q": torch._neg_view(-tensors["q"])}), want)
    zeros = torch._efficientzerotensor(tensors["q"].shape, dtype=calls.dtype, device=DEVICE)
    with torch.no_grad():
        assert_equal([calls(tensors | {"q": zeros})], [calls(tensors | {"q": torch.zeros_like(tensors["q"])})])
    traced = torch.jit.trace(lambda q: calls(tensors | {"q": q}), tensors["q"], check_trace=False)
    assert_equal([traced(tensors["q"])], want[:1])
    leaves = {name: x.detach().requires_grad_() for name, x in tensors.items()}
    grads = torch.stack([want[0], want[0] / 2])
    out = calls(leaves)
    batched = torch.autograd.grad(out, [*leaves.values()], grads, is_grads_batched=True)
    assert_equal([x[0].contiguous() for x in batched[:3]], [x.contiguous() for x in want[1:4]])


def test_derivatives_that_there_are_not_are_refused(calls: Calls) -> None:
    tensors = calls.tensors()
    for name, x in tensors.items():
        with forward_ad.dual_level(), pytest.raises(RuntimeError, match="no forward-mode derivatives"):
            calls(tensors | {name: forward_ad.make_dual(x, torch.ones_like(x))})
    leaves = {name: x.requires_grad_() for name, x in tensors.items()}
    out = calls(leaves)
    with forward_ad.dual_level(), pytest.raises(RuntimeError, match="no forward-mode derivatives"):
        out.backward(forward_ad.make_dual(torch.ones_like(out), torch.ones_like(out)))
    (dq,) = torch.autograd.grad(calls(leaves).float().square().sum(), leaves["q"], create_graph=True)
    with pytest.raises(RuntimeError, match=f"differentiable once through backend '{calls.backend}'"):
        dq.sum().backward()


@pytest.mark.parametrize("inference", [torch.no_grad, torch.inference_mode])
def test_gradients_are_of_calls_that_ask_for_them(calls: Calls, inference: Any) -> None:
    tensors = calls.tensors(1)
    leaves = {name: x.clone().requires_grad_() for name, x in tensors.items()}
    with inference():
        assert not any(calls(leaves).requires_grad for _ in range(2))
    assert calls(leaves).requires_grad
    calls(tensors | {"v": leaves["v"]}).float().sum().backward()
    assert leaves["v"].grad is not None
    assert leaves["q"].grad is None


def test_autocast_casts_before(calls: Calls) -> None:
    """To what it casts just then: a call is not like one before it that needed no cast."""
    half = torch.float16 if calls.dtype == FP32 else BF16  # which Triton's interpreter multiplies
    tensors = {name: x.float() for name, x in calls.tensors().items()}
    cast = {name: x if x.dim() < 4 else x.to(half) for name, x in tensors.items()}
    with torch.no_grad():
        want = calls(cast)
        for given in (tensors, cast, tensors):
            with torch.autocast(DEVICE, half):
                assert_equal([calls(given)], [want])
        assert_equal([calls(cast)], [want])
        with torch.autocast(DEVICE, torch.float16):
            assert calls(tensors).dtype == torch.float16
