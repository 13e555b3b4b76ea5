"""What only the Hopper backward has, against float64: on a Hopper GPU if there is one, else in the emulator."""

from __future__ import annotations

import pytest
import torch
from banded_backwards import Kernel, inputs, kernel_of
from banded_forwards import ON_HOPPER
from emulated_hopper import emulator  # noqa: F401
from planted_faults import plant

from mta_kernels.conv_attention.banded import backward_plan
from mta_kernels.conv_attention.hopper import backward
from mta_kernels.conv_attention.hopper import source as sources
from mta_kernels.operation import Convolution

BF16 = torch.bfloat16


@pytest.fixture(autouse=True)
def hopper(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Kernel:
    return kernel_of("hopper", request, monkeypatch)


@pytest.fixture
def chunks_of_a_block(monkeypatch: pytest.MonkeyPatch) -> None:
    """And scratch for one chunk of each head, so that chunks wait for others to be done with it."""
    monkeypatch.setattr(backward_plan, "MOST_CHUNK_ROWS", 118)
    monkeypatch.setattr(backward_plan, "SPARED_SCRATCH", 0)


def test_a_warpgroup_that_runs_ahead_overwrites_nothing(hopper) -> None:
    """The first passes rows down to the second: in these orders it is a tile ahead."""
    hopper.assert_in_any_order(inputs(1, 1, 1, 330, 16, (6, 11)), seeds=(6, 11), causal=False)


def test_a_warpgroup_may_release_a_stage_before_the_other_sees_it_full(hopper) -> None:
    """A stage that nobody waited for once let the first release it twice, and the second waited forever."""
    hopper.assert_in_any_order(inputs(2, 1, 1, 119, 16, (2, 5)), seeds=(7, 15, 22))


@pytest.mark.parametrize("rows", [118, 4248])
def test_sums_of_heads_with_rows_beyond_fp16_are_rounded_last(hopper, monkeypatch, rows: int) -> None:
    """Those of the other head at once, in chunks each key by the last that sees it."""
    monkeypatch.setattr(backward_plan, "MOST_CHUNK_ROWS", rows)
    monkeypatch.setattr(backward_plan, "SPARED_SCRATCH", 0)
    leaves = inputs(1, 2, 2, 250, 16, (6, 11), dtype=BF16)
    leaves["q"][:, 0, [0, 130]] *= 300
    leaves["k"][:, 0, [3, 64]] *= 300
    hopper.assert_in_any_order(leaves, seeds=(0, 11))


@pytest.mark.parametrize("taps", [1, 6, 8])
@pytest.mark.parametrize("batch_heads", [1, 3, 16, 64])
@pytest.mark.parametrize(("query_rows", "key_rows"), [(1, 1), (4096, 4096), (100, 70000), (10**6, 10**6)])
def test_scratch_takes_no_more_than_promised(taps: int, batch_heads: int, query_rows: int, key_rows: int) -> None:
    """By docs/design/hopper-backward.md: 4 GiB or 17 kB a head and key, at most 0.13 MB a key or 2 GiB, for 132 SMs."""
    geometry = backward.BackwardConstants(BF16, 64, Convolution(taps, 11, 5), causal=True, spans=False)
    plan = backward_plan.ChunkPlan.of(geometry, batch_heads, query_rows, key_rows, 132)
    rows = plan.slots * plan.row_blocks * geometry.block_rows
    assert 4 * rows * plan.pitch <= max(4 * 2**30, 4 * 4248 * batch_heads * plan.pitch)
    assert 4 * rows * plan.pitch <= max(2 * 2**30, 0.132e6 * plan.pitch)
    assert rows <= batch_heads * plan.all_row_blocks * geometry.block_rows + plan.chunks * batch_heads * 128
    assert 1 <= plan.slots <= plan.stages


SEEDS_OF_FAULTS = (26, 11, 2, 23, 5, 15)  # orders in which each fault below shows
TAKE_GRADS = """else if (own.warpgroup == 1{}) {{  // a thread that only waits could miss the phase
            barrier_wait(block.grads_full, passed);
            take_halo(block.shared + GRADS_DOWN, at.score_grads_at, 0, GRADS_ABOVE, GRAD_PITCH, own.thread);
            {}barrier_arrive(block.grads_empty);
"""


@pytest.mark.skipif(ON_HOPPER, reason="plants faults in the emulated source")
@pytest.mark.parametrize(
    ("file", "line", "instead"),
    [
        ("producer", "        barrier_wait_asleep(state.stored(block), state.phase());\n", ""),
        ("producer", "            barrier_wait(before.stored(block), before.phase());", ""),
        ("producer", "    barrier_wait(block.rows_empty, !odd_rows);\n", ""),
        ("producer", "        if (state.number >= 2) barrier_wait(state.reported(block), state.phase() ^ 1);\n", ""),
        (
            "products",
            "    products_wait<0>();\n    if (iteration > work.iteration && thread == 0)",
            "    products_wait<0>();\n    if (false)",
        ),
        (
            "consumer",
            TAKE_GRADS.format(" && own.thread < 8 * GRADS_ABOVE", ""),
            TAKE_GRADS.format("", "if (own.thread < 8 * GRADS_ABOVE) "),
        ),
    ],
    ids=[
        "work reported before it is stored",
        "products copied over rows that are still read",
        "queries copied over those that are still read",
        "work told in the place of what is not reported",
        "the last products' shared memory not given back",
        "threads that wait for rows of dc and do not take them",
    ],
)
def test_the_emulator_finds_what_a_gpu_may_hide(
    hopper, chunks_of_a_block, monkeypatch: pytest.MonkeyPatch, tmp_path, file: str, line: str, instead: str
) -> None:
    monkeypatch.setattr(backward, "sm_count", lambda device: 2)  # so few that work tiles of a kind follow one another
    plant(monkeypatch, sources, tmp_path, f"backward_{file}.cuh", line, instead)
    backward.kernel.cache_clear()
    try:
        with pytest.raises(AssertionError):  # wrong, or what the emulator says: a deadlock
            hopper.assert_in_any_order(inputs(1, 3, 3, 250, 16, (6, 11)), seeds=SEEDS_OF_FAULTS)
    finally:
        backward.kernel.cache_clear()
