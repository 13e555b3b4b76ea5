"""Bad arguments are refused in one sentence that says what was given and what is expected."""

from __future__ import annotations

import pytest
import torch
from kernel_inputs import DEVICE

from mta_kernels.conv_attention import (
    ConvAttention,
    conv_attention,
    conv_attention_decode,
    conv_attention_reference,
    explain,
    unsupported,
)


def make(q=(1, 4, 8, 16), k=(1, 2, 8, 16), weight=(4, 2, 3), dtype=torch.float32):
    return [torch.randn(*s).to(dtype) for s in (q, k, k, weight)]


def refused(error: type[Exception], words: str, *inputs: torch.Tensor, **options) -> None:
    with pytest.raises(error, match=words) as caught:
        conv_attention(*inputs, **options)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("shapes", "words"),
    [
        ({"q": (0, 4, 8, 16), "k": (0, 2, 8, 16)}, "at least 1"),
        ({"q": (4, 8, 16)}, "four dimensions"),
        ({"k": (1, 3, 8, 16)}, "multiple of"),
        ({"k": (1, 2, 7, 16)}, "as many rows as k, or fewer"),
        ({"k": (1, 2, 8, 15)}, "must be the same"),
        ({"k": (2, 2, 8, 16)}, "must be the same"),
        ({"weight": (2, 2, 3)}, "4 query heads"),
        ({"weight": (4, 6)}, "query taps, key taps"),
        ({"weight": (4, 0, 3)}, "at least one tap"),
    ],
)
def test_shapes(shapes: dict, words: str) -> None:
    refused(ValueError, words, *make(**shapes))


def test_dtypes_and_options() -> None:
    q, k, v, weight = make()
    with pytest.raises(TypeError, match=r"torch\.float16"):
        conv_attention(q, k.half(), v, weight)
    with pytest.raises(TypeError, match=r"q has dtype torch\.int32; expected torch\.float16"):
        conv_attention(q.int(), k, v, weight)
    with pytest.raises(TypeError, match="weight has dtype"):
        conv_attention(q, k, v, weight.double())
    with pytest.raises(ValueError, match="'both', 'left', 'right'"):
        conv_attention(q, k, v, weight, pad_key="middle")
    with pytest.raises(ValueError, match="'reference', 'triton'"):
        conv_attention(q, k, v, weight, backend="metal")
    with pytest.raises(ValueError, match="v "):
        conv_attention(q, k, v[:, :1], weight)


def test_what_is_no_tensor_is_named() -> None:
    q, k, v, weight = make()
    for autocast in (False, True):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            refused(TypeError, "q is a list; expected a tensor", q.tolist(), k, v, weight)
            with pytest.raises(TypeError, match="v is a list; expected a tensor"):
                explain(q, k, v.tolist(), weight)
            refused(TypeError, "k is a NoneType; expected a tensor", q, None, v, weight)
            refused(TypeError, "weight is a ndarray; expected a tensor", q, k, v, weight.numpy())
            refused(TypeError, "cu_seqlens is a list; expected", q, k, v, weight, cu_seqlens=[0, 8])
            with pytest.raises(TypeError, match="lengths is a list; expected a tensor, as"):
                conv_attention_decode(q[:, :, -2:], k, v, weight, lengths=[8])
            with pytest.raises(TypeError, match="block_table is a list"):
                conv_attention_decode(q[:, :, -2:], k, v, weight, lengths=torch.tensor([8]), block_table=[[0]])


@pytest.mark.parametrize("counts", [(0, 6, 11), (4.0, 6, 11), (4, 0, 11), (4, 6, -1), ("4", 6, 11)])
def test_counts_of_a_module(counts: tuple) -> None:
    with pytest.raises(ValueError, match=r"(heads|query_taps|key_taps) is .*; expected a whole number from 1 on"):
        ConvAttention(*counts)


def test_the_dtype_of_a_weight_is_named_once() -> None:
    refused(TypeError, r"expected torch\.float32, as q$", *make()[:3], make(dtype=torch.float16)[3])
    refused(
        TypeError,
        r"expected torch\.float16, as q, or torch\.float32$",
        *make(dtype=torch.float16)[:3],
        make(dtype=torch.bfloat16)[3],
    )


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


def test_packed_documents() -> None:
    q, k, v, weight = make()
    bounds = torch.tensor([0, 3, 8])
    for wrong in (bounds.float(), bounds[None], bounds[:1], bounds.short()):
        refused(
            ValueError, r"expected \[documents \+ 1\], torch.int32 or torch.int64", q, k, v, weight, cu_seqlens=wrong
        )
    for wrong, words in (([1, 8], "from 1 to 8"), ([0, 7], "from 0 to 7"), ([0, 5, 3, 8], "not in order")):
        refused(
            ValueError, f"{words}; expected .* from 0 to the 8 rows", q, k, v, weight, cu_seqlens=torch.tensor(wrong)
        )
    refused(ValueError, "leave out q_history", q, k, v, weight, cu_seqlens=bounds, q_history=q)
    refused(ValueError, "q has 5 rows and k 8", q[:, :, 3:], k, v, weight, cu_seqlens=bounds)
    refused(ValueError, "q has batch 2", *(torch.cat([x, x]) for x in (q, k, v)), weight, cu_seqlens=bounds)
    with pytest.raises(ValueError, match="rows and cu_seqlens"):
        conv_attention_reference(q, k, v, weight, cu_seqlens=bounds, rows=(0, 3))


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


def test_a_named_backend_never_falls_back() -> None:
    q, k, v, weight = (x.to(DEVICE) for x in make(dtype=torch.float64))
    assert explain(q, k, v, weight).backend == "reference"
    assert "float64" in explain(q, k, v, weight).reason
    with pytest.raises(ValueError, match="cannot run this"):
        conv_attention(q, k, v, weight, backend="triton")


def test_what_triton_cannot_take() -> None:
    given = {"device": DEVICE, "dtype": torch.float32}
    fine = {"head_dim": 64, "query_taps": 6, "key_taps": 11}
    assert unsupported("triton", **given, **fine) is None
    for change in ({"head_dim": 8}, {"head_dim": 257}, {"query_taps": 17}, {"key_taps": 32}):
        reason = unsupported("triton", **given, **{**fine, **change})
        assert reason
        assert str(next(iter(change.values()))) in reason


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


def test_decode_arguments() -> None:
    q, k, v, weight = make()
    window = q[:, :, -2:]
    lengths = torch.tensor([8])
    assert conv_attention_decode(window, k, v, weight, lengths=lengths).shape == (1, 4, 1, 16)
    with pytest.raises(ValueError, match="lengths"):
        conv_attention_decode(window, k, v, weight, lengths=torch.tensor([8.0]))
    for dtype in (
        torch.uint8,
        torch.int8,
        torch.int16,
        torch.uint16,
        torch.bool,
    ):  # some would wrap, some count wrongly
        for backend in ("reference", "triton"):
            with pytest.raises(ValueError, match=f"dtype {dtype}, on cpu; expected .1., torch.int32 or torch.int64"):
                conv_attention_decode(window, k, v, weight, lengths=lengths.to(dtype), backend=backend)
    with pytest.raises(ValueError, match="lengths has -1; expected the tokens of each sequence, 0 or more"):
        conv_attention_decode(window, k, v, weight, lengths=lengths - 9)
    with pytest.raises(ValueError, match="lengths has 9 and the cache holds 8 keys a sequence"):
        conv_attention_decode(window, k, v, weight, lengths=lengths + 1, backend="reference")
    with pytest.raises(ValueError, match="give the last 2"):
        conv_attention_decode(window[:, :, -1:], k, v, weight, lengths=lengths)
    with pytest.raises(ValueError, match="multiple of"):
        conv_attention_decode(window[:, :3], k, v, weight[:3], lengths=lengths)
    with pytest.raises(ValueError, match="'reference', 'triton'"):
        conv_attention_decode(window, k, v, weight, lengths=lengths, backend="metal")
    with pytest.raises(ValueError, match="does not split"):
        conv_attention_decode(window, k, v, weight, lengths=lengths, backend="reference", splits=4)
