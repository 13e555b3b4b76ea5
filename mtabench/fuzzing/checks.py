"""What a case's results are held to; each check gives the sentences that say what is wrong."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from mtabench.fuzzing.calls import Results
from mtabench.fuzzing.definition import Expected

# Times the standard error that rounding may leave, and times what eager is off, of all numbers, a head and a row.
BY_ROUNDING = {"norm": 2.5, "head": 4.0, "row": 6.0}
BY_EAGER = {"norm": 2.0, "head": 3.0, "row": 4.0}
EAGER_IS_WRONG = 30.0  # standard errors of a row: beyond, eager's own error allows nothing
OVERFLOW = 0.5  # of the largest number of the dtype: results above may be infinite


@dataclass(frozen=True)
class Wrong:
    """What is wrong: `check` names the kind, for the table of faults that are found."""

    check: str
    text: str


def errors(results: Results, want: dict[str, Expected], eager: Results) -> Iterator[Wrong]:
    """Results further from float64 than rounding and eager explain: as a whole, of a head, and of a row."""
    for name, found in results.items():
        value, dtype = want[name].value, found.dtype
        if found.shape != value.shape:
            yield Wrong("shape", f"{name} has shape {list(found.shape)}; expected {list(value.shape)}")
            continue
        yield from _errors(name, found, want[name], eager.get(name), dtype)


def _errors(name: str, found: Tensor, want: Expected, eager: Tensor | None, dtype: torch.dtype) -> Iterator[Wrong]:
    difference = _squared(name, found.double() - want.value)
    allowed = _allowed(name, want, dtype)
    of_eager = torch.zeros_like(allowed)
    if eager is not None:
        of_eager = _squared(name, eager.double() - want.value).nan_to_num(0.0, 0.0, 0.0)
        of_eager = of_eager.masked_fill(of_eager > EAGER_IS_WRONG**2 * allowed, 0)
    kept = allowed.isfinite()
    difference = difference.masked_fill(~kept, 0).nan_to_num(torch.inf)
    allowed, of_eager = allowed.masked_fill(~kept, 0), of_eager.masked_fill(~kept, 0)
    for level, dims in (("norm", tuple(range(difference.dim()))), ("head", _within_head(name)), ("row", ())):
        error, by_rounding, by_eager = (
            (x.sum(dims, keepdim=True) if dims else x).sqrt() for x in (difference, allowed, of_eager)
        )
        most = torch.maximum(BY_ROUNDING[level] * by_rounding, BY_EAGER[level] * by_eager)
        beyond = ~(error <= most)
        if beyond.any():
            place = beyond.nonzero()[0].tolist()
            of = {"norm": name, "head": f"a head of {name}", "row": f"a row of {name}"}[level]
            size = (
                _squared(name, want.value).sum(dims, keepdim=True).sqrt() if dims else _squared(name, want.value).sqrt()
            )
            at = tuple(place)
            first = _first_place(difference, allowed, of_eager)
            if error[at].isinf():
                yield Wrong(level, f"{of} has NaN or infinity where it should not, first at {first}")
                return
            yield Wrong(
                level,
                f"{of} is off by {error[at].item():.3g}, allowed is {most[at].item():.3g} (norm "
                f"{size[at].item():.3g}), first at {first}, {int(beyond.sum())} of {beyond.numel()}",
            )
            return


def _first_place(difference: Tensor, allowed: Tensor, of_eager: Tensor) -> list[int]:
    """The first row that is off by more than a row may be, or else the worst one."""
    by_rounding, by_eager = BY_ROUNDING["row"] * allowed.sqrt(), BY_EAGER["row"] * of_eager.sqrt()
    beyond = difference.sqrt() > torch.maximum(by_rounding, by_eager)
    if beyond.any():
        return beyond.nonzero()[0].tolist()
    return [int(x) for x in torch.unravel_index(difference.argmax(), difference.shape)]


def _squared(name: str, x: Tensor) -> Tensor:
    """Of rows; each tap of the weight's gradient is one."""
    return x.square() if name == "dweight" else x.square().sum(-1)


def _within_head(name: str) -> tuple[int, ...]:
    return (1, 2) if name == "dweight" else (2,)


def _allowed(name: str, want: Expected, dtype: torch.dtype) -> Tensor:
    """The variance of each row's error; infinite where a number may overflow."""
    info = torch.finfo(dtype)
    numbers = 1 if name == "dweight" else want.value.shape[-1]
    largest = want.value.abs() if name == "dweight" else want.value.abs().amax(-1)
    least = numbers * (info.smallest_normal * (info.eps if dtype == torch.float16 else 1)) ** 2
    return (want.variance + least).masked_fill(largest > OVERFLOW * info.max, torch.inf)


def same(
    first: Results, second: Results, check: str, text: str, rows: dict[str, Tensor] | None = None
) -> Iterator[Wrong]:
    """Results that must be the same bit for bit; of `rows`, masks by name, those alone."""
    for name, x in first.items():
        if name not in second or (rows is not None and name not in rows):
            continue
        differ = (_bits(x) != _bits(second[name])).any(-1)
        if rows is not None:
            differ = differ & rows[name]
        if differ.any():
            yield Wrong(check, f"{text} changes {name}, first at {differ.nonzero()[0].tolist()}")


def _bits(x: Tensor) -> Tensor:
    return x.contiguous().view(torch.int16 if x.element_size() == 2 else torch.int32)


def unwritten(names: Iterable[str]) -> Iterator[Wrong]:
    """Arguments that a call has written into."""
    for name in names:
        yield Wrong("argument written", f"the call writes into the memory of {name}")
