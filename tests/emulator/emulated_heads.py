"""The kernels of the multi-token attention that mix heads, on a CPU."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from emulated_bands import emulate
from emulated_kernels import Emulator, launch_code

from mta_kernels.multi_token_attention.heads_cuda import forward, heads, plan
from mta_kernels.nvrtc.compiler import Source


class HeadsEmulator(Emulator):
    folders = (plan.bands.FOLDER,)

    def program(self, wanted: Source) -> str:
        code = f"#include <device.cuh>\nnamespace kernel {{\n#include <{wanted.path.name}>\n}}\n"
        return code + "".join(launch_code("kernel", name) for name in heads.KERNELS[wanted.path.stem])


@pytest.fixture
def emulated_heads(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """`HeadMixings`, `pre_heads` and `post_heads` take CPU tensors in this test; the seed of threads is a field."""
    monkeypatch.setattr(forward, "sm_count", lambda device: 3)  # persistent blocks with several tasks each
    return emulate(monkeypatch, heads, HeadsEmulator())
