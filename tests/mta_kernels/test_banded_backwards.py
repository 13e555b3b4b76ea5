"""What both backwards with a banded convolution compute, against float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from banded_backwards import NAMES, Kernel, inputs, kernel_of
from banded_forwards import ON_GPU
from emulated_forward import emulated_forward  # noqa: F401
from emulated_hopper import emulator  # noqa: F401
from kernel_inputs import DEVICE, assert_as_reference, relative_error, value_and_gradients, with_gaps
from planted_faults import plant

from mta_kernels.conv_attention import banded, conv_attention, conv_attention_reference
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


@pytest.mark.parametrize("kv_heads", [1, 2])
def test_a_repeated_call_has_the_same_gradients(kernel: Kernel, kv_heads: int) -> None:
    """And those of calls in between have theirs: the operator runs the first two backwards, then none."""
    cases = [inputs(1, 2, kv_heads, 70, 64, (6, 11), seed=seed) for seed in range(2)]
    grad_out = torch.randn(1, 2, 70, 64, generator=torch.Generator().manual_seed(1)).to(DEVICE, FP16)
    found = [value_and_gradients(conv_attention, case, grad_out, backend=kernel.name) for case in cases * 3]
    for name in ("out", *NAMES):
        assert not torch.equal(found[0][name], found[1][name])
        assert all(torch.equal(found[i][name], found[i % 2][name]) for i in range(2, 6)), name
        assert len({x[name].data_ptr() for x in found}) == 6


@pytest.mark.parametrize(
    ("dtype", "times", "options"),
    [
        (BF16, 300, {"scale": -1.0}),
        (BF16, 300, {"causal": False, "pad_key": "right"}),
        (FP16, 110, {}),  # where eager overflows as well
    ],
    ids=str,
)
def test_rows_whose_scores_overflow_fp16(kernel: Kernel, dtype: torch.dtype, times: int, options) -> None:
    """They are computed in float32, by a launch of their own; two key blocks of it, and rows apart and beside."""
    seq_len = 300 if dtype == FP16 else 150
    leaves = inputs(1, 2, 1, seq_len, 64, (6, 11), dtype=dtype)
    leaves["q"][:, :, [0, 70, 71, 140, seq_len - 1]] *= times
    leaves["k"][:, :, [3, 64, 120]] *= times
    if dtype == BF16:
        assert_as_reference(leaves, kernel.name, **options)
        return
    grad_out = torch.randn(leaves["q"].shape, generator=torch.Generator().manual_seed(1)).to(DEVICE, dtype)
    doubles = {name: x.double() for name, x in leaves.items()}
    want = value_and_gradients(conv_attention_reference, doubles, grad_out.double(), **options)
    got = value_and_gradients(conv_attention, leaves, grad_out, backend=kernel.name, **options)
    for name, x in want.items():  # of one-hot rows little is left but the rounding of out
        assert relative_error(got[name], x) < 0.02, name


@pytest.mark.parametrize(
    ("form", "shape", "taps"),
    [
        ("whole", (1, 2, 1, 280, 40), (3, 4)),
        ("chunk", (2, 4, 2, 150, 64), (6, 11)),
        ("packed", (1, 2, 1, 280, 40), (3, 4)),
    ],
    ids=str,
)
def test_scores_of_millions(
    kernel: Kernel, monkeypatch: pytest.MonkeyPatch, form: str, shape: tuple[int, ...], taps
) -> None:
    """A float32 logsumexp of them has too few digits: p = exp(c - logsumexp) would be of any size."""
    monkeypatch.setattr(backward_plan, "MOST_CHUNK_ROWS", 130)
    monkeypatch.setattr(backward_plan, "SPARED_SCRATCH", 0)
    leaves = inputs(*shape, taps, dtype=BF16)
    seq_len = shape[3]
    leaves["q"][:, :, [1, 60, 61, 62, 149]] *= torch.tensor([300, 3000, -100, 1, 3000], device=DEVICE)[:, None]
    leaves["k"][:, :, [2, 64, 130]] *= torch.tensor([300, -1000, 300], device=DEVICE)[:, None]
    leaves = {name: with_gaps(x) if name in ("k", "weight") else x for name, x in leaves.items()}
    options: dict[str, Any] = {"scale": 1.0}
    if form == "chunk":
        options["q_history"] = leaves["q"][:, :, 40:50]
        leaves["q"] = leaves["q"][:, :, 50:]
    if form == "packed":
        options["cu_seqlens"] = torch.tensor([0, 61, 62, 140, seq_len], device=DEVICE)
        leaves |= {name: leaves[name][:1] for name in ("q", "k", "v")}
    grad_out = torch.randn(leaves["q"].shape, generator=torch.Generator().manual_seed(1)).to(DEVICE, BF16)
    got = value_and_gradients(conv_attention, leaves, grad_out, backend=kernel.name, **options)
    eager = value_and_gradients(conv_attention_reference, leaves, grad_out, **options)
    if form == "chunk":
        options["q_history"] = options["q_history"].double()
    want = value_and_gradients(
        conv_attention_reference, {name: x.double() for name, x in leaves.items()}, grad_out.double(), **options
    )
    for name, x in want.items():
        assert relative_error(got[name], x) <= max(2 * relative_error(eager[name], x), 0.03), name


@pytest.mark.parametrize("name", ["v", "grad_out"])
def test_a_huge_value_costs_earlier_rows_no_precision(kernel: Kernel, name: str) -> None:
    """The power of two that brings dc into fp16 is of what a block of rows sees."""
    leaves = inputs(1, 1, 1, 260, 64, (6, 11), dtype=BF16)
    grad_out = torch.randn(leaves["q"].shape, generator=torch.Generator().manual_seed(1)).to(DEVICE, BF16)
    (leaves | {"grad_out": grad_out})[name][:, :, 250] *= 1e8
    want = value_and_gradients(conv_attention_reference, {x: y.double() for x, y in leaves.items()}, grad_out.double())
    got = value_and_gradients(conv_attention, leaves, grad_out, backend=kernel.name)
    assert relative_error(got["q"][:, :, :100], want["q"][:, :, :100]) < 0.01


@pytest.mark.parametrize("seq_len", [3, 58, 59, 60, 118, 119, 124])
def test_rows_at_the_borders_of_warpgroups_and_of_blocks(kernel: Kernel, seq_len: int) -> None:
    """Of 6 taps a block has 118 rows: 59 of the first warpgroup's scores, and then the second's."""
    kernel.assert_in_any_order(inputs(1, 1, 1, seq_len, 16, (6, 11)), seeds=(0, 3))


@pytest.mark.parametrize(
    ("heads", "taps", "options"),
    [
        ((2, 1), (6, 11), {}),
        ((1, 1), (8, 17), {"pad_key": "right", "causal": False}),
        ((1, 1), (1, 3), {}),
    ],
    ids=str,
)
def test_chunks_of_rows(kernel: Kernel, chunks_of_a_block, heads, taps, options) -> None:
    """Three of them; rows of 6 and 8 taps begin at no multiple of what the products read at a time."""
    kernel.assert_in_any_order(inputs(1, *heads, 270, 16, taps), seeds=(3, 11), **options)


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


@pytest.mark.parametrize(("bounds", "causal"), [((0, 3, 3, 300, 430), False), ((0, 118, 121, 200, 370), True)], ids=str)
def test_packed_documents(
    kernel: Kernel, bounds: tuple[int, ...], causal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backward_plan, "MOST_CHUNK_ROWS", 236)
    monkeypatch.setattr(backward_plan, "SPARED_SCRATCH", 0)
    cu_seqlens = torch.tensor(bounds, device=DEVICE)
    assert_as_reference(inputs(1, 2, 1, bounds[-1], 16, (6, 11)), kernel.name, causal=causal, cu_seqlens=cu_seqlens)


@pytest.mark.parametrize("magnitude", [1e-6, 1.0, 1e3], ids=str)
def test_output_gradients_of_any_size(kernel: Kernel, magnitude: float) -> None:
    """dc goes through fp16: these would vanish or overflow there."""
    leaves = inputs(1, 2, 1, 100, 64, (6, 11))
    doubles = {name: x.double() for name, x in leaves.items()}
    grad_out = torch.randn(leaves["q"].shape, generator=torch.Generator().manual_seed(1)).to(DEVICE, FP16)
    want = value_and_gradients(conv_attention_reference, doubles, grad_out.double())
    got = value_and_gradients(conv_attention, leaves, (grad_out * magnitude).to(FP16), backend=kernel.name)
    if magnitude < 1:  # fp16 has few digits left for the gradients themselves
        got = {name: x / magnitude for name, x in got.items()}
        assert relative_error(got["weight"], want["weight"]) < 0.05
    else:
        for name in ("q", "weight"):
            assert relative_error(got[name], want[name] * magnitude) < 0.005


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
