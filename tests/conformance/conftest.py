"""Emulators of the GPUs that the kernels need."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from emulated_conv import emulated_cuda  # noqa: F401
from emulated_decode import emulated_decode  # noqa: F401
from emulated_forward import emulated_forward  # noqa: F401
from emulated_hopper import emulator  # noqa: F401
from emulated_rungs import emulated_attention  # noqa: F401


@pytest.fixture
def emulated_hopper_decode(emulated_decode: SimpleNamespace) -> SimpleNamespace:  # noqa: F811
    """As `emulated_decode`, on a Hopper GPU."""
    emulated_decode.hopper = True
    return emulated_decode
