"""Chunks of a prompt and of heads through Triton, values and gradients against float64."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from kernel_inputs import DTYPES, assert_as_reference, make, relative_error, value_and_gradients
from torch import Tensor

from mta_kernels.conv_attention import conv_attention, conv_attention_reference


def chunk_of(q: Tensor, start: int, taps: int) -> dict:
    """The rows of q from `start` on, and the queries before them that the convolution looks back on."""
    return {"q": q[:, :, start:], "q_history": q[:, :, max(0, start - taps + 1) : start]}


def check(q, k, v, weight, start: int, **options) -> None:
    assert_as_reference({**chunk_of(q, start, weight.shape[1]), "k": k, "v": v, "weight": weight}, **options)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("start", "taps"), [(1, (6, 11)), (4, (7, 2)), (30, (6, 11)), (63, (7, 2)), (69, (6, 11))])
def test_starts(start: int, taps: tuple[int, int], causal: bool) -> None:
    check(*make(1, 1, 1, 70, 16, taps), start, causal=causal)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("pad_key", ["both", "left", "right"])
def test_dtypes_pads_and_grouped_heads(dtype: torch.dtype, pad_key: str) -> None:
    check(*make(2, 2, 1, 33, 24, (3, 6), dtype), 20, pad_key=pad_key)


@pytest.mark.parametrize("size", [1, 3, 19])
def test_a_prompt_by_chunks_is_the_prompt(size: int) -> None:
    q, k, v, weight = make(1, 2, 1, 40, 16, (6, 5))
    bounds = [*range(40 - 3 * size, 40, size), 40] if size == 1 else [*range(0, 40, size), 40]
    parts = [
        conv_attention(
            **chunk_of(q[:, :, :stop], start, 6), k=k[:, :, :stop], v=v[:, :, :stop], weight=weight, backend="triton"
        )
        for start, stop in pairwise(bounds)
    ]
    whole = conv_attention_reference(q.double(), k.double(), v.double(), weight.double())
    assert relative_error(torch.cat(parts, 2), whole[:, :, bounds[0] :]) < 2e-6


def test_older_history_is_ignored() -> None:
    q, k, v, weight = make(1, 2, 1, 40, 16, (4, 5))
    inputs = {**chunk_of(q, 25, 4), "k": k, "v": v, "weight": weight, "backend": "triton"}
    want = conv_attention(**inputs)
    inputs["q_history"] = torch.cat([torch.full_like(q[:, :, :9], float("nan")), inputs["q_history"]], 2)
    assert torch.equal(conv_attention(**inputs), want)


def test_the_future_changes_nothing() -> None:
    """Bit for bit, whatever the later tokens of a chunk hold."""
    q, k, v, weight = make(1, 1, 1, 60, 16, (6, 11))
    before = conv_attention(**chunk_of(q, 25, 6), k=k, v=v, weight=weight, backend="triton")
    for x in (q, k, v):
        x[:, :, 41:] = 60 - 7 * x[:, :, 41:]
    after = conv_attention(**chunk_of(q, 25, 6), k=k, v=v, weight=weight, backend="triton")
    assert torch.equal(before[:, :, :16], after[:, :, :16])


def test_chunks_of_heads_change_nothing() -> None:
    q, k, v, weight = make(1, 6, 2, 12, 16, (3, 4))
    inputs = {"q": q, "k": k, "v": v, "weight": weight}
    whole, *others = [
        value_and_gradients(conv_attention, inputs, torch.ones_like(q), backend="triton", head_chunk=heads)
        for heads in (None, 1, 3, 9)
    ]
    for other in others:
        for name, got in other.items():
            assert relative_error(got, whole[name]) < 1e-6, name


def test_chunks_of_heads_in_a_batch() -> None:
    check(*make(2, 4, 2, 20, 16, (4, 6), torch.float16), 9, head_chunk=1)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_head_chunks_that_begin_anywhere_in_memory(dtype: torch.dtype) -> None:
    """Heads of 37 rows of 17 numbers: those after the first begin at no multiple of 16 bytes."""
    inputs = dict(zip(("q", "k", "v", "weight"), make(1, 3, 3, 37, 17, (3, 4), dtype), strict=True))
    grad_out = torch.randn(1, 3, 37, 17, generator=torch.Generator().manual_seed(1)).to(inputs["q"])
    whole, parts = (
        value_and_gradients(conv_attention, inputs, grad_out, backend="triton", head_chunk=chunk) for chunk in (3, 1)
    )
    for name, got in parts.items():
        assert relative_error(got, whole[name]) < 4 * torch.finfo(dtype).eps, name
