"""What the arguments of a call decide beside `test_wrong_calls`: chunks, groups of heads, and the backend."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from mta_kernels.conv_attention import (
    ConvAttention,
    conv_attention,
    unsupported,
)
from mta_kernels.multi_token_attention import explain as explain_mta
from mta_kernels.multi_token_attention import multi_token_attention, multi_token_attention_reference
from mta_kernels.multi_token_attention import unsupported as mta_unsupported
from mta_kernels.operation import HeadMix, Operation


def make(q=(1, 4, 8, 16), k=(1, 2, 8, 16), weight=(4, 2, 3), dtype=torch.float32):
    return [torch.randn(*s).to(dtype) for s in (q, k, k, weight)]


def refused(error: type[Exception], words: str, *inputs: torch.Tensor, **options) -> None:
    with pytest.raises(error, match=words) as caught:
        conv_attention(*inputs, **options)
    assert "\n" not in str(caught.value)


def test_chunks_need_the_queries_before_them() -> None:
    q, k, v, weight = make(weight=(4, 4, 3))
    chunk = q[:, :, 6:]
    refused(
        ValueError,
        r"q has 2 rows and k 8, .* looks back on 3 .* give q_history \[1, 4, 3 or more, 16\]",
        chunk,
        k,
        v,
        weight,
    )
    for history in (q[:, :, 4:6], q[:, :2, :6], q[0, :, :6], q[:, :, :6, :8]):
        refused(ValueError, r"expected \[1, 4, 3 or more, 16\]", chunk, k, v, weight, q_history=history)
    refused(TypeError, "q_history is torch.float16", chunk, k, v, weight, q_history=q[:, :, :6].half())
    # Only as many as there are; none for one tap over queries, nor where q holds every position.
    conv_attention(q[:, :, 1:], k, v, weight, q_history=q[:, :, :1])
    conv_attention(chunk, k, v, weight[:, :1])
    whole = conv_attention(q, k, v, weight)
    assert torch.equal(conv_attention(q, k, v, weight, q_history=q[:, :, :0]), whole)
    assert torch.equal(conv_attention(q, k, v, weight, q_history=q), whole)


def test_head_chunks() -> None:
    q, k, v, weight = make(q=(1, 12, 8, 16), weight=(12, 2, 3))
    for chunk in (1, 2, 3, 6, 12, 18):
        conv_attention(q, k, v, weight, head_chunk=chunk, backend="reference")
    for chunk in (0, -1, 4, 8, 1.0, "all"):
        refused(
            ValueError,
            "head_chunk is .* divides the 6 query heads .* a multiple of 6",
            q,
            k,
            v,
            weight,
            head_chunk=chunk,
        )
    assert "head_chunk=3" in repr(ConvAttention(12, head_chunk=3))
    with pytest.raises(ValueError, match="head_chunk is 4"):
        ConvAttention(12, head_chunk=4)(q, k, v)


def test_without_interpreter_triton_needs_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    reason = unsupported("triton", device="cpu", dtype=torch.float32, head_dim=64, query_taps=1, key_taps=1)
    assert reason is not None
    assert "CUDA GPU" in reason


@pytest.mark.parametrize("backend", ["triton", "hopper", "cuda"])
def test_a_gpu_that_is_not_there_is_a_reason(backend: str) -> None:
    shape = {"head_dim": 64, "query_taps": 6, "key_taps": 11}
    reason = unsupported(backend, device="cuda:99", dtype=torch.bfloat16, **shape)
    assert reason == "PyTorch finds no cuda:99 device on this machine"


@pytest.mark.parametrize("function", [multi_token_attention, multi_token_attention_reference])
def test_a_chunk_needs_the_queries_that_both_convolutions_read(function) -> None:
    q, taps = torch.randn(1, 4, 6, 8), torch.ones(4, 3, 2)
    with pytest.raises(ValueError, match=r"looks back on 4 queries: give q_history \[1, 4, 3 or more, 8\]"):
        function(q[:, :, 3:], q, q, pre_conv=taps, post_conv=taps)
    with pytest.raises(ValueError, match=r"looks back on 2 queries"):
        function(q[:, :, 3:], q, q, post_conv=taps)
    assert function(q[:, :, 3:], q, q, pre_mix=torch.eye(4)).shape == (1, 4, 3, 8)


def test_what_conv_attention_computes_is_computed_by_it() -> None:
    q, taps = torch.randn(1, 4, 12, 16), torch.randn(4, 3, 2)
    assert torch.equal(multi_token_attention(q, q, q, pre_conv=taps), conv_attention(q, q, q, taps))
    plain = torch.nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True)
    torch.testing.assert_close(multi_token_attention(q, q, q, backend="reference"), plain)
    assert explain_mta(q, q, q, pre_conv=taps).reason.startswith("conv_attention computes this")


def test_a_choice_says_why() -> None:
    q, mix = torch.randn(1, 4, 12, 16), {"pre_mix": torch.eye(4)}
    assert str(explain_mta(q, q, q, **mix)).startswith("triton: the fastest backend for these arguments")
    assert str(explain_mta(q, q, q, **mix, backend="reference")) == "reference: asked for"
    assert "dropout" in explain_mta(q, q, q, **mix, dropout=0.1).reason
    cell: dict[str, Any] = {"device": "cpu", "dtype": torch.float32, "head_dim": 16, "heads": 4}
    operation = Operation(None, 1.0, True, pre_mix=HeadMix())
    assert mta_unsupported("triton", operation=operation, **cell) is None
    assert "dropout" in mta_unsupported("triton", operation=operation, **cell, dropout=0.1)
