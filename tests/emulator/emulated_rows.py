"""The row kernels of the multi-token attention on a CPU."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from emulated_kernels import Emulator, launch_code

from mta_kernels.multi_token_attention.rows_cuda import rows
from mta_kernels.multi_token_attention.rows_cuda.rows import RowConstants
from mta_kernels.nvrtc import driver
from mta_kernels.nvrtc.compiler import Source

H200 = 232448  # bytes of shared memory a block may have
ONE_OR_TWO_CLUSTERS = "CLUSTER < 8 ? 2 * CLUSTER : CLUSTER"  # that run at once, in blocks


class RowsEmulator(Emulator):
    def program(self, wanted: Source) -> str:
        kernel = "mix_rows_backward" if wanted.path.stem == "backward" else "mix_rows"
        code = f"#include <device.cuh>\nnamespace kernel {{\n#include <{wanted.path.name}>\n}}\n"
        return code + launch_code("kernel", kernel, ONE_OR_TWO_CLUSTERS)


@pytest.fixture
def emulated_rows(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The row kernels run on CPU tensors in this test.

    Its fields may be changed: the seed of threads and copies, the GPU's capability and shared memory, clusters at once.
    """
    found = SimpleNamespace(seed=0, capability=(9, 0), shared_memory=H200, clusters=3)
    emulator = RowsEmulator()

    def launch(*args: Any) -> None:
        emulator.seed = found.seed
        emulator.launch(*args)

    def kernel(constants: RowConstants, device: torch.device) -> Any:
        name = "mix_rows_backward" if constants.backward else "mix_rows"
        return emulator.load(emulator.machine_code(constants.source("sm_90a")), name, 0, device)

    monkeypatch.setattr(rows, "capability", lambda device: found.capability)
    monkeypatch.setattr(rows, "shared_memory_limit", lambda device: found.shared_memory)
    monkeypatch.setattr(rows, "choose_plan", rows.choose_plan.__wrapped__)
    monkeypatch.setattr(rows, "clusters_at_once", lambda plan, device: found.clusters)
    monkeypatch.setattr(rows, "kernel", kernel)
    monkeypatch.setattr(driver, "launch", launch)
    return found
