"""`conv_attention` by a kernel with a banded convolution: on a GPU that has it, else in its emulator."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from kernel_inputs import DEVICE, poison_memory
from torch import Tensor

from mta_kernels.conv_attention import conv_attention

ON_GPU = DEVICE == "cuda"
ON_HOPPER = ON_GPU and torch.cuda.get_device_capability() == (9, 0)
EMULATORS = {"cuda": None if ON_GPU else "emulated_forward", "hopper": None if ON_HOPPER else "emulator"}


def forward_by(
    backend: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., Tensor]:  # fmt: skip
    """`conv_attention` by "cuda" or "hopper", with NaN in whatever it does not write; `seed` is the emulator's."""
    poison_memory(monkeypatch)
    emulator = EMULATORS[backend] and request.getfixturevalue(EMULATORS[backend])

    def run(*inputs: Tensor, seed: int = 0, **options: object) -> Tensor:
        if emulator:
            emulator.seed = seed
        return conv_attention(*inputs, **options, backend=backend)

    return run
