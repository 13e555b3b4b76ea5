"""The eager reference is what design says it is: compared with loops over the definition, in float64."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch

from mta_kernels.conv_attention import (
    ConvAttention,
    conv_attention,
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


def by_loops(q, k, v, weight, causal, scale, pad):
    """The five steps of the definition, a number at a time."""
    batch, heads, n, _ = q.shape
    query_taps, key_taps = weight.shape[1:]
    group = heads // k.shape[1]
    out = torch.zeros_like(q)
    for b in range(batch):
        for h in range(heads):
            keys, values = k[b, h // group], v[b, h // group]
            s = [[0.0] * n for _ in range(n)]
            for i in range(n):
                for j in range(n):
                    if not (causal and j > i):
                        s[i][j] = scale * float(q[b, h, i] @ keys[j])
            for i in range(n):
                row = []
                for j in range(n):
                    if causal and j > i:
                        row.append(-math.inf)
                        continue
                    total = 0.0
                    for a in range(query_taps):
                        for t in range(key_taps):
                            y, x = i - (query_taps - 1) + a, j - pad + t
                            if 0 <= y < n and 0 <= x < n:
                                total += float(weight[h, a, t]) * s[y][x]
                    row.append(total)
                out[b, h, i] = torch.softmax(torch.tensor(row, dtype=torch.float64), 0) @ values
    return out


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("pad_key", "pad"), [("both", 1), ("left", 3), ("right", 0)])
def test_reference_is_the_definition(causal: bool, pad_key: str, pad: int) -> None:
    q, k, v, weight = make(2, 4, 2, 7, 3, (3, 4))
    want = by_loops(q, k, v, weight, causal, 0.7, pad)
    got = conv_attention_reference(q, k, v, weight, causal=causal, scale=0.7, pad_key=pad_key)
    torch.testing.assert_close(got, want)


def test_even_taps_take_one_more_column_on_the_right() -> None:
    q, k, v, weight = make(1, 1, 1, 6, 4, (1, 2))
    want = by_loops(q, k, v, weight, False, 0.5, 0)
    torch.testing.assert_close(conv_attention_reference(q, k, v, weight, causal=False), want)


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


def test_one_tap_is_plain_attention_with_another_scale() -> None:
    q, k, v, _ = make(1, 2, 2, 11, 8, (1, 1))
    weight = torch.full((2, 1, 1), 1.7, dtype=torch.float64)
    want = attention_reference(q, k, v, scale=1.7 / math.sqrt(8))
    torch.testing.assert_close(conv_attention_reference(q, k, v, weight), want)


def test_blocks_of_rows_are_rows_of_the_whole() -> None:
    q, k, v, weight = make(1, 2, 1, 20, 4, (6, 5))
    whole = conv_attention_reference(q, k, v, weight)
    for start, stop in ((0, 20), (0, 1), (3, 9), (19, 20)):
        torch.testing.assert_close(
            conv_attention_reference(q, k, v, weight, rows=(start, stop)), whole[:, :, start:stop]
        )


@pytest.mark.parametrize("pad_key", ["both", "left", "right"])
def test_decode_of_each_row_is_the_row_of_the_whole(pad_key: str) -> None:
    q, k, v, weight = make(2, 4, 2, 14, 4, (6, 5))
    whole = conv_attention_reference(q, k, v, weight, pad_key=pad_key)
    for length in range(1, 15):
        window = q[:, :, max(0, length - 6) : length]
        lengths = torch.full((2,), length)
        # What lies in the cache beyond the sequence must not matter, even NaN.
        keys, values = k.clone(), v.clone()
        keys[:, :, length:], values[:, :, length:] = float("nan"), float("nan")
        got = conv_attention_decode(window, keys, values, weight, lengths=lengths, pad_key=pad_key, backend="reference")
        torch.testing.assert_close(got[:, :, 0], whole[:, :, length - 1])


def test_decode_of_a_ragged_batch() -> None:
    q, k, v, weight = make(3, 2, 2, 12, 4, (3, 5))
    whole = conv_attention_reference(q, k, v, weight)
    lengths = torch.tensor([12, 1, 7])
    window = torch.zeros(3, 2, 3, 4, dtype=torch.float64)
    for b, length in enumerate(lengths.tolist()):
        taken = q[b, :, max(0, length - 3) : length]
        window[b, :, 3 - taken.shape[1] :] = taken
    got = conv_attention_decode(window, k, v, weight, lengths=lengths, backend="reference")
    for b, length in enumerate(lengths.tolist()):
        torch.testing.assert_close(got[b, :, 0], whole[b, :, length - 1])


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


@pytest.mark.parametrize("grad", [True, False], ids=["grad", "no grad"])
def test_a_sequence_without_tokens_decodes_to_zeros(grad: bool) -> None:
    q, k, v, weight = make(2, 2, 1, 6, 4, (3, 5))
    with torch.set_grad_enabled(grad):
        for lengths in ([0, 4], [0, 0]):
            window, caches = q[:, :, 1:4].clone(), [x.clone() for x in (k, v)]
            for x in (window, *caches):
                x[0] = float("inf")
            got = conv_attention_decode(window, *caches, weight, lengths=torch.tensor(lengths), backend="reference")
            assert (got[0] == 0).all()
            assert got[1].isfinite().all()
            assert got[1].any() == (lengths[1] > 0)


def test_blocks_of_rows_of_a_chunk() -> None:
    q, k, v, weight = make(1, 2, 1, 20, 4, (6, 5))
    chunk = {"q_history": q[:, :, :9]}
    whole = conv_attention_reference(q[:, :, 9:], k, v, weight, **chunk)
    for rows in ((0, 11), (0, 1), (2, 4), (7, 11)):
        got = conv_attention_reference(q[:, :, 9:], k, v, weight, rows=rows, **chunk)
        torch.testing.assert_close(got, whole[:, :, rows[0] : rows[1]])
    with pytest.raises(ValueError, match="stop <= 11"):
        conv_attention_reference(q[:, :, 9:], k, v, weight, rows=(0, 12), **chunk)


@pytest.mark.parametrize("chunk", [1, 3, 6, 12, 18, 24])
def test_chunks_of_heads_are_heads_of_the_whole(chunk: int) -> None:
    q, k, v, weight = make(1, 18, 3, 9, 4, (3, 4))
    whole = conv_attention_reference(q, k, v, weight)
    torch.testing.assert_close(conv_attention_reference(q, k, v, weight, head_chunk=chunk), whole)
    rows = {"rows": (4, 7), "head_chunk": chunk}
    torch.testing.assert_close(conv_attention_reference(q, k, v, weight, **rows), whole[:, :, 4:7])


@pytest.mark.parametrize("causal", [True, False])
def test_gradients_of_the_reference(causal: bool) -> None:
    q, k, v, weight = inputs = [x.requires_grad_() for x in make(1, 2, 1, 5, 3, (3, 3))]

    def check(inputs, **options) -> None:
        def run(q, k, v, weight, history=None):
            return conv_attention_reference(q, k, v, weight, q_history=history, causal=causal, **options)

        assert torch.autograd.gradcheck(run, inputs, fast_mode=True)

    check(inputs)
    check(inputs, cu_seqlens=torch.tensor([0, 0, 2, 3, 5]))
    check(inputs, head_chunk=1)
    q, history = (x.detach().requires_grad_() for x in (q[:, :, 2:], q[:, :, :2]))
    check([q, k, v, weight, history])


def test_identity_weight_has_one_tap_a_head() -> None:
    weight = identity_weight(3, 4, 6, pad_key="left")
    assert weight.sum() == 3
    assert (weight[:, 3, 5] == 1).all()


def in_chunks(q, k, v, weight, bounds, **options):
    """Rows of a prompt that is processed a chunk at a time."""
    return torch.cat(
        [
            conv_attention(
                q[:, :, start:stop],
                k[:, :, :stop],
                v[:, :, :stop],
                weight,
                q_history=q[:, :, max(0, start - 7) : start],
                backend="reference",
                **options,
            )
            for start, stop in pairwise(bounds)
        ],
        dim=2,
    )


@pytest.mark.parametrize("pad_key", ["both", "left", "right"])
@pytest.mark.parametrize("bounds", [range(15), (0, 3, 6, 9, 12, 14), (0, 1, 10, 14)], ids=["ones", "threes", "ragged"])
def test_chunks_of_a_prompt_are_rows_of_the_whole(bounds, pad_key: str) -> None:
    q, k, v, weight = make(2, 4, 2, 14, 4, (6, 5))
    whole = conv_attention_reference(q, k, v, weight, pad_key=pad_key)
    torch.testing.assert_close(in_chunks(q, k, v, weight, bounds, pad_key=pad_key), whole)


def test_last_rows_without_a_mask_are_rows_of_the_whole() -> None:
    q, k, v, weight = make(1, 2, 1, 14, 4, (4, 5))
    whole = conv_attention_reference(q, k, v, weight, causal=False)
    for start in range(14):
        got = conv_attention_reference(q[:, :, start:], k, v, weight, q_history=q[:, :, :start], causal=False)
        torch.testing.assert_close(got, whole[:, :, start:])
