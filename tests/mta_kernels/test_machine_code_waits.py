"""Machine code for Hopper waits for loads and products that are under way, which no test of results has to meet.

An arrival at an mbarrier does not wait for loads that are under way. A copy that another thread starts after it may
then overwrite what they read, as happened to queries of `mix_logits` (docs/decisions/044). A test of results meets that
only behind a fast copy, so this one reads the code. Between a load and an arrival an instruction has to wait for the
load, or for all of memory.

A wgmma instruction adds to registers while others are executed. The compiler takes its sums as complete at once, and
may copy them before the wait, as in a draft of the backward (docs/decisions/080).

What norm and gate of a decode step read does not wait for the kernel before, which ends much later.
"""

from __future__ import annotations

import bisect
import re
from pathlib import Path

import pytest
import torch

from mta_kernels.conv_attention.hopper.backward import HopperBackwardConstants
from mta_kernels.conv_attention.hopper.forward import HopperForwardConstants
from mta_kernels.multi_token_attention.decode_cuda.step import StepConstants, StepKernel
from mta_kernels.multi_token_attention.mix_cuda import logits, values
from mta_kernels.nvrtc import compiler
from mta_kernels.operation import Convolution
from mtabench.static import machine_code

BF16, TAPS = torch.bfloat16, Convolution(6, 11, 5)
LABEL = re.compile(r"^(\.L_\w+):", re.MULTILINE)
SUMS = re.compile(r"HGMMA\.64x(\d+)x16\.F32\S* R(\d+)")
INSTRUCTION = re.compile(r"/\*[0-9a-f]{4,}\*/\s+(.*?)\s*;\s+/\* 0x[0-9a-f]{16} \*/\n\s+/\* (0x[0-9a-f]{16}) \*/")
NO_SCOREBOARD, MOST_GROUPS = 7, 8


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


def early_uses(listing: str) -> set[str]:
    """Instructions that name a register into which products under way add, along every branch.

    Products are under way in groups. An HGMMA with `gsb0` ends one, and `WARPGROUP.DEPBAR.LE gsb0, n` waits until n are
    left.
    """
    found, seen = set(), set()
    instructions = list(INSTRUCTION.finditer(listing))
    starts = [match.start() for match in instructions]
    labels = {match[1]: bisect.bisect(starts, match.start()) for match in LABEL.finditer(listing)}
    paths: list[tuple[int, tuple[frozenset[int], ...]]] = [(0, (frozenset(),))]
    while paths:
        at, groups = paths.pop()
        while at < len(instructions) and (at, groups) not in seen:
            seen.add((at, groups))
            words = instructions[at][1]
            at += 1
            if words.startswith("HGMMA"):
                product = SUMS.match(words)  # none if it multiplies nothing, and ends a group
                sums = range(int(product[2]), int(product[2]) + int(product[1]) // 2) if product else ()
                groups = (*(group.difference(sums) for group in groups[:-1]), groups[-1].union(sums))
                groups += (frozenset(),) * ("gsb0" in words)
                if len(groups) > MOST_GROUPS:  # the two oldest as one, so that a loop has few states
                    groups = (groups[0] | groups[1], *groups[2:])
                while len(groups) > 1 and not groups[0]:
                    groups = groups[1:]
            elif wait := re.match(r"WARPGROUP\.DEPBAR\.LE gsb0, 0x(\d+)", words):
                groups = groups[-1 - int(wait[1]) :]
            elif any(int(number) in group for number in re.findall(r"\bR(\d+)\b", words) for group in groups):
                found.add(words)
            if branch := re.search(r"\bBRA .*`\((\.L_\w+)\)", words):
                paths.append((labels[branch[1]], groups))
            if re.match(r"BRA `|EXIT", words):
                break
    return found


def listing_of(source: compiler.Source, tmp_path: Path) -> str:
    if reason := compiler.missing_package():
        pytest.skip(reason)
    cubin = tmp_path / "kernel.cubin"
    cubin.write_bytes(compiler.machine_code(source))
    return machine_code.run(machine_code.tool("nvdisasm"), "-c", "-hex", str(cubin))


SOURCES = {
    "logits, head dim 64": logits.constants_for(16, 64).source(),
    "logits, head dim 128": logits.constants_for(16, 128).source(),
    "values, head dim 64": values.constants_for(16, 64).source(),
    "forward, head dim 128": HopperForwardConstants(BF16, 128, TAPS, causal=True, spans=False).source(),
    "backward, head dim 64": HopperBackwardConstants(BF16, 64, TAPS, causal=True, spans=False).source(),
    "backward, head dim 128": HopperBackwardConstants(BF16, 128, TAPS, causal=True, spans=False).source(),
}


@pytest.mark.parametrize("name", SOURCES)
def test_loads_and_products_are_complete_before_others_go_on(name: str, tmp_path: Path) -> None:
    listing = listing_of(SOURCES[name], tmp_path)
    assert {"SYNCS.ARRIVE", "LDS", "HGMMA"} <= {*re.findall(r"SYNCS\.ARRIVE|LDS|HGMMA", listing)}
    assert early_arrivals(listing) == []
    assert early_uses(listing) == set()


@pytest.mark.parametrize("gate", [1, 2])
def test_norm_and_gate_are_read_before_the_kernel_of_v_has_ended(gate: int, tmp_path: Path) -> None:
    constants = StepConstants(BF16, 16, 64, False, TAPS, True, TAPS, True, norm=True, gate=gate)
    before, after = listing_of(StepKernel("merge", constants).source("sm_90"), tmp_path).split("ACQBULK")
    assert "LDG.E.U16" in before
    assert {load for load in re.findall(r"LDG\S+", after) if ".128" not in load} == set()  # partial outputs alone
    assert "LDG.E.128" in after


ADDS, OTHERS = "HGMMA.64x24x16.F32 R8, gdesc[UR4], R8, gsb0", "HGMMA.64x8x16.F32 R32, R4, gdesc[UR4], R32, gsb0"
WAIT, COPIES = "WARPGROUP.DEPBAR.LE gsb0, 0x{}", "MOV R0, R19"


@pytest.mark.parametrize(
    ("code", "found"),
    [
        ([ADDS, COPIES, WAIT.format(0)], {COPIES}),
        ([ADDS, OTHERS, WAIT.format(1), COPIES, WAIT.format(0), "MOV R0, R32"], set()),
        ([".L_x_0:", COPIES, ADDS, "@!P0 BRA `(.L_x_0)", WAIT.format(0)], {COPIES}),
        ([ADDS, "BRA `(.L_x_0)", COPIES, ".L_x_0:", WAIT.format(0)], set()),
    ],
    ids=["copied before the wait", "copied when its group is complete", "copied in the next iteration", "passed over"],
)
def test_sums_that_are_used_too_early_are_found(code: list[str], found: set[str]) -> None:
    words = f"/* 0x{0:016x} */"
    listing = [x if x.endswith(":") else f"        /*0000*/  {x} ;  {words}\n    {words}" for x in code]
    assert early_uses("\n".join(listing)) == found
