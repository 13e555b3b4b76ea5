"""Things worked out once and kept by what they depend on, within bounds."""

from __future__ import annotations

from typing import TypeVar

K = TypeVar("K")
V = TypeVar("V")

MAX_REMEMBERED = 256


def keep(memory: dict[K, V], key: K, value: V, most: int = MAX_REMEMBERED) -> V:
    """Put `value` into `memory`, which is emptied before if it has `most` entries; the value.

    So that what a program uses again and again is soon there again, and what it never does goes.
    """
    if len(memory) >= most:
        memory.clear()
    memory[key] = value
    return value
