"""The forward with the CUDA kernels in which heads meet: on a GPU, else emulated, beside Triton's interpreter."""

from __future__ import annotations

import pytest
import torch
from emulated_heads import emulated_heads  # noqa: F401
from kernel_inputs import DEVICE, poison_memory, with_gaps
from mta_inputs import Problem, assert_twice_eager, forward, gradients, make, small_chunks, take_cuda
from torch import Tensor

from mta_kernels import score_chunks
from mta_kernels.multi_token_attention import multi_token_attention, stages
from mta_kernels.multi_token_attention.mixers import Mixers
from mta_kernels.multi_token_attention.triton import heads_stage

FP16 = torch.float16  # Triton's interpreter has no bfloat16


@pytest.fixture(autouse=True)
def calls(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> list:
    """The kernels in which heads meet are taken, and how often is noted; short chunks, NaN in what nobody writes."""
    poison_memory(monkeypatch)
    small_chunks(monkeypatch)
    take_cuda(monkeypatch, "CUDA_HEADS")
    if DEVICE != "cuda":
        request.getfixturevalue("emulated_heads")
    found, mixed = [], heads_stage.mixed_probabilities
    monkeypatch.setattr(heads_stage, "mixed_probabilities", lambda *x: (found.append(x[-1]), mixed(*x)))
    return found


def check(problem: Problem, monkeypatch: pytest.MonkeyPatch) -> None:
    """Against float64 where there is a query of each key, and against Triton's stages."""
    out, logsumexp = forward(problem)
    if problem.q.shape[2] == problem.k.shape[2]:
        assert_twice_eager({"out": out}, problem)
    monkeypatch.setattr(stages, "CUDA_HEADS", False)
    wanted, sums = forward(problem)
    assert (out - wanted).abs().max() <= 8 * torch.finfo(out.dtype).eps * wanted.abs().max()
    assert (logsumexp - sums).abs().max() < 0.05


@pytest.mark.parametrize(
    "options",
    [
        {"pre_conv": (6, 11), "post_conv": (6, 11)},
        {"pre_conv": (3, 5), "post_conv": (2, 3), "queries": 41, "causal": False, "pad_key": "left"},
        {"post_conv": (2, 9), "documents": [0, 0, 1, 3, 40, 42, 70], "kv_heads": 1},
    ],
    ids=str,
)
def test_all_steps(calls: list, monkeypatch: pytest.MonkeyPatch, options: dict) -> None:
    problem = make(2, 70, 16, FP16, **options)
    check(problem, monkeypatch)
    assert len(calls) == (2 if "queries" in options else 3)


def test_mixers_of_another_dtype_and_of_any_strides(calls: list) -> None:
    """They are rounded to that of q, once for all chunks."""
    problem = make(2, 70, 16, FP16, post_conv=(2, 9), documents=[0, 0, 1, 3, 40, 42, 70], kv_heads=1)
    given = Mixers(*[None if x is None else with_gaps(x.float()) for x in problem.mixers])
    for got, want in zip(forward(problem._replace(mixers=given)), forward(problem), strict=True):
        assert torch.equal(got, want)
    assert len(calls) == 6


def test_the_backward_has_their_probabilities(calls: list) -> None:
    """At logits whose rounding would be a large factor on a probability: they are not rounded."""
    problem = make(2, 40, 16, FP16, pre_conv=(2, 3), post_conv=(2, 3), magnitude=60)
    assert_twice_eager(gradients(problem), problem, backward=True)
    assert calls


@pytest.mark.parametrize("by_heads", [True, False])
def test_gradients_that_cancel(calls: list, monkeypatch: pytest.MonkeyPatch, by_heads: bool) -> None:
    """Of mixings before a norm, which takes out their sizes: the backward has the forward's probabilities."""
    monkeypatch.setattr(stages, "CUDA_HEADS", by_heads)
    problem = make(2, 60, 16, FP16, pre_conv=(2, 3), post_conv=(2, 3), magnitude=60, seed=2)
    given = problem.mixers._asdict() | {"post_mix": problem.mixers.post_mix.diag().diag()}
    given |= {name: getattr(problem, name) for name in "qkv"} | {"norm_weight": torch.ones_like(problem.q[0, 0, 0])}

    def of_sizes(dtype: torch.dtype, backend: str) -> Tensor:
        leaves = {name: x.detach().to(dtype).requires_grad_() for name, x in given.items()}
        out = multi_token_attention(**leaves, backend=backend)
        return torch.autograd.grad(out, leaves["post_mix"], problem.grad_out.to(dtype))[0].diag().double()

    exact, eager, got = of_sizes(torch.float64, "reference"), of_sizes(FP16, "reference"), of_sizes(FP16, "triton")
    assert bool(calls) == by_heads
    assert (got - exact).norm() <= 2 * (eager - exact).norm()


def test_a_batch_in_parts(calls: list, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = make(2, 40, 16, FP16, batch=3, pre_conv=(3, 5), post_conv=(2, 3))
    want = forward(problem)
    assert len(calls) == 2
    monkeypatch.setattr(score_chunks, "CHUNK_BYTES", 2 * 2 * (2 * 128 * 2) * 128)
    for got, expected in zip(forward(problem), want, strict=True):  # other blocks share the steps of a row
        torch.testing.assert_close(got, expected, rtol=1e-3, atol=1e-3)
    assert len(calls) == 6


def test_without_a_mixing_or_a_convolution_after_triton_does_it(calls: list) -> None:
    forward(make(2, 20, 16, FP16, post_conv=(2, 3), pre_mix=False))
    forward(make(2, 20, 16, FP16, pre_conv=(2, 3)))
    assert not calls
