"""Gradients of `conv_attention` by a kernel with a banded convolution: on a GPU that has it, else in its emulator."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from banded_forwards import EMULATORS
from kernel_inputs import assert_as_reference, make, poison_memory

from mta_kernels.call_memory import CallMemory
from mta_kernels.conv_attention import replay
from mta_kernels.conv_attention.banded.backward_plan import ChunkPlan
from mta_kernels.conv_attention.cuda_sm80 import backward as cuda_backward
from mta_kernels.conv_attention.hopper import backward

NAMES = ("q", "k", "v", "weight")


class Kernel(NamedTuple):
    """A backend by its name, and its emulator, None on a GPU."""

    name: str
    emulator: Any

    def assert_in_any_order(self, leaves: dict[str, torch.Tensor], seeds=range(4), **options) -> None:
        """As the reference, whatever the order of blocks, threads and copies; a GPU has one of its own."""
        for seed in seeds if self.emulator else (0,):
            self.seed(seed)
            assert_as_reference(leaves, self.name, **options)

    def seed(self, seed: int) -> None:
        """The emulator's from now on."""
        if self.emulator:
            self.emulator.seed = seed


def kernel_of(name: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Kernel:
    """`backend=name` runs here, with NaN in whatever a kernel does not write."""
    poison_memory(monkeypatch)
    monkeypatch.setattr(backward, "_launches", {})  # whose plans a test may change
    monkeypatch.setattr(cuda_backward, "_plan", ChunkPlan.of)
    monkeypatch.setattr(replay, "_seen_backward", CallMemory())
    return Kernel(name, EMULATORS[name] and request.getfixturevalue(EMULATORS[name]))


def inputs(*shape, dtype=torch.float16, **options) -> dict[str, torch.Tensor]:
    """As `make`, by name."""
    return dict(zip(NAMES, make(*shape, dtype, **options), strict=True))
