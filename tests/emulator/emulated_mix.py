"""The forward of mixed heads on a CPU: the kernels of kept logits and of values."""

from __future__ import annotations

import pytest
from emulated_hopper import tensor_map
from emulated_kernels import Emulator, launch_code

from mta_kernels.multi_token_attention.mix_cuda import logits, values
from mta_kernels.multi_token_attention.rows_cuda import rows
from mta_kernels.nvrtc.compiler import Source

# As in emulated_kernels.py, with two tensor maps; one or two clusters run at once.
CODE = """
#include <device.cuh>
namespace kernel {{
#include <{name}.cu>
}}
extern "C" const char* mix_{name}_emulated(int x, int y, int threads, int bytes, unsigned seed, const TensorMap* a,
                                           const TensorMap* b, const kernel::Arguments* args) {{
    return emulator::launch(x, y, threads, bytes + 1024, seed, [=] {{
        kernel::mix_{name}(*a, *b, *args);
        for (int i = 0; i < 1024; i++)
            if (emulator::shared_memory()[bytes + i] != (char)0xFF)
                emulator::fail("a write beyond the block's shared memory");
    }}, CLUSTER < 8 ? 2 * CLUSTER : CLUSTER);
}}
"""


class MixEmulator(Emulator):
    folders = (rows.FOLDER,)

    def __init__(self) -> None:
        super().__init__()
        self.multiprocessors = 3

    def program(self, wanted: Source) -> str:
        code = CODE.format(name=wanted.path.stem)
        return code + launch_code(space="kernel", kernel="finish_logits") if wanted.path.stem == "logits" else code


@pytest.fixture
def emulated_mix(monkeypatch: pytest.MonkeyPatch) -> MixEmulator:
    """`keep_logits` and `mix_values` take CPU tensors in this test.

    Its fields may be changed: the seed of threads and copies, multiprocessors.
    """
    found = MixEmulator()
    found.take_over(monkeypatch)
    for module in (logits, values):
        monkeypatch.setattr(module, "_launches", {})
        monkeypatch.setattr(module, "tensor_map", tensor_map)
    monkeypatch.setattr(
        logits, "clusters_at_once", lambda constants, device: max(1, found.multiprocessors // constants.cluster)
    )
    return found
