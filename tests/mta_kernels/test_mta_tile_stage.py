"""The forward with CUDA's kernels: on a GPU, else in the emulator, with Triton's interpreter for the products."""

from __future__ import annotations

import pytest
import torch
from emulated_heads import emulated_heads  # noqa: F401
from emulated_tiles import emulated_tiles  # noqa: F401
from kernel_inputs import DEVICE, poison_memory, with_gaps
from mta_inputs import Problem, assert_twice_eager, cuda_kernels, forward, gradients, make, small_chunks, take_cuda
from torch import Tensor

from mta_kernels import score_chunks
from mta_kernels.multi_token_attention import multi_token_attention, stages
from mta_kernels.multi_token_attention.mixers import Mixers
from mta_kernels.multi_token_attention.triton import tile_stage

FP16 = torch.float16  # Triton's interpreter has no bfloat16


@pytest.fixture(autouse=True)
def tiles(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> list:
    """CUDA's tile kernels are taken, and how often is noted; chunks are short, and what nobody writes is NaN."""
    poison_memory(monkeypatch)
    small_chunks(monkeypatch)
    take_cuda(monkeypatch, "CUDA_TILES", never=("CUDA_HEADS",))
    if DEVICE != "cuda":
        request.getfixturevalue("emulated_tiles")
    return calls_of("probabilities_by_tiles", monkeypatch)


@pytest.fixture
def meetings(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> list:
    """As `tiles`, of the kernels in which heads meet."""
    monkeypatch.setattr(stages, "CUDA_HEADS", True)
    if DEVICE != "cuda":
        request.getfixturevalue("emulated_heads")
    return calls_of("probabilities_by_heads", monkeypatch)


def calls_of(name: str, monkeypatch: pytest.MonkeyPatch) -> list:
    calls, mixed = [], getattr(tile_stage, name)
    monkeypatch.setattr(tile_stage, name, lambda *x: (calls.append(x[-1]), mixed(*x)))
    return calls


def check(problem: Problem, monkeypatch: pytest.MonkeyPatch) -> None:
    """Against float64 where there is a query of each key, and against Triton's stages."""
    out, logsumexp = forward(problem)
    if problem.q.shape[2] == problem.k.shape[2]:
        assert_twice_eager({"out": out}, problem)
    monkeypatch.setattr(stages, "CUDA_TILES", False)
    monkeypatch.setattr(stages, "CUDA_HEADS", False)
    wanted, sums = forward(problem)
    assert (out - wanted).abs().max() <= 8 * torch.finfo(out.dtype).eps * wanted.abs().max()
    assert (logsumexp - sums).abs().max() < 0.05


@pytest.mark.parametrize(
    "options",
    [
        {"pre_conv": (6, 11), "post_conv": (6, 11)},
        {"pre_conv": (3, 5), "post_conv": (2, 3), "queries": 41, "causal": False, "pad_key": "left"},
        {"post_conv": (4, 3), "pre_mix": False, "post_mix": False, "kv_heads": 1},
        {"post_conv": (2, 9), "documents": [0, 0, 1, 3, 40, 42, 70]},
        {"pre_conv": (2, 9), "post_conv": (3, 4), "documents": [0, 30, 70], "causal": False},
    ],
    ids=str,
)
def test_all_steps(tiles: list, monkeypatch: pytest.MonkeyPatch, options: dict) -> None:
    problem = make(2, 70, 16, FP16, **options)
    assert cuda_kernels(problem)[0] == {"pre_tiles", "post_tiles"}
    check(problem, monkeypatch)
    assert len(tiles) == (2 if "queries" in options else 3)


@pytest.mark.parametrize(
    "options",
    [
        {"pre_conv": (6, 11), "post_conv": (6, 11)},
        {"pre_conv": (3, 5), "post_conv": (2, 3), "queries": 41, "causal": False, "pad_key": "left"},
        {"post_conv": (2, 9), "documents": [0, 0, 1, 3, 40, 42, 70], "kv_heads": 1},
    ],
    ids=str,
)
def test_all_steps_where_heads_meet(
    meetings: list, tiles: list, monkeypatch: pytest.MonkeyPatch, options: dict
) -> None:
    problem = make(2, 70, 16, FP16, **options)
    assert cuda_kernels(problem)[0] == {"pre_heads", "post_heads"}
    check(problem, monkeypatch)
    assert len(meetings) == (2 if "queries" in options else 3)
    assert not tiles


def test_mixers_of_another_dtype_and_of_any_strides_where_heads_meet(meetings: list) -> None:
    """They are rounded to that of q, once for all chunks."""
    problem = make(2, 70, 16, FP16, post_conv=(2, 9), documents=[0, 0, 1, 3, 40, 42, 70], kv_heads=1)
    given = Mixers(*[None if x is None else with_gaps(x.float()) for x in problem.mixers])
    for got, want in zip(forward(problem._replace(mixers=given)), forward(problem), strict=True):
        assert torch.equal(got, want)
    assert len(meetings) == 6


def test_the_backward_has_their_probabilities(meetings: list) -> None:
    """At logits whose rounding would be a large factor on a probability: they are not rounded."""
    problem = make(2, 40, 16, FP16, pre_conv=(2, 3), post_conv=(2, 3), magnitude=60)
    assert_twice_eager(gradients(problem), problem, backward=True)
    assert meetings


def test_heads_meet_only_with_both_mixings(meetings: list, tiles: list) -> None:
    forward(make(2, 20, 16, FP16, post_conv=(2, 3), pre_mix=False))
    assert tiles
    assert not meetings


def test_probabilities_of_the_backward_add_up_to_one(tiles: list) -> None:
    """At logits whose rounding, as CUDA's kernels store them, is a large factor on a probability."""
    problem = make(2, 40, 16, FP16, pre_conv=(2, 3), post_conv=(2, 3), magnitude=60)
    assert_twice_eager(gradients(problem), problem, backward=True)
    assert tiles


@pytest.mark.parametrize(
    "options",
    [
        {"pre_conv": (3, 5), "post_conv": (2, 3), "causal": False, "pad_key": "left"},
        {"post_conv": (4, 3), "pre_mix": False, "post_mix": False, "kv_heads": 1},
        {"post_conv": (2, 9), "documents": [0, 0, 1, 3, 40, 42, 50]},
    ],
    ids=str,
)
def test_gradients_of_rounded_logits(tiles: list, options: dict) -> None:
    """In several chunks, whose rows of the halo are rounded as well."""
    problem = make(2, 50, 16, FP16, magnitude=20, **options)
    assert_twice_eager(gradients(problem), problem, backward=True)
    assert tiles


@pytest.mark.parametrize("kernels", ["tiles", "meetings"])
def test_gradients_that_cancel(request: pytest.FixtureRequest, kernels: str) -> None:
    """Of mixings before a norm, which takes out their sizes: the backward has the forward's probabilities."""
    calls = request.getfixturevalue(kernels)
    problem = make(2, 60, 16, FP16, pre_conv=(2, 3), post_conv=(2, 3), magnitude=60, seed=2)
    given = problem.mixers._asdict() | {"post_mix": problem.mixers.post_mix.diag().diag()}
    given |= {name: getattr(problem, name) for name in "qkv"} | {"norm_weight": torch.ones_like(problem.q[0, 0, 0])}

    def of_sizes(dtype: torch.dtype, backend: str) -> Tensor:
        leaves = {name: x.detach().to(dtype).requires_grad_() for name, x in given.items()}
        out = multi_token_attention(**leaves, backend=backend)
        return torch.autograd.grad(out, leaves["post_mix"], problem.grad_out.to(dtype))[0].diag().double()

    exact, eager, got = of_sizes(torch.float64, "reference"), of_sizes(FP16, "reference"), of_sizes(FP16, "triton")
    assert calls
    assert (got - exact).norm() <= 2 * (eager - exact).norm()


def test_a_batch_in_parts(tiles: list, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = make(2, 40, 16, FP16, batch=3, pre_conv=(3, 5), post_conv=(2, 3))
    want = forward(problem)
    assert len(tiles) == 2
    monkeypatch.setattr(score_chunks, "CHUNK_BYTES", 2 * 2 * (2 * 128 * 2) * 128)
    for got, expected in zip(forward(problem), want, strict=True):  # other blocks share the steps of a row
        torch.testing.assert_close(got, expected, rtol=1e-3, atol=1e-3)
    assert len(tiles) == 6


def test_without_a_convolution_of_probabilities_triton_does_it(tiles: list) -> None:
    forward(make(2, 20, 16, FP16))
    forward(make(2, 20, 16, FP16, pre_conv=(2, 3)))
    assert not tiles
