"""Faults around a right multi-token attention, for the fuzz to find: see `fuzz_faults`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from fuzz.calls import Operation
from fuzz.cases import Target
from fuzz_faults import SMALL, Fault, as_if_contiguous, with_changed_gradient
from torch import Tensor

from mta_kernels.multi_token_attention import (
    DecodeState,
    multi_token_attention,
    multi_token_attention_decode,
    prefill_state,
)

MTA_FAULTS: dict[str, Fault] = {}


def _enter(name: str, functions: Operation, decode: bool = False) -> None:
    MTA_FAULTS[name] = Fault(lambda: functions, Target("mta", "eager", decode))


def fault(name: str, decode: bool = False) -> Callable:
    """Enter what changes the options of an attention, or of a decode step, before the right one is called."""

    def enter(change: Callable[[dict[str, Any]], None]) -> Callable:
        right = multi_token_attention_decode if decode else multi_token_attention

        def wrong(*tensors: Tensor, **options: Any) -> Tensor:
            change(options)
            return right(*tensors, **options)

        _enter(name, Operation(**{"mta_decode" if decode else "mta": wrong}), decode)
        return change

    return enter


def after(name: str) -> Callable:
    """Enter what changes the output `(out, q, k, v, options) -> out` of the right attention."""

    def enter(change: Callable[..., Tensor]) -> Callable:
        def wrong(*tensors: Tensor, **options: Any) -> Tensor:
            return change(multi_token_attention(*tensors, **options), *tensors, options)

        _enter(name, Operation(mta=wrong))
        return change

    return enter


def _of(name: str, change: Callable[[Tensor], Tensor]) -> Callable[[dict[str, Any]], None]:
    """A change of one option, where a call has it."""

    def changed(options: dict[str, Any]) -> None:
        if options.get(name) is not None:
            options[name] = change(options[name])

    return changed


for _name in ("pre_conv", "pre_mix", "post_conv", "post_mix", "norm_weight", "gate_weight"):
    fault(f"2 % off in d{_name}")(_of(_name, lambda x: with_changed_gradient(x, lambda gradient: gradient * 1.02)))
fault("pre_mix taken as (in, out)")(_of("pre_mix", lambda mix: mix.mT))
fault("post_mix taken as (out, in)")(_of("post_mix", lambda mix: mix.mT))
fault("groups of heads mixed up")(_of("pre_mix", lambda mix: mix.roll(1, 0) if mix.dim() == 3 else mix))
fault("strides of post_mix ignored")(_of("post_mix", as_if_contiguous))
fault("the oldest tap after the softmax lost")(
    _of("post_conv", lambda taps: taps * (torch.arange(taps.shape[1]) > 0)[:, None] if taps.shape[1] > 1 else taps)
)
fault("q_history of the second convolution ignored")(
    _of("q_history", lambda queries: queries * (torch.arange(queries.shape[2]) > 0)[:, None])
)
fault("gate_bias ignored")(_of("gate_bias", lambda bias: bias * 0))
fault("norm_eps ignored")(_of("norm_eps", lambda eps: 1e-5))
fault("depth taken from 1")(_of("depth", lambda depth: depth + 1))
fault("dropout of another seed")(_of("seed", lambda seed: seed + 1))


def _in_gradient(name: str, at: int, change: Callable[[Tensor, dict[str, Any]], Tensor]) -> None:
    """Enter a change of the gradient of q, k or v."""

    def wrong(*tensors: Tensor, **options: Any) -> Tensor:
        given = list(tensors)
        given[at] = with_changed_gradient(given[at], lambda gradient: change(gradient, options))
        return multi_token_attention(*given, **options)

    _enter(name, Operation(mta=wrong))


def _not_written(gradient: Tensor, options: dict[str, Any]) -> Tensor:
    """As of keys behind a chunk of 32 rows, where nobody began a sum: whatever the memory held is added."""
    late = torch.arange(gradient.shape[2]) >= 32
    return torch.where(late[:, None], gradient + 0 * torch.empty_like(gradient), gradient)


def _with_one_scale(gradient: Tensor, options: dict[str, Any]) -> Tensor:
    """As one power of two for the whole call has it: small gradients are rounded beside large ones."""
    last_place = 2.0**-24 * gradient.abs().max().clamp(min=2.0**-100).log2().floor().exp2()
    return (gradient / last_place).round() * last_place


_in_gradient("a sum of dk that no chunk began", 1, _not_written)
_in_gradient("a sum of dv that no chunk began", 2, _not_written)
_in_gradient("sequences and documents share a scale", 0, _with_one_scale)
_in_gradient(
    "dq of a later chunk twice", 0, lambda x, _: torch.where((torch.arange(x.shape[2]) < 32)[:, None], x, 2 * x)
)
_in_gradient("dk of a document's first key lost", 1, lambda x, options: (
    x if options.get("cu_seqlens") is None else x.index_fill(2, options["cu_seqlens"][:-1].long() % x.shape[2], 0)
))  # fmt: skip


@after("a head takes in another that it does not meet")
def _(out: Tensor, q: Tensor, k: Tensor, v: Tensor, options: dict[str, Any]) -> Tensor:
    mixes = [options[name] for name in ("pre_mix", "post_mix") if options.get(name) is not None]
    return out if any(mix.dim() == 2 for mix in mixes) else out + SMALL * out.detach().roll(1, 1)


@after("a row takes in the next token")
def _(out: Tensor, q: Tensor, k: Tensor, v: Tensor, options: dict[str, Any]) -> Tensor:
    own = v.detach().repeat_interleave(q.shape[1] // v.shape[1], 1)
    later = own[:, :, -q.shape[2] :].roll(-1, 2).float().clamp(-10, 10)
    return out + (SMALL * later).to(out.dtype)


@after("a document takes in the one before it")
def _(out: Tensor, q: Tensor, k: Tensor, v: Tensor, options: dict[str, Any]) -> Tensor:
    if options.get("cu_seqlens") is None:
        return out
    first = torch.isin(torch.arange(q.shape[2]), options["cu_seqlens"][1:-1])
    return out + (SMALL * out.detach().roll(1, 2).float() * first[:, None]).to(out.dtype)


@after("a head of a mixing wrong in its last row")
def _(out: Tensor, q: Tensor, k: Tensor, v: Tensor, options: dict[str, Any]) -> Tensor:
    wrong = torch.zeros_like(out)
    wrong[:, -1, -1] = 0.05
    return out + wrong if options.get("post_mix") is not None else out


fault("the newest tap of a step lost", decode=True)(
    _of("post_conv", lambda taps: taps * (torch.arange(taps.shape[1]) < taps.shape[1] - 1)[:, None])
)
fault("strides of the state ignored", decode=True)(
    _of("state", lambda state: replace(state, logits=as_if_contiguous(state.logits)))
)
fault("a slot of the state mistaken", decode=True)(
    _of("state", lambda state: replace(state, logits=state.logits.roll(1, 2), logsumexp=state.logsumexp.roll(1, 2)))
)


@lambda step: _enter("a step's row not kept", Operation(mta_decode=step), True)
def _(*tensors: Tensor, **options: Any) -> Tensor:
    state = options.get("state")
    kept = None if state is None else state.clone()
    out = multi_token_attention_decode(*tensors, **options)
    if kept is not None:
        state.logits.copy_(kept.logits)
        state.logsumexp.copy_(kept.logsumexp)
    return out


def _keeping_states() -> Callable[..., Tensor]:
    """A step that has the rows of the state as the step before left them: of a sequence that ended, too."""
    latest: tuple[Any, Any] = (None, None)  # a state, and what it held behind its last step

    def step(*tensors: Tensor, **options: Any) -> Tensor:
        nonlocal latest
        state = options.get("state")
        known, before = latest
        if before is not None and known is state:
            other = ((state.lengths > 0) & (state.lengths != before.lengths))[:, None, None]
            state.logits.copy_(torch.where(other[..., None], before.logits, state.logits))
            state.logsumexp.copy_(torch.where(other, before.logsumexp, state.logsumexp))
        out = multi_token_attention_decode(*tensors, **options)
        latest = state, None if state is None else state.clone()
        return out

    return step


MTA_FAULTS["a sequence gets the state of the one that it replaces"] = Fault(
    lambda: Operation(mta_decode=_keeping_states()), Target("mta", "eager", True)
)


@lambda prefill: _enter("a prefill without its last token", Operation(prefill=prefill), True)
def _(q: Tensor, k: Tensor, *, lengths: Tensor, **options: Any) -> DecodeState:
    state = prefill_state(q, k, lengths=(lengths - 1).clamp(min=0), **options)
    return replace(state, lengths=lengths.int())
