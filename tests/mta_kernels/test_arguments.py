"""Bad arguments are refused in one sentence that says what was given and what is expected."""

from __future__ import annotations

import pytest
import torch
from kernel_inputs import DEVICE

from mta_kernels.conv_attention import conv_attention, conv_attention_decode, explain, unsupported


def make(q=(1, 4, 8, 16), k=(1, 2, 8, 16), weight=(4, 2, 3), dtype=torch.float32):
    return [torch.randn(*s).to(dtype) for s in (q, k, k, weight)]


@pytest.mark.parametrize(
    ("shapes", "words"),
    [
        ({"q": (0, 4, 8, 16), "k": (0, 2, 8, 16)}, "at least 1"),
        ({"q": (4, 8, 16)}, "four dimensions"),
        ({"k": (1, 3, 8, 16)}, "multiple of"),
        ({"k": (1, 2, 9, 16)}, "must be the same"),
        ({"k": (2, 2, 8, 16)}, "must be the same"),
        ({"weight": (2, 2, 3)}, "4 query heads"),
        ({"weight": (4, 6)}, "query taps, key taps"),
        ({"weight": (4, 0, 3)}, "at least one tap"),
    ],
)
def test_shapes(shapes: dict, words: str) -> None:
    with pytest.raises(ValueError, match=words) as caught:
        conv_attention(*make(**shapes))
    assert "\n" not in str(caught.value)


def test_dtypes_and_options() -> None:
    q, k, v, weight = make()
    with pytest.raises(TypeError, match=r"torch\.float16"):
        conv_attention(q, k.half(), v, weight)
    with pytest.raises(TypeError, match="floating-point"):
        conv_attention(q.int(), k, v, weight)
    with pytest.raises(TypeError, match="weight has dtype"):
        conv_attention(q, k, v, weight.double())
    with pytest.raises(ValueError, match="'both', 'left', 'right'"):
        conv_attention(q, k, v, weight, pad_key="middle")
    with pytest.raises(ValueError, match="'reference', 'triton'"):
        conv_attention(q, k, v, weight, backend="cuda")
    with pytest.raises(ValueError, match="v "):
        conv_attention(q, k, v[:, :1], weight)


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


def test_decode_arguments() -> None:
    q, k, v, weight = make()
    window = q[:, :, -2:]
    lengths = torch.tensor([8])
    assert conv_attention_decode(window, k, v, weight, lengths=lengths).shape == (1, 4, 1, 16)
    with pytest.raises(ValueError, match="lengths"):
        conv_attention_decode(window, k, v, weight, lengths=torch.tensor([8.0]))
    with pytest.raises(ValueError, match="give the last 2"):
        conv_attention_decode(window[:, :, -1:], k, v, weight, lengths=lengths)
    with pytest.raises(ValueError, match="multiple of"):
        conv_attention_decode(window[:, :3], k, v, weight[:3], lengths=lengths)
    with pytest.raises(ValueError, match="'reference', 'triton'"):
        conv_attention_decode(window, k, v, weight, lengths=lengths, backend="cuda")
    with pytest.raises(ValueError, match="does not split"):
        conv_attention_decode(window, k, v, weight, lengths=lengths, backend="reference", splits=4)
