"""Which probabilities a seed drops: a function of the seed and of a probability's place, and of nothing else.

So every cut of a call, by rows, chunks or documents, drops the same ones, on every device.
"""

from __future__ import annotations

import torch
from torch import Tensor

# SplitMix64 (Steele, Lea, Flood: Fast Splittable Pseudorandom Number Generators), as int64, whose products wrap around.
_STEP, _FIRST, _SECOND = 0x9E3779B97F4A7C15 - 2**64, 0xBF58476D1CE4E5B9 - 2**64, 0x94D049BB133111EB - 2**64
BITS = 53  # of a random number, which is compared with the share that is dropped


def seed_tensor(seed: int | Tensor | None, device: torch.device) -> Tensor:
    """The seed as int64 without dimensions on the device; None draws one there, and waits for nothing."""
    if seed is None:
        return torch.randint(0, 2**63 - 1, (), device=device)
    return seed if isinstance(seed, Tensor) else torch.full((), seed, dtype=torch.int64, device=device)


def kept(
    dropout: float, seed: Tensor, batch: int, heads: int, rows: tuple[int, int], columns: tuple[int, int]
) -> Tensor:
    """Whether a probability stays: `[batch, heads, rows, columns]`, rows and columns as (start, stop) of positions."""
    return torch.ops.mta.dropout_kept(seed, dropout, batch, heads, *rows, *columns)


# An operator, since inductor computes sums and products of positions and a constant seed without wrapping around.
torch.library.define(
    "mta::dropout_kept",
    "(Tensor seed, float dropout, SymInt batch, SymInt heads, SymInt first_row, SymInt end_row, SymInt first_column, "
    "SymInt end_column) -> Tensor",
    tags=torch.Tag.pt2_compliant_tag,
)


@torch.library.impl("mta::dropout_kept", "CompositeExplicitAutograd")
def _kept(
    seed: Tensor, dropout: float, batch: int, heads: int, first_row: int, end_row: int, first_column: int,
    end_column: int,
) -> Tensor:  # fmt: skip
    device = seed.device
    head = torch.arange(batch * heads, device=device).view(batch, heads, 1, 1)
    row, column = torch.arange(first_row, end_row, device=device), torch.arange(first_column, end_column, device=device)
    numbers = seed
    for place in (head, row[:, None], column):
        numbers = _scrambled(numbers + (place + 1) * _STEP)
    return _shifted(numbers, 64 - BITS) >= int(dropout * 2**BITS)


@torch.library.register_fake("mta::dropout_kept")
def _fake_kept(
    seed: Tensor, dropout: float, batch: int, heads: int, first_row: int, end_row: int, first_column: int,
    end_column: int,
) -> Tensor:  # fmt: skip
    return seed.new_empty(batch, heads, end_row - first_row, end_column - first_column, dtype=torch.bool)


def _scrambled(x: Tensor) -> Tensor:
    x = (x ^ _shifted(x, 30)) * _FIRST
    x = (x ^ _shifted(x, 27)) * _SECOND
    return x ^ _shifted(x, 31)


def _shifted(x: Tensor, bits: int) -> Tensor:
    """x, taken as unsigned, shifted to the right."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)
