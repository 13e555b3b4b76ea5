"""Steps of decode for tests: random inputs, the exact result, and how near a kernel has to come to it."""

from __future__ import annotations

import torch
from kernel_inputs import DEVICE, make, relative_error
from torch import Tensor

from mta_kernels.conv_attention import conv_attention_decode_reference


def make_decode(
    lengths, heads, kv_heads, head_dim, taps, dtype=torch.float32, window=None, **options
) -> tuple[Tensor, ...]:
    """Random q_window and caches, with NaN before the first token and beyond each length; weight and lengths."""
    capacity = max(lengths) + 5
    q, k, v, weight = make(len(lengths), heads, kv_heads, capacity, head_dim, taps, dtype, **options)
    window = window or taps[0]
    q = torch.cat([q, q], 2)[:, :, :window] if window > capacity else q[:, :, :window]
    for batch, length in enumerate(lengths):
        k[batch, :, length:] = v[batch, :, length:] = q[batch, :, : max(0, window - length)] = float("nan")
    return q, k, v, weight, torch.tensor(lengths, device=DEVICE)


def exact(q, k, v, weight, lengths, **options) -> Tensor:
    """By definition, in float64."""
    return conv_attention_decode_reference(*(x.double() for x in (q, k, v, weight)), lengths=lengths, **options)


def assert_decodes(got: Tensor, q, k, v, weight, lengths, rounding: int = 8, **options) -> None:
    """`got` is as near to float64 as twice eager's own error (and a few units of rounding), each sequence too."""
    want = exact(q, k, v, weight, lengths, **options)
    eager = conv_attention_decode_reference(q, k, v, weight, lengths=lengths, **options)
    assert got.shape == want.shape
    assert got.dtype == q.dtype
    tolerance = max(2 * relative_error(eager, want), rounding * torch.finfo(q.dtype).eps)
    for sequence, wanted in zip(got, want, strict=True):
        assert relative_error(sequence, wanted) <= 2 * tolerance
    assert relative_error(got, want) <= tolerance, (relative_error(got, want), tolerance)


def paged(x: Tensor, page_size: int) -> tuple[Tensor, Tensor]:
    """`x [B, H, S, D]` as shuffled pages `[pages, H, page_size, D]`, and their block table; unused pages are NaN."""
    batch, heads, length, head_dim = x.shape
    count = -(-length // page_size)
    padded = x.new_full((batch, heads, count * page_size, head_dim), float("nan"))
    padded[:, :, :length] = x
    order = torch.randperm(batch * count + 2, generator=torch.Generator().manual_seed(1))[: batch * count]
    pages = x.new_full((batch * count + 2, heads, page_size, head_dim), float("nan"))
    pages[order.to(x.device)] = padded.unflatten(2, (count, page_size)).transpose(1, 2).flatten(0, 1)
    return pages, order.view(batch, count).to(x.device, torch.int32)
