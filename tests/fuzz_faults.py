"""Faults around a right operation, each of a kind that a kernel may have, for the fuzz to find.

Run as a program it searches for each and prints the checks that find it first, in a minute or two.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from fuzz.calls import Operation
from fuzz.cases import FuzzCase, Target, draw
from fuzz.trial import prepare, try_case
from torch import Tensor

from mta_kernels.conv_attention import conv_attention, conv_attention_decode

SEED = 1
CONV = Target("conv-attention", "eager")
MOST_CASES = 400  # within which each fault is found
SMALL = 1e-6  # what leaks from where it should not: far less than rounding hides


@dataclass(frozen=True)
class Fault:
    """`operation` makes the public functions, one of them with the fault, which cases of the target have."""

    operation: Callable[[], Operation]
    target: Target = CONV

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


def fault(name: str, decode: bool = False) -> Callable:
    """Enter a function `(*tensors, **options) -> out` by a name."""

    def enter(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        target = Target("conv-attention", "eager", decode)
        FAULTS[name] = Fault(lambda: Operation(**{"decode" if decode else "attention": function}), target)
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


def with_changed_gradient(x: Tensor, change: Callable[[Tensor], Tensor]) -> Tensor:
    """x, whose gradient is changed on its way back."""
    return _Gradient.apply(x, change)


def _with_gradient(at: int, change: Callable[[Tensor], Tensor]) -> Callable[..., Tensor]:
    def wrong(*tensors: Tensor, **options: Any) -> Tensor:
        changed = list(tensors)
        changed[at] = with_changed_gradient(changed[at], change)
        return conv_attention(*changed, **options)

    return wrong


def _scaled(part: tuple, factor: float) -> Callable[[Tensor], Tensor]:
    def change(gradient: Tensor) -> Tensor:
        changed = gradient.clone()
        changed[part] *= factor
        return changed

    return change


for _at, _name in enumerate(("dq", "dk", "dv", "dweight")):
    FAULTS[f"2 % off in {_name}"] = Fault(lambda at=_at: Operation(attention=_with_gradient(at, lambda x: x * 1.02)))
FAULTS["one tap of dweight wrong"] = Fault(lambda: Operation(attention=_with_gradient(3, _scaled((..., 0, 0), 1.1))))
FAULTS["dk of the newest key lost"] = Fault(
    lambda: Operation(attention=_with_gradient(1, _scaled((slice(None), slice(None), -1), 0)))
)


@fault("strides of grad_out ignored")
def _(*tensors: Tensor, **options: Any) -> Tensor:
    out = conv_attention(*tensors, **options)
    return with_changed_gradient(out, as_if_contiguous)


@fault("strides of k ignored")
def _(q: Tensor, k: Tensor, v: Tensor, weight: Tensor, **options: Any) -> Tensor:
    return conv_attention(q, as_if_contiguous(k), v, weight, **options)


def as_if_contiguous(x: Tensor) -> Tensor:
    """What is read at x's address by one who takes it for contiguous."""
    if x.storage_offset() + x.numel() > x.untyped_storage().size() // x.element_size():
        return x
    return x.as_strided(x.shape, torch.empty(x.shape, device="meta").stride(), x.storage_offset())


@fault("a key dropped")
def _(q: Tensor, k: Tensor, v: Tensor, weight: Tensor, **options: Any) -> Tensor:
    dropped = torch.arange(v.shape[2]) == v.shape[2] // 2
    return conv_attention(q, k, v.masked_fill(dropped[:, None], 0), weight, **options)


@fault("the oldest key dropped, in late rows")
def _(q: Tensor, k: Tensor, v: Tensor, weight: Tensor, **options: Any) -> Tensor:
    oldest = torch.arange(v.shape[2]) == 0
    late = torch.arange(q.shape[2]) >= 16
    right = conv_attention(q, k, v, weight, **options)
    wrong = conv_attention(q, k, v.masked_fill(oldest[:, None], 0), weight, **options)
    return torch.where(late[:, None], wrong, right)


def _stale() -> Callable[..., Tensor]:
    kept: dict[tuple, Tensor] = {}

    def wrong(q: Tensor, *tensors: Tensor, **options: Any) -> Tensor:
        out = conv_attention(q, *tensors, **options)
        return out + (kept.setdefault((q.shape, q.data_ptr()), out.detach()) - out.detach())

    return wrong


FAULTS["the result of an earlier call at the same addresses"] = Fault(lambda: Operation(attention=_stale()))


@fault("a row wrong, in the last head")
def _(q: Tensor, *tensors: Tensor, **options: Any) -> Tensor:
    out = conv_attention(q, *tensors, **options)
    wrong = torch.zeros_like(out)
    wrong[-1, -1, q.shape[2] // 3] = 0.01
    return out + wrong


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


@fault("heads of a group read another KV head")
def _(q: Tensor, k: Tensor, v: Tensor, weight: Tensor, **options: Any) -> Tensor:
    return conv_attention(q, k, v.roll(1, 1), weight, **options)


@fault("scratch read before it is written")
def _(*tensors: Tensor, **options: Any) -> Tensor:
    out = conv_attention(*tensors, **options)
    scratch = torch.empty_like(out)
    return out + 0 * scratch if out.shape[2] % 16 == 1 and out.shape[2] > 1 else out


@fault("padding off by one, of an even number of key taps")
def _(q: Tensor, k: Tensor, v: Tensor, weight: Tensor, **options: Any) -> Tensor:
    if weight.shape[2] % 2 == 0 and options["pad_key"] == "both":
        weight = weight.roll(1, 2)
    return conv_attention(q, k, v, weight, **options)


@fault("the sign of the scale lost")
def _(*tensors: Tensor, **options: Any) -> Tensor:
    scale = options["scale"]
    return conv_attention(*tensors, **options | {"scale": None if scale is None else abs(scale)})


@fault("scale 0 taken for none")
def _(*tensors: Tensor, **options: Any) -> Tensor:
    return conv_attention(*tensors, **options | {"scale": options["scale"] or None})


@fault("the last row not written")
def _(*tensors: Tensor, **options: Any) -> Tensor:
    out = conv_attention(*tensors, **options)
    written = torch.arange(out.shape[2]) < out.shape[2] - 1
    return torch.where(written[:, None], out, torch.empty_like(out))


@fault("two rows of a head swapped")
def _(*tensors: Tensor, **options: Any) -> Tensor:
    out = conv_attention(*tensors, **options)
    if out.shape[2] < 4:
        return out
    order = torch.arange(out.shape[2])
    order[2], order[3] = 3, 2
    return torch.cat([out[:, :-1], out[:, -1:, order]], 1)


@fault("q_history ignored")
def _(*tensors: Tensor, **options: Any) -> Tensor:
    if options.get("q_history") is not None:
        options["q_history"] = options["q_history"] * 0
    return conv_attention(*tensors, **options)


@fault("head_chunk mixes up heads")
def _(*tensors: Tensor, **options: Any) -> Tensor:
    out = conv_attention(*tensors, **options)
    return out.roll(1, 1) if options["head_chunk"] is not None else out


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


@fault("a float32 weight rounded to bfloat16")
def _(q: Tensor, k: Tensor, v: Tensor, weight: Tensor, **options: Any) -> Tensor:
    return conv_attention(q, k, v, weight.bfloat16().to(weight.dtype), **options)


@fault("refuses what it can run")
def _(q: Tensor, *tensors: Tensor, **options: Any) -> Tensor:
    if q.shape[3] == 40:
        raise ValueError("head_dim 40 cannot be run")
    return conv_attention(q, *tensors, **options)


@fault("lengths off by one", decode=True)
def _(*tensors: Tensor, lengths: Tensor, **options: Any) -> Tensor:
    return conv_attention_decode(*tensors, lengths=(lengths - 1).clamp(min=1), **options)


@fault("strides of lengths ignored", decode=True)
def _(*tensors: Tensor, lengths: Tensor, **options: Any) -> Tensor:
    return conv_attention_decode(*tensors, lengths=as_if_contiguous(lengths), **options)


@fault("an entry of the page table ignored", decode=True)
def _(*tensors: Tensor, block_table: Tensor | None = None, **options: Any) -> Tensor:
    if block_table is not None:
        block_table = torch.cat([block_table[:, :1], block_table[:, :-1]], 1)
    return conv_attention_decode(*tensors, block_table=block_table, **options)


@fault("what is beyond the lengths multiplied by zero", decode=True)
def _(q: Tensor, k: Tensor, v: Tensor, weight: Tensor, **options: Any) -> Tensor:
    out = conv_attention_decode(q, k, v, weight, **options)
    return out + 0 * v.sum().to(out.dtype)


@fault("a decode's oldest queries ignored", decode=True)
def _(q: Tensor, *tensors: Tensor, **options: Any) -> Tensor:
    kept = torch.arange(q.shape[2]) > q.shape[2] - 3
    return conv_attention_decode(q * kept[:, None], *tensors, **options)


def main() -> None:
    """Print each fault, the checks that find it, and how many cases it took."""
    from fuzz_mta_faults import MTA_FAULTS

    prepare("cpu")
    for name, planted in [*FAULTS.items(), *((f"mta: {name}", planted) for name, planted in MTA_FAULTS.items())]:
        found = (
            f"{name}: {checks}, {number + 1}" for number in range(MOST_CASES) if (checks := planted.found_by(number))
        )
        print(next(found, f"{name}: not found"), flush=True)


if __name__ == "__main__":
    main()
