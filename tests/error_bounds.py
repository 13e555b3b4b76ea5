"""How far from float64 a result may be: twice eager's own error, in all and in each head, three times at the worst row.

A floor is what remains where eager is exact, the rounding of the result itself; the suite's oracle has the same.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from mtabench.checking.oracle import NORM_FACTOR, SIGMAS, TINY, tolerance_floor

ROW_FACTOR = 3  # of a row by itself, and of the worst of some dozen, eager's error may be a small one


def assert_twice_as_near(
    got: dict[str, Tensor], exact: dict[str, Tensor], eager: dict[str, Tensor], dtype: torch.dtype
) -> None:
    """By name: out, and the gradients of q, k and v, all `[B, H, N, D]`; any other is the gradient of a parameter.

    `eager` is what the reference gave for q in a dtype.
    """
    for name, x in got.items():
        assert x.shape == exact[name].shape, name
        want = exact[name].double()
        difference, of_eager = (y.double() - want for y in (x, eager[name]))
        if name not in ("out", *"qkv"):
            check_numbers(name, difference, of_eager, want, dtype)
            continue
        difference, of_eager, want = (y.transpose(0, 1).flatten(1, 2) for y in (difference, of_eager, want))
        check_heads(name, difference, of_eager, want, dtype)
        check_rows(name, difference, of_eager, want, dtype)


def check_heads(name: str, difference: Tensor, of_eager: Tensor, want: Tensor, dtype: torch.dtype) -> None:
    """The errors of `[heads, ..., D]`, in all and of each head, which may have what all may: eager's may be by luck.

    Errors of few rows are the rounding of a few logits, and eager's may be next to none. So a head of fewer than 18
    may have as much as the worst row of eager's may.
    """
    few = _factor(want[0].numel() // want.shape[-1]) > NORM_FACTOR
    whole = max(NORM_FACTOR * _share(of_eager, want), tolerance_floor(dtype))
    assert _share(difference, want) <= whole, (name, _share(difference, want), whole)
    errors, tolerances = (list(map(_share, x, want)) for x in (difference, of_eager))
    worst = ROW_FACTOR * max(tolerances)
    for head, (error, tolerance) in enumerate(zip(errors, tolerances, strict=True)):
        allowed = max(worst if few else NORM_FACTOR * tolerance, whole)
        assert error <= allowed, (name, "head", head, error, allowed)


def check_rows(name: str, difference: Tensor, of_eager: Tensor, want: Tensor, dtype: torch.dtype) -> None:
    """The largest error of a row of `[..., D]`, as a share of the mean of rows."""
    mean = want.norm(dim=-1).mean().clamp_min(TINY)
    error, tolerance = ((x.norm(dim=-1).max() / mean).item() for x in (difference, of_eager))
    assert error <= max(ROW_FACTOR * tolerance, 2 * tolerance_floor(dtype)), (name, "rows", error, tolerance)


def check_numbers(name: str, difference: Tensor, of_eager: Tensor, want: Tensor, dtype: torch.dtype) -> None:
    """Sums over all rows, whose errors know nothing of each other: of few numbers eager may have most right by luck."""
    tolerance = max(_factor(want.numel()) * _share(of_eager, want), tolerance_floor(dtype))
    error = _share(difference, want)
    assert error <= tolerance, (name, error, tolerance)


def _factor(independent: int) -> float:
    """On eager's error of so many rows or numbers: of few, it scatters."""
    return max(NORM_FACTOR, 1 + SIGMAS / math.sqrt(2 * independent))


def _share(error: Tensor, want: Tensor) -> float:
    return (error.norm() / want.norm().clamp_min(TINY)).item()
