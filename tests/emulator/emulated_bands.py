"""The convolution kernels of the multi-token attention on a CPU."""

from __future__ import annotations

from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from emulated_kernels import Emulator, launch_code

from mta_kernels.multi_token_attention.bands_cuda import bands
from mta_kernels.nvrtc import driver
from mta_kernels.nvrtc.compiler import Source

KERNELS = {"convolve.cu": "convolve_rows", "gradients.cu": "convolution_gradients"}


class BandsEmulator(Emulator):
    def program(self, wanted: Source) -> str:
        code = f"#include <device.cuh>\nnamespace kernel {{\n#include <{wanted.path.name}>\n}}\n"
        return code + launch_code("kernel", KERNELS[wanted.path.name])


def emulate(monkeypatch: pytest.MonkeyPatch, module: ModuleType, emulator: Emulator) -> SimpleNamespace:
    """The kernels of a module run in an emulator; the seed of threads and copies is a field of what is returned."""
    fields = SimpleNamespace(seed=0)

    def launch(*args: Any) -> None:
        emulator.seed = fields.seed
        emulator.launch(*args)

    def kernel(name: str, constants: Any, device: torch.device) -> Any:
        return emulator.load(emulator.machine_code(constants.source("sm_80")), name, 0, device)

    monkeypatch.setattr(module, "kernel", kernel)
    monkeypatch.setattr(driver, "launch", launch)
    return fields


@pytest.fixture
def emulated_bands(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """`convolve` and `BandsGradient` take CPU tensors in this test; its field is the seed of threads and copies."""
    return emulate(monkeypatch, bands, BandsEmulator())
