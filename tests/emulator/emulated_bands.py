"""The convolution kernels of the multi-token attention on a CPU."""

from __future__ import annotations

import pytest
from emulated_kernels import Emulator, launch_code

from mta_kernels.nvrtc.compiler import Source

KERNELS = {"convolve.cu": "convolve_rows", "gradients.cu": "convolution_gradients"}


class BandsEmulator(Emulator):
    def program(self, wanted: Source) -> str:
        code = f"#include <device.cuh>\nnamespace kernel {{\n#include <{wanted.path.name}>\n}}\n"
        return code + launch_code("kernel", KERNELS[wanted.path.name])


@pytest.fixture
def emulated_bands(monkeypatch: pytest.MonkeyPatch) -> BandsEmulator:
    """`convolve` and `BandsGradient` take CPU tensors in this test; a field is the seed of threads and copies."""
    emulator = BandsEmulator()
    emulator.take_over(monkeypatch)
    return emulator
