"""The CUDA kernels of multi-token attention's decode on a CPU."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace

import pytest
from emulated_kernels import Emulator, launch_code

from mta_kernels.conv_attention.cuda_decode import plan as conv_decode
from mta_kernels.multi_token_attention.decode_cuda import step
from mta_kernels.nvrtc import driver
from mta_kernels.nvrtc.compiler import Source


class MtaDecodeEmulator(Emulator):
    folders = (conv_decode.FOLDER,)

    def program(self, wanted: Source) -> str:
        code = f"#include <device.cuh>\nnamespace kernel {{\n#include <{wanted.path.name}>\n}}\n"
        return code + launch_code(space="kernel", kernel=f"mta_decode_{wanted.path.stem}")


@pytest.fixture
def emulated_mta_decode(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    """Decode steps that the CUDA kernels take run on CPU tensors in this test; `launched` counts their kernels.

    Its other fields may be changed: the seed of threads and copies, and multiprocessors.
    """
    fields = SimpleNamespace(seed=0, multiprocessors=5, launched=0)
    emulator = MtaDecodeEmulator()

    def launch(*args, follows: bool = False) -> None:
        emulator.seed = fields.seed
        emulator.launch(*args)
        fields.launched += 1

    monkeypatch.setattr(step, "unsupported", step.shape_unsupported)
    monkeypatch.setattr(step, "sm_count", lambda device: fields.multiprocessors)
    step._kernels.cache_clear()
    emulator.take_over(monkeypatch)
    monkeypatch.setattr(driver, "launch", launch)
    yield fields
    assert fields.launched % 3 == 0
    assert fields.launched
