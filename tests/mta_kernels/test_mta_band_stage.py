"""Both passes with CUDA's convolution kernels: on a GPU, else in the emulator, beside Triton's interpreter."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from emulated_bands import emulated_bands  # noqa: F401
from kernel_inputs import DEVICE, poison_memory
from mta_inputs import assert_twice_eager, forward, gradients, make, small_chunks, take_cuda
from torch import Tensor

from mta_kernels import score_chunks
from mta_kernels.multi_token_attention.bands_cuda import plan
from mta_kernels.multi_token_attention.triton import backward, band_stage

FP16 = torch.float16  # Triton's interpreter has no bfloat16


@pytest.fixture(autouse=True)
def launches(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """CUDA's kernels are taken, and which is noted; chunks are short, and what nobody writes is NaN."""
    poison_memory(monkeypatch)
    small_chunks(monkeypatch)
    monkeypatch.setattr(plan, "CONVOLVE", plan.Sizes(20, 3, 1))
    monkeypatch.setattr(plan, "GRADIENTS", plan.Sizes(20, 2, 1))
    take_cuda(monkeypatch, "CUDA_BANDS", never=("CUDA_HEADS", "CUDA_BACKWARD_HEADS"))
    bands = band_stage.bands
    if DEVICE != "cuda":
        request.getfixturevalue("emulated_bands")
    names, kernel = [], bands.kernel
    monkeypatch.setattr(bands, "kernel", lambda name, *x: (names.append(name), kernel(name, *x))[1])
    return names


@pytest.mark.parametrize(
    "options",
    [
        {"pre_conv": (6, 11), "post_conv": (6, 11)},
        {"pre_conv": (3, 5), "post_conv": (2, 3), "queries": 41, "causal": False, "pad_key": "left"},
        {"post_conv": (4, 3), "pre_mix": False, "post_mix": False, "kv_heads": 1},
        {"pre_conv": (4, 3), "post_mix": False, "magnitude": 4.0},
        {"post_conv": (2, 9), "documents": [0, 0, 1, 3, 40, 42, 70]},
        {"pre_conv": (2, 9), "post_conv": (3, 4), "documents": [0, 30, 70], "causal": False},
    ],
    ids=str,
)
def test_all_steps(launches: list[str], options: dict) -> None:
    problem = make(2, 70, 16, FP16, **options)
    if "queries" not in options:
        assert_twice_eager({"out": forward(problem)[0]}, problem)
        assert set(launches) == {"convolve_rows"}
    found = gradients(problem)
    assert set(launches) == {"convolve_rows", "convolution_gradients"}
    if "queries" not in options:
        assert_twice_eager(found, problem, backward=True)


def test_a_batch_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts of one sequence, and the last of fewer: each adds to the same sums of taps."""
    problem = make(2, 24, 16, FP16, batch=3, pre_conv=(3, 5), post_conv=(2, 3))
    want = gradients(problem)
    monkeypatch.setattr(score_chunks, "CHUNK_BYTES", 4 * 2 * 2 * (2 * 128 * 2) * 128)
    for name, got in gradients(problem).items():
        torch.testing.assert_close(got, want[name], rtol=2e-3, atol=2e-3)


def test_chunks_on_a_gpu_with_large_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(score_chunks, "CHUNK_BYTES", 4 * 16 * (2 * 2**14 * 2))
    both = make(2, 1, 16, FP16, pre_conv=(2, 3), post_conv=(2, 3)).operation
    for large, both_ways, rows in ((False, True, 16), (True, True, 32), (False, False, 32), (True, False, 64)):
        assert score_chunks.chunk_rows(both, 1, 2, 2**14, 2, backward=both_ways, large=large) == (1, rows)


def test_a_gradient_of_nan_stays_in_its_document() -> None:
    problem = make(2, 44, 16, FP16, documents=[0, 25, 44], pre_conv=(2, 3), post_conv=(3, 2))
    before = gradients(problem)
    problem.grad_out[:, :, 20] = torch.nan
    after = gradients(problem)
    for name in "qkv":
        torch.testing.assert_close(before[name][:, :, 25:], after[name][:, :, 25:], rtol=4e-3, atol=1e-3)
    assert after["q"][:, :, 20].isnan().all()


def test_a_logsumexp_that_is_rounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """What it was rounded by is known, so probabilities add up to one however large it is."""
    problem = make(2, 40, 16, FP16, pre_conv=(2, 3), post_conv=(2, 3))
    mix_rows = backward.mix_rows

    def rounded(scores: Tensor, pre_mix: Tensor, post_mix: None, logsumexp: Tensor, **options: Any) -> None:
        mix_rows(scores, pre_mix, post_mix, logsumexp, **options)
        chunk, coarse = options["chunk"], (logsumexp / 4).round() * 4
        rows = slice(max(0, -chunk.first_row), min(chunk.rows, chunk.query_rows - chunk.first_row))
        first = chunk.first_row + rows.start
        options["corrections"][0, :, :, rows] += (logsumexp - coarse)[:, :, first:][:, :, : rows.stop - rows.start]
        logsumexp.copy_(coarse)

    monkeypatch.setattr(backward, "mix_rows", rounded)
    assert_twice_eager(gradients(problem), problem, backward=True)


@pytest.mark.parametrize("larger", [9.0, 200.0])
def test_rows_whose_first_key_has_nearly_all_probability(larger: float) -> None:
    """Their gradients are what is left of large ones, and nothing where that key has all."""
    problem = make(2, 60, 16, FP16, post_conv=(2, 3), pre_mix=False, scale=1.0)
    problem.q[..., 0], problem.k[..., 0], problem.k[..., 1:] = 1, 0, problem.k[..., 1:] / 64
    problem.k[:, :, 0, 0] = larger
    found = gradients(problem)
    assert_twice_eager({name: found[name] for name in "qk"}, problem, backward=True)


def test_float32_is_tritons(launches: list[str]) -> None:
    gradients(make(1, 20, 16, torch.float32, pre_conv=(2, 3), post_conv=(2, 3)))
    assert not launches
