"""The kernel backends, and what the operators and `choice` ask of them together."""

from __future__ import annotations

from mta_kernels.backend_lookup import find
from mta_kernels.conv_attention.backend import Backend
from mta_kernels.conv_attention.cuda_decode.backend import CUDA
from mta_kernels.conv_attention.hopper.backend import HOPPER
from mta_kernels.conv_attention.triton.backend import TRITON

KERNELS = (TRITON, HOPPER, CUDA)
BACKENDS = ("reference", *(backend.name for backend in KERNELS))


def named(name: str) -> Backend | None:
    """The kernel backend of a name, None for the reference; raises ValueError for an unknown name."""
    return find(KERNELS, name)
