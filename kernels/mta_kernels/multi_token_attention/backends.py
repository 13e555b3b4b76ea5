"""The kernel backends, and what the operators and `choice` ask of them together."""

from __future__ import annotations

from mta_kernels.multi_token_attention.backend import MtaBackend, Request
from mta_kernels.multi_token_attention.triton.backend import TRITON

KERNELS: tuple[MtaBackend, ...] = (TRITON,)  # a backend is one import above and its name here
BACKENDS = ("reference", *(backend.name for backend in KERNELS))


def named(name: str) -> MtaBackend | None:
    """The kernel backend of a name, None for the reference; raises ValueError for an unknown name."""
    for backend in KERNELS:
        if backend.name == name:
            return backend
    if name == "reference":
        return None
    names = ["reference", *(backend.name for backend in KERNELS)]
    raise ValueError(f"backend is {name!r}; expected 'auto' or one of {', '.join(map(repr, names))}")


def check_can_run(backend: MtaBackend, request: Request) -> None:
    """Raise ValueError, in one sentence, if a backend that a person named cannot run a request."""
    if reason := backend.why_not(request):
        raise ValueError(f"backend {backend.name!r} cannot run this: {reason}; backend='auto' picks one that can")
