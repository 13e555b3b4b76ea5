"""What both backwards with a banded convolution compute, against float64."""

from __future__ import annotations

import pytest
import torch
from banded_backwards import Kernel, inputs, kernel_of
from banded_forwards import ON_GPU
from emulated_forward import emulated_forward  # noqa: F401
from emulated_hopper import emulator  # noqa: F401
from planted_faults import plant

from mta_kernels.conv_attention import banded, conv_attention
from mta_kernels.conv_attention.banded import backward_plan
from mta_kernels.conv_attention.cuda_sm80 import backward as cuda_backward
from mta_kernels.conv_attention.hopper import backward as hopper_backward
from mta_kernels.conv_attention.hopper import prepare

BF16, FP16 = torch.bfloat16, torch.float16


@pytest.fixture(params=["cuda", "hopper"], autouse=True)
def kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Kernel:
    return kernel_of(request.param, request, monkeypatch)


@pytest.fixture
def chunks_of_a_block(monkeypatch: pytest.MonkeyPatch) -> None:
    """And scratch for one chunk of each head, so that chunks wait for others to be done with it."""
    monkeypatch.setattr(backward_plan, "MOST_CHUNK_ROWS", 118)
    monkeypatch.setattr(backward_plan, "SPARED_SCRATCH", 0)


def test_more_chunks_than_the_scratch_has_room_for(kernel: Kernel, monkeypatch, chunks_of_a_block) -> None:
    """Six, and room for four."""
    monkeypatch.setattr(backward_plan, "SPARED_SCRATCH", 2**30)
    for module in (cuda_backward, hopper_backward):
        monkeypatch.setattr(module, "sm_count", lambda device: 1)
    kernel.assert_in_any_order(inputs(1, 2, 2, 270, 16, (6, 11)), seeds=(4, 11))


def test_warpgroups_that_share_scores_agree_on_their_range(kernel: Kernel) -> None:
    """One long query, orthogonal to all keys: alone, its warpgroup would divide its queries to keep scores in fp16."""
    for row in (30, 90):
        leaves = inputs(1, 1, 1, 110, 16, (6, 11))
        leaves["k"][..., -1] = 0
        leaves["q"][:, :, row, -1] = 30000
        kernel.assert_in_any_order(leaves)


@pytest.mark.skipif(not ON_GPU, reason="graphs and streams are a GPU's")
def test_graphs_and_streams(kernel: Kernel) -> None:
    """A graph is replayed with other numbers, and two calls run at once; each has counters and scratch of its own."""
    cases = [inputs(1, 8, 4, 3000, 64, (6, 11), dtype=BF16, seed=seed) for seed in (0, 1)]
    leaves = {name: x.clone().requires_grad_() for name, x in cases[0].items()}
    grad_out = torch.randn_like(leaves["q"])

    def call(of) -> tuple[torch.Tensor, ...]:
        return torch.autograd.grad(conv_attention(**of, backend=kernel.name), list(of.values()), grad_out)

    wants = [call({name: x.requires_grad_() for name, x in case.items()}) for case in cases]
    streams = [torch.cuda.Stream() for _ in cases]
    found = []
    torch.cuda.synchronize()
    for stream, case in zip(streams, cases, strict=True):
        with torch.cuda.stream(stream):
            found.append([call(case) for _ in range(3)])
    torch.cuda.synchronize()
    for want, results in zip(wants, found, strict=True):
        for result in results:
            assert all(torch.equal(a, b) for a, b in zip(want, result, strict=True))

    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = call(leaves)
    for want, case in zip(wants, cases, strict=True):
        with torch.no_grad():
            for name, x in case.items():
                leaves[name].copy_(x)
        graph.replay()
        torch.cuda.synchronize()
        assert all(torch.equal(a, b) for a, b in zip(want, captured, strict=True))


ALL_OPEN_AT_FIRST = {  # row blocks, whether the scratch has room for them or not
    "take_open(rows, chunks.open_at_first)": "take_open(rows, chunks.batch_heads * chunks.all_row_blocks)",
    "fetch_next(&chunks.scheduler->product_stages_done) + chunks.slots": "chunks.stages",
}


@pytest.mark.skipif(ON_GPU, reason="plants faults in the emulated source")
@pytest.mark.parametrize("kernel", ["hopper"], indirect=True)  # both run the one scheduler
@pytest.mark.parametrize(
    "fault",
    [
        {"    wait_for_count(chunks.rows_done(work.stage), chunks.blocks_of(work.chunk));": ""},
        {
            "if (work.stage >= chunks.slots) wait_for_products(chunks, work.stage - chunks.slots, products_of);": "",
            **ALL_OPEN_AT_FIRST,
        },
        {"wait_for_products(chunks, work.stage - chunks.slots,": "wait_for_products(chunks, work.stage,"},
        ALL_OPEN_AT_FIRST,
    ],
    ids=[
        "products that do not wait for rows",
        "scratch that is still read",
        "rows that wait for their own products",
        "blocks that all wait for products",
    ],
)
def test_the_emulator_finds_faults_of_the_scheduler(
    kernel: Kernel, chunks_of_a_block, monkeypatch: pytest.MonkeyPatch, tmp_path, fault: dict[str, str]
) -> None:
    for number, (line, instead) in enumerate(fault.items()):
        plant(monkeypatch, banded, tmp_path / str(number), "backward_scheduler.cuh", line, instead)
    monkeypatch.setattr(kernel.emulator, "folders", (banded.FOLDER,))
    prepare.kernel.cache_clear()
    try:
        with pytest.raises(AssertionError):  # wrong, or what the emulator says: a deadlock
            kernel.assert_in_any_order(inputs(1, 3, 3, 250, 16, (6, 11)), seeds=(11, 2, 23, 5, 15))
    finally:
        prepare.kernel.cache_clear()
