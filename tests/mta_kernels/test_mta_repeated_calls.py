"""Multi-token attention called again: what is not checked again, and who still sees the operators."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from fake_mta_backend import FAKE
from torch import Tensor, nn
from torch.autograd import forward_ad
from watching import Seen, Subclass

from mta_kernels import call_memory, operator_gradients
from mta_kernels.multi_token_attention import api, multi_token_attention, operators
from mta_kernels.multi_token_attention.backends import MULTI_TOKEN_ATTENTION

FORWARD, BACKWARD = operators.MULTI_TOKEN_ATTENTION, operators.MULTI_TOKEN_ATTENTION_BACKWARD


@pytest.fixture(autouse=True)
def fake(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MULTI_TOKEN_ATTENTION, "kernels", (FAKE,))


@pytest.fixture
def checks(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Grows by one at each call that is checked."""
    found: list[Any] = []
    check = api.check_arguments
    monkeypatch.setattr(api, "check_arguments", lambda *x, **y: (found.append(x), check(*x, **y))[1])
    return found


def inputs(seed: int = 0, **more: Tensor) -> dict[str, Tensor]:
    torch.manual_seed(seed)
    shapes = {"q": (1, 4, 12, 8), "k": (1, 2, 12, 8), "v": (1, 2, 12, 8)}
    shapes |= {"pre_conv": (4, 3, 2), "pre_mix": (4, 4), "post_mix": (2, 2, 2), "norm_weight": (8,)}
    return {name: torch.randn(shape).mul(0.5).requires_grad_() for name, shape in shapes.items()} | more


def gradients(given: dict[str, Tensor], backend: str = "fake", **options: Any) -> list[Tensor]:
    out = multi_token_attention(**given, backend=backend, **options)
    leaves = [x for x in given.values() if x.requires_grad]
    return [out.detach(), *torch.autograd.grad(out.square().sum(), leaves)]


def test_a_call_like_one_before_is_not_checked_and_has_its_own_tensors(checks: list) -> None:
    for seed in range(3):
        given = inputs(seed)
        got, want = gradients(given), gradients(given, "reference")
        for a, b in zip(got, want, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)
    assert len(checks) == 1 + 3  # each of the reference's


@pytest.mark.parametrize(
    "change",
    [
        {"causal": False}, {"scale": 0.3}, {"pad_key": "left"}, {"norm_eps": 1e-3}, {"depth": 2}, {"backend": "auto"},
        {"q": lambda q: q.transpose(1, 2).contiguous().transpose(1, 2)}, {"pre_mix": lambda mix: mix.detach()},
        {"pre_mix": lambda mix: None}, {"post_mix": lambda mix: mix.repeat(2, 1, 1)[:2]},
        {"q_history": lambda _: torch.randn(1, 4, 3, 8)}, {"norm_weight": nn.Parameter},
    ],
    ids=lambda change: next(iter(change)),
)  # fmt: skip
def test_another_call_is_checked(checks: list, change: dict[str, Any]) -> None:
    given = inputs()
    multi_token_attention(**given, backend="fake")
    ((name, changed),) = change.items()
    changed = changed(given.get(name)) if callable(changed) else changed
    if name == "post_mix":  # as it was, but for strides
        changed = changed.mT.contiguous().mT.detach().requires_grad_()
    for _ in range(2):
        multi_token_attention(**{"backend": "fake", **given, name: changed})
    assert len(checks) == (3 if name == "q_history" else 2)  # and what is not like it is known from then on
    with torch.no_grad():
        multi_token_attention(**given, backend="fake")
    assert len(checks) == (4 if name == "q_history" else 3)
    multi_token_attention(**given, backend="fake")
    assert len(checks) == (4 if name == "q_history" else 3)


def test_what_does_not_fit_is_told_as_before() -> None:
    given = inputs()
    for _ in range(2):
        multi_token_attention(**given, depth=1, backend="fake")
    for change, words in (
        ({"v": given["v"][:, :, 1:]}, "they must be the same"),
        ({"v": given["v"].half()}, "v has dtype torch.float16"),
        ({"pre_mix": given["pre_mix"][:3]}, "pre_mix has shape"),
        ({"pre_mix": given["pre_mix"].to("meta")}, "pre_mix is on meta"),
        ({"depth": True}, "depth is True"),
        ({"norm_eps": -1.0}, "norm_eps is -1.0"),
        ({"pad_key": ["both"]}, "pad_key is"),
        ({"dropout": False}, "dropout is False"),
        ({"seed": -1}, "seed is -1"),
        ({"causal": "no"}, "causal is 'no'"),
        ({"q": [1]}, "q is a list"),
    ):
        with pytest.raises((ValueError, TypeError), match=words):
            multi_token_attention(**{"depth": 1, "backend": "fake", **given, **change})


def test_where_pytorch_cannot_be_asked_each_call_is_checked(monkeypatch: pytest.MonkeyPatch, checks: list) -> None:
    monkeypatch.setattr(call_memory, "CAN_COMPARE", False)
    given = inputs()
    for _ in range(2):
        multi_token_attention(**given, backend="fake")
    assert len(checks) == 2


@pytest.fixture
def unseen(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The operators that are not called: what they come to is."""
    found: list[Any] = []

    def counted(op: Any) -> tuple:
        kernel, apply, first = operator_gradients._unseen[op]
        return lambda *x: (found.append(op), kernel(*x))[1], apply, first

    for op in (FORWARD, BACKWARD):
        monkeypatch.setitem(operator_gradients._unseen, op, counted(op))
    return found


def test_nobody_who_watches_misses_an_operator(unseen: list) -> None:
    given = inputs()
    for _ in range(2):
        gradients(given)
    assert unseen == [FORWARD, BACKWARD] * 2
    unseen.clear()
    with Seen() as seen:
        gradients(given)
    assert {FORWARD, BACKWARD} <= set(seen.ops)
    with torch.profiler.profile() as profile:
        gradients(given)
    names = [event.name for event in profile.events()]
    assert {"mta::multi_token_attention", "mta::multi_token_attention_backward"} <= set(names)
    gradients({**given, "k": given["k"].detach().as_subclass(Subclass).requires_grad_()})
    gradients({**given, "k": torch._neg_view(given["k"].detach()).requires_grad_()})
    assert not unseen


def test_dual_tensors_are_seen() -> None:
    given = {name: x.detach() for name, x in inputs().items()}
    for _ in range(2):
        multi_token_attention(**given, backend="fake")
    for name, x in given.items():
        if name == "norm_weight":  # of what follows the kernels
            continue
        with forward_ad.dual_level(), pytest.raises(RuntimeError, match="no forward-mode derivatives"):
            multi_token_attention(**{**given, name: forward_ad.make_dual(x, torch.ones_like(x))}, backend="fake")


def test_second_derivatives_are_refused_by_a_known_call_too() -> None:
    given = inputs()
    gradients(given)
    out = multi_token_attention(**given, backend="fake")
    (dq,) = torch.autograd.grad(out.sum(), given["q"], create_graph=True)
    with pytest.raises(RuntimeError, match="differentiable once through backend 'fake'"):
        dq.sum().backward()
