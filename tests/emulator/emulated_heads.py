"""The kernels of the multi-token attention's backward that mix heads, on a CPU."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from emulated_bands import emulate
from emulated_kernels import Emulator, launch_code

from mta_kernels.multi_token_attention.heads_cuda import heads, plan
from mta_kernels.nvrtc.compiler import Source


class HeadsEmulator(Emulator):
    folders = (plan.bands.FOLDER,)

    def program(self, wanted: Source) -> str:
        code = f"#include <device.cuh>\nnamespace kernel {{\n#include <{wanted.path.name}>\n}}\n"
        return code + launch_code("kernel", heads.KERNELS[wanted.path.stem])


@pytest.fixture
def emulated_heads(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """`HeadMixings` takes CPU tensors in this test; its field is the seed of threads and copies."""
    return emulate(monkeypatch, heads, HeadsEmulator())
