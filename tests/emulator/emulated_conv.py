"""The kernels of `cuda_conv` on a CPU."""

from __future__ import annotations

import pytest
from emulated_kernels import Emulator, launch_code

from mta_kernels.nvrtc.compiler import Source
from mta_ladder.cuda_conv import decode, shape

KERNELS = {
    "forward.cu": ("conv_attention_forward",),
    "backward_q.cu": ("conv_attention_backward_q",),
    "backward_kv.cu": ("conv_attention_backward_kv",),
    "decode.cu": ("conv_attention_decode_split", "conv_attention_decode_combine"),
}


class ConvEmulator(Emulator):
    def program(self, wanted: Source) -> str:
        """All kernels of a shape, one library for the four sources."""
        code = "#include <tiles.cuh>\n"
        for name, kernels in KERNELS.items():
            space = name.partition(".")[0]
            code += f"namespace {space} {{\n#include <{name}>\n}}\n"
            code += "".join(launch_code(space=space, kernel=kernel) for kernel in kernels)
        return code


@pytest.fixture
def emulated_cuda(monkeypatch: pytest.MonkeyPatch) -> ConvEmulator:
    """`cuda_conv` runs on CPU tensors in this test."""
    found = ConvEmulator()
    found.take_over(monkeypatch)
    monkeypatch.setattr(shape, "device_unsupported", lambda device: None)
    monkeypatch.setattr(shape, "missing_package", lambda *_: None)
    monkeypatch.setattr(decode, "choose_splits", lambda *_: 3)
    return found
