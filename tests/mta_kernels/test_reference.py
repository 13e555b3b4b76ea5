"""The eager reference by blocks of rows, as a module, and the gradients of its steps, in float64.

tests/conformance compares its values and gradients with the definition.
"""

from __future__ import annotations

import pytest
import torch

from mta_kernels.conv_attention import (
    ConvAttention,
    conv_attention_decode,
    conv_attention_reference,
    identity_weight,
)
from mta_ladder import attention_reference, attention_sdpa


def make(batch, heads, kv_heads, seq_len, head_dim, taps, seed=0):
    torch.manual_seed(seed)
    q = torch.randn(batch, heads, seq_len, head_dim, dtype=torch.float64)
    k, v = (torch.randn(batch, kv_heads, seq_len, head_dim, dtype=torch.float64) for _ in range(2))
    return q, k, v, torch.randn(heads, *taps, dtype=torch.float64)


@pytest.mark.parametrize("taps", [(1, 1), (2, 9), (6, 11), (4, 6)])
def test_identity_weight_is_plain_attention(taps: tuple[int, int]) -> None:
    q, k, v, _ = make(1, 4, 2, 13, 8, taps)
    module = ConvAttention(4, *taps, backend="reference", dtype=torch.float64)
    plain = attention_reference(q, k, v)
    torch.testing.assert_close(module(q, k, v), plain)
    torch.testing.assert_close(attention_sdpa(q, k, v, backend="math"), plain)
    with torch.no_grad():
        module.weight.add_(0.1)
    assert not torch.allclose(module(q, k, v), plain)
    module.reset_parameters()
    torch.testing.assert_close(module(q, k, v), plain)


@pytest.mark.parametrize("pages", [False, True], ids=["contiguous", "paged"])
def test_gradients_of_a_decode_know_nothing_of_what_lies_beside_a_sequence(pages: bool) -> None:
    """NaN in caches beyond a length, and in the window before the first token."""
    q, k, v, weight = make(5, 4, 2, 16, 4, (3, 5))
    lengths = [0, 1, 2, 9, 16]
    window = torch.full((5, 4, 3, 4), float("nan"), dtype=torch.float64)
    for b, length in enumerate(lengths):
        taken = q[b, :, max(0, length - 3) : length]
        window[b, :, 3 - taken.shape[1] :] = taken
        k[b, :, length:] = v[b, :, length:] = float("nan")
    leaves = [x.requires_grad_() for x in (window, k, v, weight)]
    table = torch.arange(5, dtype=torch.int32)[:, None] if pages else None
    got = conv_attention_decode(*leaves, lengths=torch.tensor(lengths), block_table=table, backend="reference")
    dwindow, dk, dv, dweight = torch.autograd.grad(got.square().sum(), leaves)

    want_dweight = torch.zeros_like(weight)
    for b, length in enumerate(lengths):
        row, used = slice(b, b + 1), min(3, length)
        if length:
            sequence = [x[row, :, :length].detach().requires_grad_() for x in (q, k, v)]
            last = conv_attention_reference(*sequence, weight)[:, :, -1:]
            torch.testing.assert_close(got[row], last)
            dq, *others, part = torch.autograd.grad(last.square().sum(), [*sequence, weight])
            for of, wanted in zip(
                (dwindow[row, :, 3 - used :], dk[row, :, :length], dv[row, :, :length]),
                (dq[:, :, length - used :], *others),
                strict=True,
            ):
                torch.testing.assert_close(of, wanted)
            want_dweight += part
        for nothing in (dwindow[b, :, : 3 - used], dk[b, :, length:], dv[b, :, length:]):
            assert (nothing == 0).all()
    torch.testing.assert_close(dweight, want_dweight)
    assert (got[0] == 0).all()


def test_blocks_of_rows_are_rows_of_the_whole_and_of_a_chunk() -> None:
    q, k, v, weight = make(1, 2, 1, 20, 4, (6, 5))
    all_rows = conv_attention_reference(q, k, v, weight)
    chunk = {"q_history": q[:, :, :9]}
    whole = conv_attention_reference(q[:, :, 9:], k, v, weight, **chunk)
    for rows in ((0, 11), (0, 1), (2, 4), (7, 11)):
        got = conv_attention_reference(q, k, v, weight, rows=rows)
        torch.testing.assert_close(got, all_rows[:, :, rows[0] : rows[1]])
        got = conv_attention_reference(q[:, :, 9:], k, v, weight, rows=rows, **chunk)
        torch.testing.assert_close(got, whole[:, :, rows[0] : rows[1]])
    with pytest.raises(ValueError, match="stop <= 11"):
        conv_attention_reference(q[:, :, 9:], k, v, weight, rows=(0, 12), **chunk)


def test_identity_weight_has_one_tap_a_head() -> None:
    weight = identity_weight(3, 4, 6, pad_key="left")
    assert weight.sum() == 3
    assert (weight[:, 3, 5] == 1).all()
