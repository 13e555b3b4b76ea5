"""The kernel backends, and what the operators and `choice` ask of them together."""

from __future__ import annotations

from mta_kernels.backend_lookup import find
from mta_kernels.multi_token_attention.backend import MtaBackend
from mta_kernels.multi_token_attention.triton.backend import TRITON

KERNELS: tuple[MtaBackend, ...] = (TRITON,)  # a backend is one import above and its name here
BACKENDS = ("reference", *(backend.name for backend in KERNELS))


def named(name: str) -> MtaBackend | None:
    """The kernel backend of a name, None for the reference; raises ValueError for an unknown name."""
    return find(KERNELS, name)
