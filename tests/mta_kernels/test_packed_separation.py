"""What one document or sequence holds changes no bit of another's output and gradients, by any backend."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from banded_backwards import inputs, kernel_of
from emulated_forward import emulated_forward  # noqa: F401
from emulated_hopper import emulator  # noqa: F401
from kernel_inputs import DEVICE, DTYPES, assert_as_reference, poison_memory, value_and_gradients
from torch import Tensor

from mta_kernels.conv_attention import conv_attention

FP16, BF16 = torch.float16, torch.bfloat16
BOUNDS = [0, 14, 40, 43, 60, 130]  # blocks of rows with several documents, and one that ends in the next block
KEPT = [1, 3]  # documents that never change
LARGEST = {FP16: 1e4, BF16: 1e9, torch.float32: 1e9}  # gradients are products of three of them, which float32 holds


@pytest.fixture
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "triton":
        poison_memory(monkeypatch)
    else:
        kernel_of(request.param, request, monkeypatch)
    return request.param


def with_others(x: Tensor, times: float) -> Tensor:
    """`x` with all documents but those of KEPT multiplied."""
    x = x.clone()
    for number, (start, stop) in enumerate(pairwise(BOUNDS)):
        if number not in KEPT:
            x[:, :, start:stop] *= times
    return x


@pytest.mark.parametrize(
    ("backend", "dtype", "causal"),
    [
        *(("triton", dtype, dtype == FP16) for dtype in DTYPES),
        *((name, dtype, dtype == FP16) for name in ("cuda", "hopper") for dtype in (FP16, BF16)),
    ],
    indirect=["backend"],
    ids=str,
)
def test_neighbours_of_any_size_change_no_bit(backend: str, dtype: torch.dtype, causal: bool) -> None:
    leaves = inputs(1, 1, 1, BOUNDS[-1], 16, (6, 11) if causal else (3, 2), dtype=dtype)
    grad_out = torch.randn(leaves["q"].shape, generator=torch.Generator().manual_seed(1)).to(DEVICE, dtype)
    options = {"cu_seqlens": torch.tensor(BOUNDS, device=DEVICE), "backend": backend, "causal": causal}

    def run(times: float) -> dict[str, Tensor]:
        changed = {name: x if name == "weight" else with_others(x, times) for name, x in leaves.items()}
        return value_and_gradients(conv_attention, changed, with_others(grad_out, times), **options)

    want = run(1.0)
    for times in (1e3, 1e-3, LARGEST[dtype]):
        got = run(times)
        for name in ("out", "q", "k", "v"):
            assert not torch.equal(got[name], want[name]), (name, times)
            for number in KEPT:
                rows = slice(BOUNDS[number], BOUNDS[number + 1])
                assert torch.equal(got[name][:, :, rows], want[name][:, :, rows]), (name, number, times)


@pytest.mark.parametrize(
    ("backend", "dtype"), [("triton", FP16), ("cuda", FP16), ("hopper", FP16)], indirect=["backend"], ids=str
)
def test_sequences_of_any_size_change_no_bit(backend: str, dtype: torch.dtype) -> None:
    leaves = inputs(2, 1, 1, 26, 16, (6, 11), dtype=dtype)
    grad_out = torch.randn(leaves["q"].shape, generator=torch.Generator().manual_seed(1)).to(DEVICE, dtype)
    factors = {name: torch.ones(2, 1, 1, 1, device=DEVICE, dtype=dtype) for name in ("same", "large", "small")}
    factors["large"][1], factors["small"][1] = LARGEST[dtype], 1e-3

    def run(times: Tensor) -> dict[str, Tensor]:
        changed = {name: x if name == "weight" else x * times for name, x in leaves.items()}
        return value_and_gradients(conv_attention, changed, grad_out * times, backend=backend)

    want = run(factors["same"])
    for name in ("large", "small"):
        got = run(factors[name])
        assert all(torch.equal(got[x][0], want[x][0]) for x in ("out", "q", "k", "v")), name


@pytest.mark.parametrize(
    ("backend", "dtype"), [("triton", FP16), ("cuda", BF16), ("hopper", BF16)], indirect=["backend"]
)
def test_documents_of_different_sizes_have_their_gradients(backend: str, dtype: torch.dtype) -> None:
    """The weight's gradient sums them all."""
    leaves = inputs(1, 2, 1, BOUNDS[-1], 16, (6, 11), dtype=dtype)
    leaves["v"] = with_others(leaves["v"], 2.0**-6)
    assert_as_reference(leaves, backend, cu_seqlens=torch.tensor(BOUNDS, device=DEVICE))
