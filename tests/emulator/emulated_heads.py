"""The kernels of the multi-token attention that mix heads, on a CPU."""

from __future__ import annotations

import pytest
from emulated_kernels import Emulator, launch_code

from mta_kernels.multi_token_attention.heads_cuda import heads
from mta_kernels.nvrtc.compiler import Source


class HeadsEmulator(Emulator):
    folders = (heads.bands.FOLDER,)

    def runs(self, wanted: Source) -> bool:
        return wanted.path.stem in heads.KERNELS

    def program(self, wanted: Source) -> str:
        names = [heads.KERNELS[wanted.path.stem], *(["merge_pieces"] if wanted.path.stem == "pre" else [])]
        code = f"#include <device.cuh>\nnamespace kernel {{\n#include <{wanted.path.name}>\n}}\n"
        return code + "".join(launch_code("kernel", name) for name in names)


@pytest.fixture
def emulated_heads(monkeypatch: pytest.MonkeyPatch) -> HeadsEmulator:
    """`HeadMixings`, `pre_heads` and `post_heads` take CPU tensors in this test; the seed of threads is a field."""
    monkeypatch.setattr(heads, "sm_count", lambda device: 3)  # persistent blocks with several tasks each
    emulator = HeadsEmulator()
    emulator.take_over(monkeypatch)
    return emulator
