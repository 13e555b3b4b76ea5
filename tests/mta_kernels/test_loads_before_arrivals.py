"""Machine code for Hopper: what was loaded from shared memory has come before a warp says that it may be overwritten.

An arrival at an mbarrier does not wait for loads that are under way. A copy that another thread starts after it may
then overwrite what they read, as happened to queries of `mix_logits` (docs/decisions/044). A test of results meets that
only behind a fast copy, so this one reads the code: between a load and an arrival an instruction has to wait for the
load, or for all of memory.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from mta_kernels.conv_attention.hopper.backward import BackwardConstants
from mta_kernels.conv_attention.hopper.forward import ForwardConstants
from mta_kernels.multi_token_attention.mix_cuda import logits, values_plan
from mta_kernels.nvrtc import compiler
from mta_kernels.operation import Convolution
from mtabench.static import machine_code

BF16, TAPS = torch.bfloat16, Convolution(6, 11, 5)
INSTRUCTION = re.compile(r"/\*[0-9a-f]{4,}\*/\s+(.*?)\s*;\s+/\* 0x[0-9a-f]{16} \*/\n\s+/\* (0x[0-9a-f]{16}) \*/")
NO_SCOREBOARD = 7


def early_arrivals(listing: str) -> list[str]:
    """Arrivals that come while loads of shared memory are under way, in what `nvdisasm -hex` prints.

    Bits 46 to 48 of an instruction's second word name the scoreboard that its result clears, bits 52 to 57 those that
    it waits for. Code is read in its order: a branch that is taken only shortens what lies between.
    """
    found, under_way = [], set()
    for words, control in INSTRUCTION.findall(listing):
        bits = int(control, 16)
        under_way -= {i for i in range(6) if bits >> 52 >> i & 1}
        name = re.sub(r"^@!?U?P\w+ ", "", words)
        if name.startswith(("MEMBAR", "EXIT", "BRA `")):
            under_way = set()
        elif name.startswith("LDS") and (scoreboard := bits >> 46 & 7) != NO_SCOREBOARD:
            under_way.add(scoreboard)
        elif name.startswith("SYNCS.ARRIVE") and under_way:
            found.append(words)
    return found


def listing_of(source: compiler.Source, tmp_path: Path) -> str:
    if reason := compiler.missing_package():
        pytest.skip(reason)
    cubin = tmp_path / "kernel.cubin"
    cubin.write_bytes(compiler.machine_code(source))
    return machine_code.run(machine_code.tool("nvdisasm"), "-c", "-hex", str(cubin))


SOURCES = {
    "logits, head dim 64": logits.constants_for(16, 64).source,
    "logits, head dim 128": logits.constants_for(16, 128).source,
    "values, head dim 64": values_plan.constants_for(16, 64).source,
    "forward, head dim 128": ForwardConstants(BF16, 128, TAPS, causal=True, spans=False).source,
    "backward, head dim 64": BackwardConstants(BF16, 64, TAPS, causal=True, spans=False).source,
}


@pytest.mark.parametrize("name", SOURCES)
def test_loads_have_come_before_arrivals(name: str, tmp_path: Path) -> None:
    listing = listing_of(SOURCES[name], tmp_path)
    assert "SYNCS.ARRIVE" in listing
    assert "LDS" in listing
    assert early_arrivals(listing) == []
