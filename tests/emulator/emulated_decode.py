"""The CUDA decode on a CPU."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch
from emulated_kernels import Emulator, launch_code

from mta_kernels.conv_attention.cuda_decode import backend, decode, plan
from mta_kernels.conv_attention.cuda_decode.plan import DecodeConstants, choose_plan
from mta_kernels.nvrtc.compiler import Source

H200 = 232448  # bytes of shared memory a program


class DecodeEmulator(Emulator):
    def program(self, wanted: Source) -> str:
        code = "#include <device.cuh>\nnamespace kernel {\n#include <decode.cu>\n}\n"
        return code + launch_code(space="kernel", kernel="cuda_decode")


@pytest.fixture
def emulated_decode(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    """`backend="cuda"` decodes on CPU tensors in this test, whose programs leave the counts of arrivals at zero.

    Its fields may be changed: the seed of threads and copies, multiprocessors, shared memory.
    """
    fields = SimpleNamespace(seed=0, multiprocessors=5, shared_memory=H200, counts=torch.zeros(256, dtype=torch.int32))
    emulator = DecodeEmulator()

    def launch(*args) -> None:
        emulator.seed = fields.seed
        emulator.launch(*args)

    def kernel(constants: DecodeConstants, device: int):
        return emulator.load(emulator.machine_code(constants.source("sm_80")), "cuda_decode", 0, device)

    monkeypatch.setattr(plan, "shared_memory_limit", lambda device: fields.shared_memory)
    monkeypatch.setattr(plan, "sm_count", lambda device: fields.multiprocessors)
    monkeypatch.setattr(decode, "choose_plan", choose_plan.__wrapped__)
    monkeypatch.setattr(decode, "arrivals", lambda count, device: fields.counts)
    monkeypatch.setattr(decode, "kernel", kernel)
    monkeypatch.setattr(decode.driver, "launch", launch)
    monkeypatch.setattr(backend, "platform_unsupported", lambda device: None)
    yield fields
    assert (fields.counts == 0).all()
