"""The tile kernels of the multi-token attention on a CPU."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from emulated_kernels import Emulator, launch_code

from mta_kernels.multi_token_attention.tiles_cuda import tiles
from mta_kernels.multi_token_attention.tiles_cuda.plan import TileConstants
from mta_kernels.nvrtc import driver
from mta_kernels.nvrtc.compiler import Source

H200 = 232448  # bytes of shared memory a block
KERNELS = {"pre.cu": ("pre_tiles", "merge_statistics"), "post.cu": ("post_tiles",)}


class TilesEmulator(Emulator):
    def program(self, wanted: Source) -> str:
        code = f"#include <device.cuh>\nnamespace kernel {{\n#include <{wanted.path.name}>\n}}\n"
        return code + "".join(launch_code(space="kernel", kernel=name) for name in KERNELS[wanted.path.name])


@pytest.fixture
def emulated_tiles(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """`pre_tiles` and `post_tiles` take CPU tensors in this test.

    Its fields may be changed: the seed of threads and copies, multiprocessors, shared memory.
    """
    fields = SimpleNamespace(seed=0, multiprocessors=3, shared_memory=H200)
    emulator = TilesEmulator()

    def launch(*args: Any) -> None:
        emulator.seed = fields.seed
        emulator.launch(*args)

    def kernel(name: str, constants: TileConstants, device: torch.device) -> Any:
        return emulator.load(emulator.machine_code(constants.source("sm_80")), name, 0, device)

    monkeypatch.setattr(tiles, "shared_memory_limit", lambda device: fields.shared_memory)
    monkeypatch.setattr(tiles, "sm_count", lambda device: fields.multiprocessors)
    monkeypatch.setattr(tiles, "choose_plan", tiles.choose_plan.__wrapped__)
    monkeypatch.setattr(tiles, "kernel", kernel)
    monkeypatch.setattr(driver, "launch", launch)
    return fields
