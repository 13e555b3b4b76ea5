"""What the kernels with a banded convolution have beside tests/conformance: on a GPU that runs them, else emulated."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from emulated_forward import emulated_forward  # noqa: F401
from emulated_hopper import emulator  # noqa: F401
from kernel_inputs import DEVICE, assert_as_reference, make, poison_memory
from torch import Tensor

from mta_kernels.conv_attention import conv_attention, explain
from mta_kernels.conv_attention.banded import backward_plan, structures
from mta_kernels.conv_attention.cuda_sm80 import backward as cuda_backward
from mta_kernels.conv_attention.cuda_sm80 import forward as cuda_forward
from mta_kernels.conv_attention.hopper import backward as hopper_backward
from mta_kernels.conv_attention.hopper import prepare

BF16, FP16 = torch.bfloat16, torch.float16
ON_GPU = DEVICE == "cuda"
ON_HOPPER = ON_GPU and torch.cuda.get_device_capability() == (9, 0)
EMULATORS = {"cuda": None if ON_GPU else "emulated_forward", "hopper": None if ON_HOPPER else "emulator"}
A_BLOCK = 118  # rows of six query taps


class Kernels(NamedTuple):
    """A backend by its name, and its emulator, None on a GPU."""

    name: str
    emulator: Any

    def check(self, inputs: dict[str, Tensor], seeds: tuple[int, ...] = (0,), **options: Any) -> None:
        """Out and gradients are as the reference's, in these orders of blocks, threads and copies."""
        for seed in seeds if self.emulator else (0,):
            if self.emulator:
                self.emulator.seed = seed
            assert_as_reference(inputs, self.name, **options)


@pytest.fixture(params=["cuda", "hopper"])
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Kernels:
    """Run here, with NaN in whatever they do not write; no plan is kept from other tests."""
    poison_memory(monkeypatch)
    monkeypatch.setattr(prepare, "_launches", {})
    monkeypatch.setattr(cuda_backward, "_plan", backward_plan.ChunkPlan.of)
    fixture = EMULATORS[request.param]
    return Kernels(request.param, fixture and request.getfixturevalue(fixture))


of_hopper = pytest.mark.parametrize("kernels", ["hopper"], indirect=True)
of_cuda = pytest.mark.parametrize("kernels", ["cuda"], indirect=True)


def inputs(*shape: Any, dtype: torch.dtype = FP16) -> dict[str, Tensor]:
    return dict(zip(("q", "k", "v", "weight"), make(*shape, dtype), strict=True))


def chunks_of(monkeypatch: pytest.MonkeyPatch, rows: int, spared: int = 0) -> None:
    """Scratch for one chunk of each head, so that chunks wait for others to be done with it, or for more bytes."""
    monkeypatch.setattr(backward_plan, "MOST_CHUNK_ROWS", rows)
    monkeypatch.setattr(backward_plan, "SPARED_SCRATCH", spared)


def test_long_work_of_some_heads_is_launched_before_short_work(kernels: Kernels, monkeypatch) -> None:
    case = inputs(1, 3, 3, 140, 64, (6, 11), dtype=BF16)
    monkeypatch.setattr(structures, "L2_BYTES", case["k"].nbytes)
    assert structures.heads_in_l2(case["k"], heads=3) == 2
    kernels.check(case)


def test_more_chunks_than_the_scratch_has_room_for(kernels: Kernels, monkeypatch) -> None:
    """Six, and room for four."""
    chunks_of(monkeypatch, A_BLOCK, 2**30)
    for module in (cuda_backward, hopper_backward):
        monkeypatch.setattr(module, "sm_count", lambda device: 1)
    kernels.check(inputs(1, 2, 2, 270, 16, (6, 11)), seeds=(4, 11))


@of_hopper  # both run the one scheduler
def test_chunks_wait_until_the_products_of_scratch_are_done(kernels: Kernels, monkeypatch) -> None:
    """In orders of blocks that find scratch which is overwritten while it is read."""
    chunks_of(monkeypatch, A_BLOCK)
    kernels.check(inputs(1, 3, 3, 250, 16, (6, 11)), seeds=(11, 2, 23, 5, 15))


@of_hopper
def test_a_warp_that_falls_behind_misses_no_phase(kernels: Kernels, monkeypatch) -> None:
    """Of more stages than the ring has, of which the first has no products for the second warp group."""
    chunks_of(monkeypatch, 4 * A_BLOCK, 2**30)
    monkeypatch.setattr(backward_plan, "FEWEST_SLOTS", 1)
    kernels.check(inputs(1, 1, 1, 340, 16, (6, 11)), seeds=(19, 22))


@pytest.mark.parametrize("row", [30, 90])
def test_warpgroups_that_share_scores_agree_on_their_range(kernels: Kernels, row: int) -> None:
    """One long query, orthogonal to all keys: alone, its warpgroup would divide its queries to keep scores in fp16."""
    case = inputs(1, 1, 1, 110, 16, (6, 11))
    case["k"][..., -1] = 0
    case["q"][:, :, row, -1] = 30000
    kernels.check(case, seeds=(0, 1))


@of_cuda
@pytest.mark.skipif(ON_GPU, reason="a GPU has its own tiles")
@pytest.mark.parametrize(
    ("kilobytes", "head_dim", "options"),
    [
        (99, 24, {}), (163, 64, {}), (99, 72, {"causal": False}), (163, 80, {"causal": False}), (163, 96, {}),
        (227, 128, {}), (163, 136, {"causal": False}), (227, 256, {"pad_key": "left"}),
    ],
    ids=str,
)  # fmt: skip
def test_tiles_of_every_gpu(kernels: Kernels, monkeypatch, kilobytes: int, head_dim: int, options) -> None:
    for module in (cuda_forward, cuda_backward):
        monkeypatch.setattr(module, "shared_memory_limit", lambda device: kilobytes << 10)
    kernels.check(inputs(1, 1, 1, 150, head_dim, (6, 11), dtype=BF16), **options)


@of_hopper
@pytest.mark.parametrize("causal", [True, False])
def test_documents_that_begin_beside_the_rows_of_a_second_warpgroup(kernels: Kernels, causal: bool) -> None:
    """With several tiles of keys that no row of the first sees: its last row is of a document, or between two."""
    bounds = torch.tensor([0, 20, 329], device=DEVICE)
    kernels.check(inputs(1, 1, 1, 329, 128, (6, 11), dtype=BF16), (2,), causal=causal, cu_seqlens=bounds)


@of_hopper
def test_a_warpgroup_that_runs_ahead_overwrites_nothing(kernels: Kernels) -> None:
    """The first passes rows down to the second: in these orders it is a tile ahead.

    It may release a stage before the other sees it full: once it released that twice, and the second waited for ever.
    """
    kernels.check(inputs(1, 1, 1, 330, 16, (6, 11)), seeds=(6, 11), causal=False)
    kernels.check(inputs(2, 1, 1, 119, 16, (2, 5)), seeds=(7, 15, 22))


@of_hopper
@pytest.mark.parametrize("rows", [A_BLOCK, 4248])
def test_sums_of_heads_with_rows_beyond_fp16_are_rounded_last(kernels: Kernels, monkeypatch, rows: int) -> None:
    """The other head's sums are rounded at once, in chunks each key by the last chunk that sees it."""
    chunks_of(monkeypatch, rows)
    case = inputs(1, 2, 2, 250, 16, (6, 11), dtype=BF16)
    case["q"][:, 0, [0, 130]] *= 300
    case["k"][:, 0, [3, 64]] *= 300
    kernels.check(case, seeds=(0, 11))


@of_hopper
def test_forward_and_backward_are_of_one_backend(kernels: Kernels, request: pytest.FixtureRequest) -> None:
    """Triton rounds scores differently: its backward is off with this logsumexp where scores are large."""
    if not ON_GPU:
        request.getfixturevalue("emulated_forward")  # of the backward above head dim 128
    case = inputs(1, 2, 1, 40, 144, (3, 5))
    assert explain(*(x.requires_grad_() for x in case.values())).backend == "hopper"
    assert torch.equal(conv_attention(**case), conv_attention(**case, backend="hopper"))
    assert_as_reference({name: x.detach() for name, x in case.items()}, backend="auto", scale=1.0)
