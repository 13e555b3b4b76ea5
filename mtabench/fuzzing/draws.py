"""The operations that are fuzzed, and which of a run's cases is whose."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from mtabench.fuzzing.cases import BLOCK, FuzzCase, draw_conv
from mtabench.fuzzing.mta_cases import draw_mta


@dataclass(frozen=True)
class Fuzzed:
    """An operation: its backends, those of a run that names none by device, and what draws a case for one."""

    backends: tuple[str, ...]
    usual: dict[str, tuple[str, ...]]
    draw: Callable[[int, int, str, str], FuzzCase]


OPERATIONS = {
    "conv-attention": Fuzzed(
        ("triton", "hopper", "cuda", "auto", "eager"),
        {"cuda": ("triton", "hopper", "cuda", "auto"), "cpu": ("triton",)},
        draw_conv,
    ),
    "mta": Fuzzed(("triton", "auto", "eager"), {"cuda": ("triton", "auto"), "cpu": ("triton",)}, draw_mta),
}


class Target(NamedTuple):
    """What a case is of."""

    op: str
    backend: str


def draw(seed: int, number: int, targets: Sequence[Target], device: str) -> FuzzCase:
    """Case `number` of a seed, for one of the targets; the same as with that target alone."""
    op, backend = targets[number // BLOCK[device] % len(targets)]
    return OPERATIONS[op].draw(seed, number, backend, device)
