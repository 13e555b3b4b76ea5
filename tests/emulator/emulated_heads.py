"""The kernels of the multi-token attention's backward that mix heads, on a CPU."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from emulated_kernels import Emulator, launch_code

from mta_kernels.multi_token_attention.heads_cuda import heads, plan
from mta_kernels.nvrtc import driver
from mta_kernels.nvrtc.compiler import Source


class HeadsEmulator(Emulator):
    folders = (plan.bands.FOLDER,)

    def program(self, wanted: Source) -> str:
        code = f"#include <device.cuh>\nnamespace kernel {{\n#include <{wanted.path.name}>\n}}\n"
        return code + launch_code("kernel", heads.KERNELS[wanted.path.stem])


@pytest.fixture
def emulated_heads(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """`HeadMixings` takes CPU tensors in this test; its field is the seed of threads and copies."""
    fields = SimpleNamespace(seed=0)
    emulator = HeadsEmulator()

    def launch(*args: Any) -> None:
        emulator.seed = fields.seed
        emulator.launch(*args)

    def kernel(name: str, constants: Any, device: torch.device) -> Any:
        return emulator.load(emulator.machine_code(constants.source("sm_80")), name, 0, device)

    monkeypatch.setattr(heads, "kernel", kernel)
    monkeypatch.setattr(driver, "launch", launch)
    return fields
