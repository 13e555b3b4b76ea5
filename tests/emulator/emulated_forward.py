"""The CUDA forward on a CPU."""

from __future__ import annotations

import pytest
from emulated_kernels import LAUNCH, Emulator

from mta_kernels.conv_attention import banded
from mta_kernels.conv_attention.cuda_decode import backend
from mta_kernels.conv_attention.cuda_forward import forward
from mta_kernels.nvrtc import driver
from mta_kernels.nvrtc.compiler import Source


class ForwardEmulator(Emulator):
    folders = (banded.FOLDER,)

    def program(self, wanted: Source) -> str:
        code = f"#include <device.cuh>\nnamespace kernel {{\n#include <mma.cuh>\n#include <{wanted.path.name}>\n}}\n"
        return code + LAUNCH.format(space="kernel", kernel="cuda_forward")


@pytest.fixture
def emulated_forward(monkeypatch: pytest.MonkeyPatch) -> ForwardEmulator:
    """`backend="cuda"` runs on CPU tensors in this test."""
    found = ForwardEmulator()
    found.take_over(monkeypatch, forward)
    monkeypatch.setattr(driver, "launch", found.launch)
    monkeypatch.setattr(forward, "kernel", forward.kernel.__wrapped__)
    monkeypatch.setattr(backend, "platform_unsupported", lambda device: None)
    return found
