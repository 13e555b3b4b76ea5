"""The gate: which changes of a kernel fail it, which pass, and what it prints. On made-up rows, without a compiler."""

import dataclasses
import itertools
from pathlib import Path

import pytest

from mta_kernels.conv_attention.cuda_sm80 import forward
from mta_kernels.conv_attention.cuda_sm80.backward import constants_for
from mtabench.problem.inputs import DTYPES
from mtabench.static import plans
from mtabench.static.compiling import short_name
from mtabench.static.limits import DEFAULT_TARGETS, limits_of
from mtabench.static.records import (
    BETTER,
    DOES_NOT_FIT,
    FAILED,
    NEW,
    SKIP,
    SKIPPED,
    WORSE,
    Inspection,
    Kernel,
    compare,
    read_json,
)
from mtabench.static.shapes import ALL_SHAPES, Shape

BASELINE = Path(__file__).parents[2] / "results/static/baseline.json"
SHAPE = Shape()
TOOLS = {"triton": "3.6.0", "ptxas": "12.8.93"}
KERNEL = Kernel(
    "sm_90", SHAPE.name, "fwd", "ok", "forward", "triton", warps=4, registers=168, spill_store_bytes=0,
    spill_load_bytes=0, static_shared_bytes=0, dynamic_shared_bytes=65536, blocks_per_sm=3, warps_per_sm=12,
    limited_by="registers, shared memory",
)  # fmt: skip


def inspection(*kernels, toolchain=TOOLS):
    return Inspection(kernels, [SHAPE], toolchain)


def changed(before, **now):
    """Verdicts and lines on a kernel that became another."""
    found = compare(inspection(before), inspection(dataclasses.replace(before, **now)), {"sm_90"})
    return [(finding.verdict, finding.line) for finding in found.findings]


@pytest.mark.parametrize(
    ("now", "verdict", "words"),
    [
        (
            {"spill_store_bytes": 8, "spill_load_bytes": 12},
            WORSE,
            "starts to spill: 8 bytes of spill stores and 12 of loads a thread (was no spills)",
        ),
        (
            {"warps_per_sm": 8, "registers": 200},
            WORSE,
            "loses occupancy: 8 warps on an SM, limited by registers, shared memory, with 200 registers and 64.0 KiB",
        ),
        ({"warps_per_sm": 16}, BETTER, "gains occupancy"),
        ({"status": DOES_NOT_FIT, "reason": "too much"}, WORSE, "no longer fits: too much"),
        ({"status": FAILED, "reason": "no such thing"}, WORSE, "no longer compiles: no such thing"),
        ({"status": SKIPPED, "reason": "no nvcc"}, SKIP, "cannot be compiled here: no nvcc"),
    ],
)
def test_a_change_that_matters_is_one_line(now, verdict, words):
    [(got, line)] = changed(KERNEL, **now)
    assert got == verdict
    assert line.startswith("sm_90, bf16, head dim 64, conv 6x11: fwd ")
    assert words in line


SPILLING = dataclasses.replace(KERNEL, spill_store_bytes=8, spill_load_bytes=8)
BROKEN = dataclasses.replace(KERNEL, status=FAILED, registers=None, spill_store_bytes=None, warps_per_sm=None)
SILENT = {"registers": 160, "dynamic_shared_bytes": 70000, "warps": 8, "stages": 4, "tiles": "BLOCK_M=32"}


@pytest.mark.parametrize(
    ("before", "now", "verdicts"),
    [
        (SPILLING, {"spill_load_bytes": 12}, [WORSE]),
        (SPILLING, {"spill_load_bytes": 4}, [BETTER]),
        (KERNEL, SILENT, []),
        (KERNEL, {"warps_per_sm": 4, "spill_store_bytes": 4}, [WORSE, WORSE]),
        (BROKEN, {}, []),
        (BROKEN, {"status": "ok"}, [BETTER]),
    ],
)
def test_each_change_has_a_verdict_of_its_own(before, now, verdicts):
    assert [verdict for verdict, _ in changed(before, **now)] == verdicts


def row_of(source, status, reason="why", kernel=None):
    """The row of a source that has none of its kernels, or of one of them."""
    return Kernel("sm_90", SHAPE.name, kernel or source, status, source, reason=reason)


@pytest.mark.parametrize(
    ("head", "verdicts", "line"),
    [
        ([dataclasses.replace(KERNEL, kernel="bwd")], [WORSE, NEW], "fwd is gone"),
        ([KERNEL, dataclasses.replace(KERNEL, kernel="bwd", status=FAILED, reason="why")], [WORSE], "bwd "),
        ([KERNEL, dataclasses.replace(KERNEL, kernel="bwd", status=DOES_NOT_FIT, reason="why")], [WORSE], "bwd "),
        ([row_of("forward", SKIPPED, "no nvcc")], [SKIP], "no nvcc"),  # its kernels are not gone
        ([row_of("forward", FAILED, "no tile fits")], [WORSE], "forward does not compile: no tile fits"),
        ([row_of("", FAILED, "a crash", kernel="all")], [WORSE], "all does not compile: a crash"),
    ],
)
def test_kernels_that_came_or_went(head, verdicts, line):
    found = compare(inspection(KERNEL), inspection(*head), {"sm_90"})
    assert [finding.verdict for finding in found.findings] == verdicts
    assert line in found.findings[0].line
    assert found.common == (KERNEL in head)


def test_only_what_was_asked_for_can_be_gone():
    base = inspection(
        KERNEL, dataclasses.replace(KERNEL, target="sm_80"), dataclasses.replace(KERNEL, shape="another shape")
    )
    assert compare(base, inspection(KERNEL), {"sm_90"}).findings == []
    assert compare(base, inspection(), {"sm_90"}, names=["bwd"]).findings == []
    assert len(compare(base, inspection(), {"sm_90", "sm_80"}).findings) == 2


def test_other_compilers_are_named_and_those_that_one_side_lacks_are_not():
    other = inspection(KERNEL, toolchain={"triton": "3.7.0", "nvcc": "13.0.88"})
    assert compare(inspection(KERNEL), other, {"sm_90"}).toolchains == "triton 3.7.0 instead of 3.6.0"
    assert compare(inspection(KERNEL), inspection(KERNEL), {"sm_90"}).toolchains == ""


def test_the_cuda_forward_and_backward_spill_on_no_target_and_share_an_sm_as_designed():
    """What was compiled for the committed baseline, which the gate holds the kernels to."""
    base = read_json(BASELINE)
    rows = {row.key: row for row in base.kernels if row.kernel in ("cuda_forward", "cuda_backward")}
    for target, shape in itertools.product(DEFAULT_TARGETS, base.shapes):
        if forward.shape_unsupported(DTYPES[shape.dtype], shape.head_dim, *shape.conv):
            continue
        limit = limits_of(target).shared_per_block
        given = DTYPES[shape.dtype], shape.head_dim, shape.operation.conv, shape.causal, shape.packed, limit
        designed = {"cuda_forward": forward.Sm80ForwardConstants(*given).blocks_an_sm}
        if of_backward := constants_for(*given):
            designed["cuda_backward"] = of_backward.tiles.blocks
        for name, blocks in designed.items():
            row = rows.pop((target, shape.name, name))
            assert (row.status, row.spill_bytes, row.stack_bytes, row.blocks_per_sm) == ("ok", 0, 0, blocks), row.key
    assert not rows


@pytest.mark.parametrize("target", ["sm_80", "sm_90"])
def test_plans_name_the_kernels_of_the_baseline(target):
    """Without compiling: of a shape that takes other paths, packed and in pages, with fewer KV heads."""
    base, shape, gpu = read_json(BASELINE), ALL_SHAPES[-1], limits_of(target).planned
    for source in plans.CALLS:
        if source.__name__ == "ladder":
            continue
        launched = {call.name for plan in source(shape, gpu) for call in plan.calls if call.language != "torch"}
        rows = {row.kernel.partition(".")[0] for row in base.kernels
                if (row.target, row.shape, row.source) == (target, shape.name, source.__name__)}  # fmt: skip
        assert {short_name(name) for name in launched} == rows
