"""The CUDA decode on a CPU."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch
from emulated_hopper import encode
from emulated_kernels import Emulator, launch_code

from mta_kernels.conv_attention.cuda_decode import backend, decode, hopper_plan, plan
from mta_kernels.conv_attention.cuda_decode.hopper_plan import choose_hopper_plan
from mta_kernels.conv_attention.cuda_decode.plan import choose_plan
from mta_kernels.nvrtc import driver
from mta_kernels.nvrtc.compiler import Source

H200 = 232448  # bytes of shared memory a program


def name_of(file: str) -> str:
    """The kernel of a source."""
    return "cuda_decode_merge" if file == "merge" else "cuda_decode"


class DecodeEmulator(Emulator):
    def program(self, wanted: Source) -> str:
        code = f"#include <device.cuh>\nnamespace kernel {{\n#include <{wanted.path.name}>\n}}\n"
        maps = "kernel::Maps" if wanted.path.stem == "hopper_heads" else ""
        return code + launch_code(space="kernel", kernel=name_of(wanted.path.stem), before=maps)


@pytest.fixture
def emulated_decode(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    """`backend="cuda"` decodes on CPU tensors in this test, whose programs leave the counts of arrivals at zero.

    Its fields may be changed: the seed of threads and copies, multiprocessors, shared memory, whether it is
    a Hopper GPU.
    """
    fields = SimpleNamespace(
        seed=0, multiprocessors=5, shared_memory=H200, hopper=False, counts=torch.zeros(256, dtype=torch.int32)
    )
    emulator = DecodeEmulator()

    def launch(*args, follows: bool = False) -> None:
        emulator.seed = fields.seed
        emulator.launch(*args)

    emulator.take_over(monkeypatch)
    for module in (plan, hopper_plan):
        monkeypatch.setattr(module, "shared_memory_limit", lambda device: fields.shared_memory)
        monkeypatch.setattr(module, "sm_count", lambda device: fields.multiprocessors)
    monkeypatch.setattr(hopper_plan, "capability", lambda device: (9, 0) if fields.hopper else (8, 0))
    monkeypatch.setattr(hopper_plan, "encode", encode)
    monkeypatch.setattr(hopper_plan, "_maps", {})
    monkeypatch.setattr(decode, "choose_plan", choose_plan.__wrapped__)
    monkeypatch.setattr(decode, "choose_hopper_plan", choose_hopper_plan.__wrapped__)
    monkeypatch.setattr(decode, "arrivals", lambda count, device: fields.counts)
    monkeypatch.setattr(driver, "launch", launch)
    monkeypatch.setattr(backend, "platform_unsupported", lambda device: None)
    yield fields
    assert (fields.counts == 0).all()
