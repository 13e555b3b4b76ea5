"""Faults around a right operation, each of a kind that a kernel may have, for the fuzz to find.

Run as a program it searches for each and prints the checks that find it first, in a minute or two.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from fuzz.calls import Operation
from fuzz.cases import FuzzCase, Target, draw
from fuzz.trial import prepare, try_case
from torch import Tensor

from mta_kernels.conv_attention import conv_attention, conv_attention_decode
from mta_kernels.multi_token_attention import DecodeState, multi_token_attention, multi_token_attention_decode

SEED = 1
MOST_CASES = 400  # within which each fault is found
SMALL = 1e-6  # what leaks from where it should not: far less than rounding hides


@dataclass(frozen=True)
class Fault:
    """`operation` makes the public functions, one of them with the fault, which cases of the target have."""

    operation: Callable[[], Operation]
    target: Target

    def found_by(self, number: int) -> list[str]:
        """The checks that find it in a case of `SEED`, none where they object to the right operation as well."""
        case = draw(SEED, number, (self.target,), "cpu")
        found = [wrong.check for wrong in try_case(case, self.operation()).wrong]
        return [] if found and is_wrong(case) else list(dict.fromkeys(found))


@functools.cache
def is_wrong(case: FuzzCase) -> bool:
    """Whether the checks object to the right operation."""
    return bool(try_case(case).wrong)


FAULTS: dict[str, Fault] = {}


def fault(name: str, of: str = "attention") -> Callable:
    """Enter a function `(*tensors, **options) -> out`, which stands in for one of `Operation`'s, by a name."""

    def enter(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        op = "mta" if "mta" in of else "conv-attention"
        FAULTS[name] = Fault(lambda: Operation(**{of: function}), Target(op, "eager", "decode" in of))
        return function

    return enter


class _Gradient(torch.autograd.Function):
    """x, whose gradient is changed on its way back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, change: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.change = change
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return ctx.change(gradient), None


with_changed_gradient = _Gradient.apply


def _with_gradient(
    at: int, change: Callable[[Tensor], Tensor], function: Callable[..., Tensor] = conv_attention
) -> Callable[..., Tensor]:
    def wrong(*tensors: Tensor, **options: Any) -> Tensor:
        changed = list(tensors)
        changed[at] = with_changed_gradient(changed[at], change)
        return function(*changed, **options)

    return wrong


def _first_tap(gradient: Tensor) -> Tensor:
    changed = gradient.clone()
    changed[..., 0, 0] *= 1.1
    return changed


fault("one tap of dweight wrong")(_with_gradient(3, _first_tap))


@fault("strides of grad_out ignored")
def _(*tensors: Tensor, **options: Any) -> Tensor:
    out = conv_attention(*tensors, **options)
    return with_changed_gradient(out, as_if_contiguous)


def as_if_contiguous(x: Tensor) -> Tensor:
    """What is read at x's address by one who takes it for contiguous."""
    if x.storage_offset() + x.numel() > x.untyped_storage().size() // x.element_size():
        return x
    return x.as_strided(x.shape, torch.empty(x.shape, device="meta").stride(), x.storage_offset())


@fault("a key dropped")
def _(q: Tensor, k: Tensor, v: Tensor, weight: Tensor, **options: Any) -> Tensor:
    dropped = torch.arange(v.shape[2]) == v.shape[2] // 2
    return conv_attention(q, k, v.masked_fill(dropped[:, None], 0), weight, **options)


def _stale() -> Callable[..., Tensor]:
    kept: dict[tuple, Tensor] = {}

    def wrong(q: Tensor, *tensors: Tensor, **options: Any) -> Tensor:
        out = conv_attention(q, *tensors, **options)
        return out + (kept.setdefault((q.shape, q.data_ptr()), out.detach()) - out.detach())

    return wrong


FAULTS["the result of an earlier call at the same addresses"] = Fault(
    lambda: Operation(attention=_stale()), Target("conv-attention", "eager")
)


@fault("a row takes in the next token")
def _(q: Tensor, k: Tensor, v: Tensor, weight: Tensor, **options: Any) -> Tensor:
    out = conv_attention(q, k, v, weight, **options)
    own = v.detach().repeat_interleave(q.shape[1] // v.shape[1], 1)
    later = own[:, :, -q.shape[2] :].roll(-1, 2).float().clamp(-10, 10)
    return out + (SMALL * later).to(out.dtype)


@fault("a document takes in the one before it")
def _(q: Tensor, k: Tensor, v: Tensor, weight: Tensor, **options: Any) -> Tensor:
    out = conv_attention(q, k, v, weight, **options)
    if options.get("cu_seqlens") is None:
        return out
    first = torch.isin(torch.arange(q.shape[2]), options["cu_seqlens"][1:-1])
    own = v.detach().repeat_interleave(q.shape[1] // v.shape[1], 1)
    leak = own.roll(1, 2).float().clamp(-1e3, 1e3) * first[:, None]
    return out + (SMALL * leak).to(out.dtype)


@fault("a sequence takes in the one before it")
def _(*tensors: Tensor, **options: Any) -> Tensor:
    out = conv_attention(*tensors, **options)
    return out + SMALL * out.detach().roll(1, 0) if out.shape[0] > 1 else out


@fault("scratch read before it is written")
def _(*tensors: Tensor, **options: Any) -> Tensor:
    out = conv_attention(*tensors, **options)
    scratch = torch.empty_like(out)
    return out + 0 * scratch if out.shape[2] % 16 == 1 and out.shape[2] > 1 else out


@fault("other bits from call to call")
def _(*tensors: Tensor, **options: Any) -> Tensor:
    out = conv_attention(*tensors, **options)
    return out * (1 + torch.finfo(out.dtype).eps * torch.randint(0, 2, out.shape))


@fault("an argument overwritten")
def _(q: Tensor, *tensors: Tensor, **options: Any) -> Tensor:
    out = conv_attention(q, *tensors, **options)
    q.data.mul_(2)
    return out


@fault("a write beside an argument")
def _(q: Tensor, k: Tensor, *tensors: Tensor, **options: Any) -> Tensor:
    out = conv_attention(q, k, *tensors, **options)
    k.detach().as_strided((1,), (1,), k.storage_offset() - 1).zero_()
    return out


@fault("refuses what it can run")
def _(q: Tensor, *tensors: Tensor, **options: Any) -> Tensor:
    if q.shape[3] == 40:
        raise ValueError("head_dim 40 cannot be run")
    return conv_attention(q, *tensors, **options)


@fault("strides of lengths ignored", "decode")
def _(*tensors: Tensor, lengths: Tensor, **options: Any) -> Tensor:
    return conv_attention_decode(*tensors, lengths=as_if_contiguous(lengths), **options)


@fault("an entry of the page table ignored", "decode")
def _(*tensors: Tensor, block_table: Tensor | None = None, **options: Any) -> Tensor:
    if block_table is not None:
        block_table = torch.cat([block_table[:, :1], block_table[:, :-1]], 1)
    return conv_attention_decode(*tensors, block_table=block_table, **options)


@fault("what is beyond the lengths multiplied by zero", "decode")
def _(q: Tensor, k: Tensor, v: Tensor, weight: Tensor, **options: Any) -> Tensor:
    out = conv_attention_decode(q, k, v, weight, **options)
    return out + 0 * v.sum().to(out.dtype)


@fault("mta: 2 % off in dpre_mix", "mta")
def _(*tensors: Tensor, pre_mix: Tensor | None = None, **options: Any) -> Tensor:
    if pre_mix is not None:
        pre_mix = with_changed_gradient(pre_mix, lambda gradient: gradient * 1.02)
    return multi_token_attention(*tensors, pre_mix=pre_mix, **options)


@fault("mta: dropout of another seed", "mta")
def _(*tensors: Tensor, seed: Any = None, **options: Any) -> Tensor:
    return multi_token_attention(*tensors, seed=None if seed is None else seed + 1, **options)


def _not_written(gradient: Tensor) -> Tensor:
    """As of keys behind a chunk of 32 rows, where nobody began a sum: whatever the memory held is added."""
    late = torch.arange(gradient.shape[2]) >= 32
    return torch.where(late[:, None], gradient + 0 * torch.empty_like(gradient), gradient)


def _with_one_scale(gradient: Tensor) -> Tensor:
    """As one power of two for the whole call has it: small gradients are rounded beside large ones."""
    last_place = 2.0**-24 * gradient.abs().max().clamp(min=2.0**-100).log2().floor().exp2()
    return (gradient / last_place).round() * last_place


fault("mta: a sum of dk that no chunk began", "mta")(_with_gradient(1, _not_written, multi_token_attention))
fault("mta: sequences and documents share a scale", "mta")(_with_gradient(0, _with_one_scale, multi_token_attention))


@fault("mta: a head takes in another that it does not meet", "mta")
def _(*tensors: Tensor, **options: Any) -> Tensor:
    out = multi_token_attention(*tensors, **options)
    mixes = [options[name] for name in ("pre_mix", "post_mix") if options.get(name) is not None]
    return out if any(mix.dim() == 2 for mix in mixes) else out + SMALL * out.detach().roll(1, 1)


@fault("mta: strides of the state ignored", "mta_decode")
def _(*tensors: Tensor, state: DecodeState | None = None, **options: Any) -> Tensor:
    if state is not None:
        state = replace(state, logits=as_if_contiguous(state.logits))
    return multi_token_attention_decode(*tensors, state=state, **options)


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


FAULTS["mta: a sequence gets the state of the one that it replaces"] = Fault(
    lambda: Operation(mta_decode=_keeping_states()), Target("mta", "eager", True)
)


def main() -> None:
    """Print each fault, the checks that find it, and how many cases it took."""
    prepare("cpu")
    for name, planted in FAULTS.items():
        found = (
            f"{name}: {checks}, {number + 1}" for number in range(MOST_CASES) if (checks := planted.found_by(number))
        )
        print(next(found, f"{name}: not found"), flush=True)


if __name__ == "__main__":
    main()
