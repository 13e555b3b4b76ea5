"""What a case's results are held to; each check gives the sentences that say what is wrong."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from fuzz.calls import Results
from fuzz.definition import FLOAT32_ROUNDING, OF_ROWS, squares
from fuzz.inputs import Wanted

# Times the standard error that rounding may leave, and times eager's error, of all numbers, a head and a row. A whole
# may be off by what its worst part may.
BY_ROUNDING = {"norm": 2.5, "head": 4.0, "row": 6.0}
BY_EAGER = {"norm": 2.0, "head": 3.0, "row": 4.0}
# Errors, in units of the dtype's rounding, that always pass: of all numbers of a result, of a row relative to itself,
# and relative to the rows of its head. A mixer's number compares to its head.
PLAIN_NORM, PLAIN_ROW, PLAIN_HEAD, PLAIN_NUMBER = 2.5, 5.0, 1.0, 5.0
# What else needs no close look: within this part of what one would allow, by few samples. They put a row's standard
# error too high by half in one row of ten, and by 2.25 in one of 150. So what passes is right, or nearly always within
# the bound of the close look. A row may be off by one standard error of its head's mean row, a mixer's number by three.
FIRST_LOOK = 2 / 3
FIRST_LOOK_HEAD, FIRST_LOOK_NUMBER = 1.0, 3.0
MARGINAL = 2.0  # times a bound, below which a case is repeated with other values
SLIGHT = 1.15  # times a bound, below which a repeated case passes: its standard errors are of few samples
MANY = 20_000  # rows, or heads, of which one may be marginal: few samples do not show what happens to so few
EAGER_IS_WRONG = 30.0  # standard errors of a row: beyond, eager's own error allows nothing
LEAST_GRADIENT = 2.0**-20  # of the largest row of a head: gradients of scores go through 16 bits, over one power of two
LEAST = 1e-20  # that counts as more than zero
OVERFLOW = 0.5  # of the largest number of the dtype: results above may be infinite


@dataclass(frozen=True)
class Wrong:
    """What is wrong: `check` names the kind, for the table of faults that are found."""

    check: str
    text: str
    marginal: bool = False  # an error that is less than MARGINAL times what it may be
    slight: bool = False  # less than SLIGHT times


@dataclass(frozen=True)
class _Compared:
    """A result's squared errors and what allows them, a number a row: zero where a row cannot be judged."""

    name: str
    want: Tensor
    difference: Tensor
    allowed: Tensor
    of_eager: Tensor

    def beyond(self, level: str, times: float = 1.0) -> Tensor:
        """Where the error of a level is more than it may be, or so many times that."""
        error, most = self._error(level)
        return ~(error <= times * most)

    def is_beyond(self, level: str) -> Tensor:
        """Whether any error is, or of MANY more than one: a bool, on the device."""
        beyond = self.beyond(level)
        return (beyond.sum() > beyond.numel() // MANY) | self.beyond(level, MARGINAL).any()

    def sentence(self, level: str) -> str:
        """What is wrong at a level."""
        error, most = self._error(level)
        beyond = self.beyond(level)
        at = tuple(beyond.nonzero()[0].tolist())
        first = self._first_row()
        of = {"norm": self.name, "head": f"a head of {self.name}", "row": f"a row of {self.name}"}[level]
        if error[at].isinf():
            return f"{of} has NaN or infinity where it should not, first at {first}"
        size = self._over(level, squares(self.name, self.want), Tensor.sum).sqrt()
        return (
            f"{of} is off by {error[at].item():.3g}, allowed is {most[at].item():.3g} (norm {size[at].item():.3g}), "
            f"first at {first}, {int(beyond.sum())} of {beyond.numel()}"
        )

    def _first_row(self) -> list[int]:
        """The first that is off by more than a row may be, or else the worst one."""
        beyond = self.beyond("row")
        if beyond.any():
            return beyond.nonzero()[0].tolist()
        return [int(x) for x in torch.unravel_index(self.difference.argmax(), self.difference.shape)]

    def _error(self, level: str) -> tuple[Tensor, Tensor]:
        by_rounding, by_eager = self._most(level, BY_ROUNDING, self.allowed), self._most(level, BY_EAGER, self.of_eager)
        return self._over(level, self.difference, Tensor.sum).sqrt(), torch.maximum(by_rounding, by_eager)

    def _most(self, level: str, times: dict[str, float], squares: Tensor) -> Tensor:
        """What a level may be off: no less than its worst part, whose numbers may all be off alike."""
        own = times[level] * self._over(level, squares, Tensor.sum).sqrt()
        if level == "row":
            return own
        parts = self._most("head" if level == "norm" else "row", times, squares)
        return torch.maximum(own, self._over(level, parts, Tensor.amax))

    def _over(self, level: str, x: Tensor, reduce: Callable[..., Tensor]) -> Tensor:
        """Sums or maxima of rows, over each head or over all."""
        if level == "row":
            return x
        dims = tuple(range(x.dim())) if level == "norm" else _within_head(self.name, x.dim())
        return reduce(x, dims, keepdim=True)


def errors(
    results: Results, want: Wanted, dtype: torch.dtype, eager: Callable[[], Results], thorough: bool = True
) -> Iterator[Wrong]:
    """Results further from float64 than rounding to `dtype` and eager explain: as a whole, of a head, and of a row.

    Unless it is to be `thorough`, a close look is for those alone that neither ordinary bounds nor a first look let
    pass. `eager` is called if there are any beyond what rounding explains.
    """
    known = {}
    for name, found in results.items():
        if found.shape == want.values[name].shape:
            known[name] = found
        else:
            yield Wrong("shape", f"{name} has shape {list(found.shape)}; expected {list(want.values[name].shape)}")
    near = [_is_near(name, found, want.values[name], dtype) for name, found in known.items()]
    if not near or (not thorough and (torch.stack(near).all() or _pass_first_look(known, want, dtype))):
        return
    compared = [_compared(name, found, want, want.variance, dtype, None) for name, found in known.items()]
    flags = [x.is_beyond(level) for x in compared for level in BY_ROUNDING]
    if not torch.stack(flags).any():
        return
    by_eager = eager()
    for name, found in known.items():
        x = _compared(name, found, want, want.variance, dtype, by_eager.get(name))
        level = next((level for level in BY_ROUNDING if x.is_beyond(level)), None)
        if level is not None:
            marginal, slight = (
                not any(x.beyond(level, times).any() for level in BY_ROUNDING) for times in (MARGINAL, SLIGHT)
            )
            yield Wrong(level, x.sentence(level), marginal, slight)


def _is_near(name: str, found: Tensor, want: Tensor, dtype: torch.dtype) -> Tensor:
    """Whether a result is as right as ordinary numbers make it: a bool, on the device."""
    unit2 = max(torch.finfo(dtype).eps / 2, FLOAT32_ROUNDING) ** 2
    error, size = squares(name, found - want), squares(name, want)
    of_head = size.mean(_within_head(name, size.dim()), keepdim=True)
    own = PLAIN_ROW**2 * size + PLAIN_HEAD**2 * of_head if name in OF_ROWS else PLAIN_NUMBER**2 * of_head
    return (error <= unit2 * own).all() & (error.sum() <= PLAIN_NORM**2 * unit2 * size.sum())


def _pass_first_look(known: Results, want: Wanted, dtype: torch.dtype) -> bool:
    """Whether results are well within what few samples say that rounding may leave."""
    flags = []
    for name, found in known.items():
        x = _compared(name, found, want, want.rough_variance, dtype, None)
        of_head = x.allowed.mean(_within_head(name, x.allowed.dim()), keepdim=True)
        share = FIRST_LOOK_HEAD if name in OF_ROWS else FIRST_LOOK_NUMBER
        of_row = (FIRST_LOOK * BY_ROUNDING["row"]) ** 2 * x.allowed + share**2 * of_head
        flags.append((x.difference > of_row).any())
        flags += [x.beyond(level, FIRST_LOOK).any() for level in ("norm", "head")]
    return not torch.stack(flags).any()


def _compared(
    name: str, found: Tensor, want: Wanted, variance: dict[str, Tensor], dtype: torch.dtype, eager: Tensor | None
) -> _Compared:
    value = want.values[name]
    difference = squares(name, found.double() - value)
    rows = 1 if name in OF_ROWS else want.values["out"][..., 0].numel()
    allowed = _allowed(name, value, variance[name], dtype, rows)
    of_eager = torch.zeros_like(allowed)
    if eager is not None:
        of_eager = squares(name, eager.double() - value).nan_to_num(0.0, 0.0, 0.0)
        of_eager = of_eager.masked_fill(of_eager > EAGER_IS_WRONG**2 * allowed, 0)
        # What eager leaves the range of its dtype for, such as a gradient that a norm of tiny numbers gives back. A
        # mixing of several groups may be stored as one, with zeros: infinity times zero takes the others along.
        in_range = squares(name, eager.double()).isfinite()
        allowed = allowed.masked_fill(~(in_range if name in OF_ROWS else in_range.all()), torch.inf)
    lost = ~allowed.isfinite()
    difference = difference.masked_fill(lost, 0).nan_to_num(torch.inf)
    return _Compared(name, value, difference, allowed.masked_fill(lost, 0), of_eager.masked_fill(lost, 0))


def _within_head(name: str, dims: int) -> tuple[int, ...]:
    """The dims of a head's rows: of a mixer's gradient all but the first, unless it has one alone."""
    return (2,) if name in OF_ROWS else tuple(range(min(1, dims - 1), dims))


def _allowed(name: str, value: Tensor, variance: Tensor, dtype: torch.dtype, rows: int) -> Tensor:
    """The variance of each row's error; infinite where a number may overflow.

    Each number is a sum over so many `rows`, whose terms have the least numbers of the dtype, too.
    """
    info = torch.finfo(dtype)
    numbers = value.shape[-1] if name in OF_ROWS else 1
    largest = value.abs().amax(-1) if name in OF_ROWS else value.abs()
    least = rows * numbers * (info.smallest_normal * (info.eps if dtype == torch.float16 else 1)) ** 2
    allowed = variance + least + numbers * LEAST**2
    if name.startswith("d") and dtype != torch.float32:
        of_head = squares(name, value).amax(_within_head(name, allowed.dim()), keepdim=True)
        allowed = torch.maximum(allowed, (LEAST_GRADIENT**2 * of_head).expand_as(allowed))
    return allowed.masked_fill(largest > OVERFLOW * info.max, torch.inf)


def same(
    first: Results, second: Results, check: str, text: str, rows: dict[str, Tensor] | None = None
) -> Iterator[Wrong]:
    """Results that must be the same bit for bit; of `rows`, masks by name, those alone."""
    differing = {}
    for name, x in first.items():
        if name in second and (rows is None or name in rows):
            differ = (_bits(x) != _bits(second[name])).any(-1)
            differing[name] = differ if rows is None else differ & rows[name]
    if not differing or not torch.stack([differ.any() for differ in differing.values()]).any():
        return
    for name, differ in differing.items():
        if differ.any():
            yield Wrong(check, f"{text} changes {name}, first at {differ.nonzero()[0].tolist()}")


def _bits(x: Tensor) -> Tensor:
    return x.contiguous().view(torch.int16 if x.element_size() == 2 else torch.int32)
