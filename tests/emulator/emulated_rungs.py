"""The CUDA rungs of `attention` on a CPU."""

from __future__ import annotations

import pytest
import torch
from emulated_kernels import Emulator, launch_code

from mta_kernels.nvrtc.compiler import Source
from mta_ladder import cuda_flash, cuda_unfused

MATRIX_KERNELS = ("scores", "softmax_rows", "weighted_sum")
KERNELS = {"cuda_naive.cu": MATRIX_KERNELS, "cuda_tiled.cu": MATRIX_KERNELS, "cuda_flash.cu": ("cuda_flash",)}


class RungEmulator(Emulator):
    def program(self, wanted: Source) -> str:
        code = f"#include <device.cuh>\nnamespace rung {{\n#include <mma.cuh>\n#include <{wanted.path.name}>\n}}\n"
        return code + "".join(launch_code(space="rung", kernel=kernel) for kernel in KERNELS[wanted.path.name])


@pytest.fixture
def emulated_attention(monkeypatch: pytest.MonkeyPatch) -> RungEmulator:
    """The CUDA rungs run on CPU tensors in this test, for `attention` too."""
    found = RungEmulator()
    found.take_over(monkeypatch)
    for module in (cuda_flash, cuda_unfused):
        for name in ("device_unsupported", "missing_package"):
            monkeypatch.setattr(module, name, lambda *device: None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    return found
