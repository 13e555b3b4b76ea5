"""The CUDA forward and backward on a CPU."""

from __future__ import annotations

import pytest
from emulated_kernels import Emulator, launch_code

from mta_kernels.conv_attention import banded
from mta_kernels.conv_attention.cuda_decode import backend
from mta_kernels.conv_attention.cuda_sm80 import backward
from mta_kernels.nvrtc.compiler import Source

KERNELS = {
    "forward.cu": ("cuda_forward", "1"),
    "prepare.cu": ("cuda_backward_prepare", "1"),
    "backward.cu": ("cuda_backward", "1 + seed % 3 * 2"),  # blocks that wait for one another
    "backward_exact.cu": ("backward_exact", "1"),
}


class ForwardEmulator(Emulator):
    folders = (banded.FOLDER,)

    def runs(self, wanted: Source) -> bool:
        return wanted.architecture != "sm_90a"

    def program(self, wanted: Source) -> str:
        code = f"#include <device.cuh>\nnamespace kernel {{\n#include <mma.cuh>\n#include <{wanted.path.name}>\n}}\n"
        return code + launch_code("kernel", *KERNELS[wanted.path.name])


@pytest.fixture
def emulated_forward(monkeypatch: pytest.MonkeyPatch) -> ForwardEmulator:
    """`backend="cuda"` runs on CPU tensors in this test."""
    found = ForwardEmulator()
    found.take_over(monkeypatch)
    backward._kernels.cache_clear()
    monkeypatch.setattr(backend, "platform_unsupported", lambda device: None)
    return found
