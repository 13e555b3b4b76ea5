"""The gate: which changes of a kernel fail it, which pass, and what is said. On rows made up, so without a compiler."""

import dataclasses
import itertools
from pathlib import Path

import pytest

from mta_kernels.conv_attention.cuda_sm80 import forward
from mta_kernels.conv_attention.cuda_sm80.backward_constants import constants_for
from mtabench.problem.inputs import DTYPES
from mtabench.static.baseline import BETTER, NEW, SKIP, WORSE, compare
from mtabench.static.limits import DEFAULT_TARGETS, limits_of
from mtabench.static.records import DOES_NOT_FIT, FAILED, SKIPPED, Inspection, Kernel, read_json
from mtabench.static.shapes import Shape

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


def test_spilling_more_or_less():
    spilling = dataclasses.replace(KERNEL, spill_store_bytes=8, spill_load_bytes=8)
    assert [verdict for verdict, _ in changed(spilling, spill_load_bytes=12)] == [WORSE]
    assert [verdict for verdict, _ in changed(spilling, spill_load_bytes=4)] == [BETTER]


def test_what_only_changed_passes_without_a_word():
    now = {"registers": 160, "dynamic_shared_bytes": 70000, "warps": 8, "stages": 4, "tiles": "BLOCK_M=32"}
    assert changed(KERNEL, **now) == []


def test_one_change_may_be_two_findings():
    now = {"warps_per_sm": 4, "spill_store_bytes": 4}
    assert [verdict for verdict, _ in changed(KERNEL, **now)] == [WORSE, WORSE]


def test_what_failed_before_may_fail_again():
    failed = dataclasses.replace(KERNEL, status=FAILED, registers=None, spill_store_bytes=None, warps_per_sm=None)
    assert changed(failed) == []
    assert changed(failed, status="ok")[0][0] == BETTER


def test_a_kernel_that_is_gone_fails_and_a_new_one_passes():
    other = dataclasses.replace(KERNEL, kernel="bwd")
    found = compare(inspection(KERNEL), inspection(other), {"sm_90"})
    assert [finding.verdict for finding in found.findings] == [WORSE, NEW]
    assert "fwd is gone" in found.findings[0].line
    assert found.common == 0


@pytest.mark.parametrize("status", [FAILED, DOES_NOT_FIT])
def test_a_new_kernel_that_cannot_run_fails(status):
    other = dataclasses.replace(KERNEL, kernel="bwd", status=status, reason="why")
    found = compare(inspection(KERNEL), inspection(KERNEL, other), {"sm_90"})
    assert [finding.verdict for finding in found.findings] == [WORSE]


def test_only_what_was_asked_for_can_be_gone():
    base = inspection(
        KERNEL, dataclasses.replace(KERNEL, target="sm_80"), dataclasses.replace(KERNEL, shape="another shape")
    )
    assert compare(base, inspection(KERNEL), {"sm_90"}).findings == []
    assert compare(base, inspection(), {"sm_90"}, names=["bwd"]).findings == []
    assert len(compare(base, inspection(), {"sm_90", "sm_80"}).findings) == 2


def test_kernels_of_a_source_that_is_skipped_are_not_gone():
    base = inspection(dataclasses.replace(KERNEL, source="hopper"))
    skipped = Kernel("sm_90", SHAPE.name, "hopper", SKIPPED, "hopper", "cuda", "no nvcc")
    found = compare(base, inspection(skipped), {"sm_90"})
    assert [finding.verdict for finding in found.findings] == [SKIP]


def test_host_code_that_fails_is_told_once():
    failed = Kernel("sm_90", SHAPE.name, "forward", FAILED, "forward", reason="no tile fits")
    found = compare(inspection(KERNEL), inspection(failed), {"sm_90"})
    assert [finding.verdict for finding in found.findings] == [WORSE]
    assert "forward does not compile: no tile fits" in found.findings[0].line


def test_a_crash_of_the_compiler_is_told_once():
    lost = Kernel("sm_90", SHAPE.name, "all", FAILED, reason="its process was ended by SIGABRT")
    found = compare(inspection(KERNEL), inspection(lost), {"sm_90"})
    assert [finding.verdict for finding in found.findings] == [WORSE]


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
        designed = {"cuda_forward": forward.ForwardConstants(*given).blocks_an_sm}
        if of_backward := constants_for(*given):
            designed["cuda_backward"] = of_backward.tiles.blocks
        for name, blocks in designed.items():
            row = rows.pop((target, shape.name, name))
            assert (row.status, row.spill_bytes, row.stack_bytes, row.blocks_per_sm) == ("ok", 0, 0, blocks), row.key
    assert not rows
