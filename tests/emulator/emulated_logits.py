"""The kernel of kept logits on a CPU."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from emulated_hopper import tensor_map
from emulated_kernels import LAUNCH, Emulator

from mta_kernels.multi_token_attention.mix_cuda import logits
from mta_kernels.multi_token_attention.rows_cuda import plan as rows_plan
from mta_kernels.nvrtc.compiler import Source

# As in emulated_kernels.py; two clusters run at once.
CODE = """
#include <device.cuh>
namespace kernel {
#include <logits.cu>
}
extern "C" const char* mix_logits_emulated(int x, int y, int threads, int bytes, unsigned seed, const TensorMap* q,
                                           const TensorMap* k, const kernel::Arguments* args) {
    return emulator::launch(x, y, threads, bytes, seed, [=] { kernel::mix_logits(*q, *k, *args); }, 2 * CLUSTER);
}
"""


class LogitsEmulator(Emulator):
    folders = (rows_plan.FOLDER,)

    def program(self, wanted: Source) -> str:
        return CODE + LAUNCH.format(space="kernel", kernel="finish_logits")


@pytest.fixture
def emulated_logits(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """`keep_logits` takes CPU tensors in this test.

    Its fields may be changed: the seed of threads and copies, multiprocessors.
    """
    found = SimpleNamespace(seed=0, multiprocessors=3)
    emulator = LogitsEmulator()

    def launch(*args: Any) -> None:
        emulator.seed = found.seed
        emulator.launch(*args)

    emulator.laid_out = lambda *launched: lambda: launch(*launched)  # type: ignore[method-assign]
    emulator.take_over(monkeypatch, logits)
    monkeypatch.setattr(logits, "kernels", logits.kernels.__wrapped__)
    monkeypatch.setattr(logits, "tensor_map", tensor_map)
    monkeypatch.setattr(logits, "sm_count", lambda device: found.multiprocessors)
    return found
