"""Backends of an operation by their names, and the sentences for those that are unknown or cannot run something."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def find(kernels: Sequence[Any], name: str) -> Any:
    """The backend of a name, None for the reference; raises ValueError for an unknown name."""
    for backend in kernels:
        if backend.name == name:
            return backend
    if name == "reference":
        return None
    raise ValueError(f"backend is {name!r}; expected {any_of(kernels)}")


def any_of(kernels: Sequence[Any]) -> str:
    """The names to type, in words."""
    return f"'auto' or one of {', '.join(repr(name) for name in ('reference', *(x.name for x in kernels)))}"


def check_can_run(backend: Any, request: Any) -> None:
    """Raise ValueError, in one sentence, if a backend that a person named cannot run a request."""
    if reason := backend.why_not(request):
        raise ValueError(f"backend {backend.name!r} cannot run this: {reason}; backend='auto' picks one that can")
