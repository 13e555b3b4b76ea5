"""Conv attention as it is defined, in eager PyTorch: readable, any device, any dtype; float64 is the oracle.

With `s[i, j] = scale * q[i] . k[j]` (zero for `j > i` if causal) and zeros outside the matrix,
`c[i, j] = sum_{a, b} weight[h, a, b] * s[i - (cq-1) + a, j - pad + b]` (`-inf` for `j > i` if causal),
`out = softmax(c) v`: arXiv 2504.00927, equation 4, with the masks of its implementation.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mta_kernels.conv_attention.arguments import (
    as_int,
    can_be_read,
    check_arguments,
    check_block_table,
    check_has_floating_point,
    check_heads,
    check_scale,
    check_weight,
    check_whole_numbers,
    documents_of,
    head_parts,
    row_range,
    rows_before,
    wants_gradient,
)
from mta_kernels.operation import Convolution, Operation, key_padding


def conv_attention_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    weight: Tensor,
    *,
    q_history: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    causal: bool = True,
    scale: float | None = None,
    pad_key: str = "both",
    head_chunk: int | None = None,
    rows: tuple[int, int] | None = None,
) -> Tensor:
    """Conv attention of `q [B, Hq, M, D]`, `k, v [B, Hkv, N, D]`, `weight [Hq, cq, ck]`: `[B, Hq, M, D]`.

    `q_history [B, Hq, H, D]`, `cu_seqlens [S + 1]` and `head_chunk` as in `conv_attention`. Stores the `M x N`
    scores of `head_chunk` heads; reads `cu_seqlens` on the host. `rows = (start, stop)` computes those rows of q alone
    and returns `[B, Hq, stop - start, D]`. So a caller can check long sequences a block of rows at a time.
    Differentiable in every floating-point tensor. Raises ValueError or TypeError for arguments that do not fit.
    """
    head_chunk = as_int(head_chunk)
    check_arguments(
        q, k, v, pad_key, {"weight": weight}, q_history=q_history, cu_seqlens=cu_seqlens, head_chunk=head_chunk
    )
    if cu_seqlens is not None:
        if rows is not None:
            raise ValueError("rows and cu_seqlens are both given; cut the document out to have some of its rows")
        options: dict[str, Any] = {"causal": causal, "scale": scale, "pad_key": pad_key, "head_chunk": head_chunk}
        return torch.cat(
            [
                conv_attention_reference(q[:, :, at], k[:, :, at], v[:, :, at], weight, **options)
                for at in documents_of(cu_seqlens)
            ],
            dim=2,
        )

    check_scale(scale)
    operation = Operation.of(weight.shape[1:], q.shape[3], causal=causal, scale=scale, pad_key=pad_key)
    before = rows_before(q.shape[2], k.shape[2], weight.shape[1])
    start, stop = row_range(rows, q.shape[2])
    if q_history is not None and before:
        q = torch.cat([q_history[:, :, -before:], q], dim=2)
    rows = start + before, stop + before
    if head_chunk is None:
        return _definition(operation, q, k, v, weight, rows)
    parts = [
        _definition(operation, q[:, heads], k[:, kv_heads], v[:, kv_heads], weight[heads], rows)
        for heads, kv_heads in head_parts(q.shape[1], k.shape[1], head_chunk)
    ]
    return torch.cat(parts, dim=1)


def _definition(operation: Operation, q: Tensor, k: Tensor, v: Tensor, weight: Tensor, rows: tuple[int, int]) -> Tensor:
    """The `rows` of q, which holds the queries of the last positions of k and v."""
    query_heads, query_rows = q.shape[1:3]
    start, stop = rows
    first = max(0, start - (operation.conv.query_taps - 1))  # the convolution looks back on these rows
    keys, values = (repeat_heads(x, query_heads) for x in (k, v))

    scores = q[:, :, first:stop] @ keys.transpose(-1, -2) * operation.scale
    position = torch.arange(first, stop, device=q.device) + (k.shape[2] - query_rows)
    future = torch.arange(k.shape[2], device=q.device) > position[:, None]  # the key comes after the query
    if operation.causal:
        scores = scores.masked_fill(future, 0)
    mixed = convolve_scores(scores, weight, operation.conv)[:, :, start - first :]
    if operation.causal:
        mixed = mixed.masked_fill(future[start - first :], float("-inf"))
    return torch.softmax(mixed, dim=-1) @ values


def conv_attention_decode_reference(
    q_window: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    weight: Tensor,
    *,
    lengths: Tensor,
    scale: float | None = None,
    pad_key: str = "both",
    block_table: Tensor | None = None,
) -> Tensor:
    """The newest row of causal conv attention, from the KV cache: `[B, Hq, 1, D]`.

    `q_window [B, Hq, W, D]` holds the last `W` queries, oldest first, the new one last, with
    `W >= min(cq, tokens so far)`; `k_cache, v_cache [B, Hkv, S, D]`; `lengths [B]` counts the tokens of each
    sequence, the new one included. Equals row `lengths - 1` of `conv_attention_reference`; a length of 0 gives zeros.
    With `block_table` the caches are pages, as `conv_attention_decode` describes them. What lies in a cache beyond a
    length, and in q_window before the first token, may be anything: it changes no result, and its gradients are zero.
    Raises ValueError or TypeError for arguments that do not fit.
    """
    if block_table is not None:
        check_block_table(block_table, q_window, k_cache)
        k_cache, v_cache = (gather_pages(cache, block_table) for cache in (k_cache, v_cache))
    check_decode_arguments(q_window, k_cache, v_cache, weight, lengths, pad_key)
    keys_there = k_cache.shape[2]
    if can_be_read(lengths) and int(lengths.max()) > keys_there:
        raise ValueError(
            f"lengths has {int(lengths.max())} and the cache holds {keys_there} keys a sequence; give at most as many"
        )
    _, query_heads, window, head_dim = q_window.shape
    check_scale(scale)
    operation = Operation.of(weight.shape[1:], head_dim, scale=scale, pad_key=pad_key)
    window = min(window, operation.conv.query_taps)
    column = torch.arange(keys_there, device=k_cache.device)
    row = lengths[:, None] - window + torch.arange(window, device=k_cache.device)  # [B, W], absolute positions
    # Masks, not products: what lies before or beyond a sequence may be NaN, and 0 * NaN is NaN.
    beyond = (column >= lengths[:, None])[:, None, :, None]
    queries = q_window[:, :, -window:].masked_fill((row < 0)[:, None, :, None], 0)
    if wants_gradient(q_window):  # the mask of the scores is enough for them, but not for the gradient of the queries
        k_cache = k_cache.masked_fill(beyond, 0)
    keys, values = (repeat_heads(x, query_heads) for x in (k_cache, v_cache.masked_fill(beyond, 0)))

    scores = queries @ keys.transpose(-1, -2) * operation.scale
    scores = scores.masked_fill((column > row[:, :, None])[:, None], 0)  # rows before the first token see nothing
    mixed = convolve_scores(scores, weight, operation.conv)[:, :, -1:]
    unseen = column >= lengths.clamp(min=1)[:, None]  # a sequence without tokens sees one key, whose value is masked
    return torch.softmax(mixed.masked_fill(unseen[:, None, None], float("-inf")), dim=-1) @ values


def convolve_scores(scores: Tensor, weight: Tensor, convolution: Convolution) -> Tensor:
    """Step 3 of the definition: one cross-correlation a head over `scores [B, Hq, rows, columns]`, same shape."""
    right = convolution.key_taps - 1 - convolution.pad
    padded = F.pad(scores, (convolution.pad, right, convolution.query_taps - 1, 0))
    filters = weight.to(scores.dtype).unsqueeze(1)
    if scores.device.type == "cpu" and scores.dtype == torch.float16:
        # PyTorch 2.13 on a CPU with AVX-512 but no fp16 arithmetic: 16 taps along keys take minutes, or never end. In
        # float32 results are rounded once, too.
        return F.conv2d(padded.float(), filters.float(), groups=weight.shape[0]).to(scores.dtype)
    return F.conv2d(padded, filters, groups=weight.shape[0])


def repeat_heads(x: Tensor, query_heads: int) -> Tensor:
    """`[B, Hkv, ...]` to `[B, Hq, ...]`: query head `h` reads KV head `h // (Hq // Hkv)`."""
    return x if x.shape[1] == query_heads else x.repeat_interleave(query_heads // x.shape[1], dim=1)


def gather_pages(cache: Tensor, block_table: Tensor) -> Tensor:
    """`[pages, Hkv, page_size, D]` to `[B, Hkv, max_pages * page_size, D]`; entries that name no page get any."""
    pages = cache[block_table.long().clamp(0, cache.shape[0] - 1)]  # [B, max_pages, Hkv, page_size, D]
    return pages.transpose(1, 2).flatten(2, 3)


def check_decode_arguments(
    q_window: Tensor, k_cache: Tensor, v_cache: Tensor, weight: Tensor, lengths: Tensor, pad_key: str,
    block_table: Tensor | None = None, *, weight_name: str = "weight",
) -> None:  # fmt: skip
    """Raise ValueError or TypeError, in one sentence, unless the arguments fit a decode step.

    The values in `lengths` are read on a CPU alone: on a GPU that would wait for the device.
    """
    for name, tensor in (("q_window", q_window), ("k_cache", k_cache), ("v_cache", v_cache)):
        if tensor.dim() != 4 or 0 in tensor.shape:
            raise ValueError(
                f"{name} has shape {tuple(tensor.shape)}; expected four dimensions of at least 1: "
                "[batch, heads, window or cache length, head_dim]"
            )
        check_has_floating_point(name, tensor)
        if tensor.dtype != q_window.dtype or tensor.device != q_window.device:
            raise TypeError(
                f"{name} is {tensor.dtype} on {tensor.device} and q_window {q_window.dtype} on {q_window.device}; "
                "they must be the same"
            )
    if k_cache.shape != v_cache.shape:
        raise ValueError(
            f"k_cache has shape {tuple(k_cache.shape)} and v_cache {tuple(v_cache.shape)}; they must be the same"
        )
    batch, query_heads, window, head_dim = q_window.shape
    if block_table is not None:
        check_block_table(block_table, q_window, k_cache)
    if k_cache.shape[3] != head_dim or (block_table is None and k_cache.shape[0] != batch):
        raise ValueError(
            f"q_window has shape {tuple(q_window.shape)} and k_cache {tuple(k_cache.shape)}; "
            "batch and head_dim must be the same"
        )
    check_heads(query_heads, k_cache.shape[1])
    check_weight(weight, query_heads, q_window, name=weight_name, like="q_window")
    key_padding(weight.shape[2], pad_key)
    check_whole_numbers("lengths", lengths, lengths.shape == (batch,), (batch,), q_window.device)
    if can_be_read(lengths):
        shortest, longest = (int(x) for x in lengths.aminmax())
        if shortest < 0:
            raise ValueError(f"lengths has {shortest}; expected the tokens of each sequence, 0 or more")
        if window < min(weight.shape[1], longest):
            raise ValueError(
                f"q_window holds {window} queries and the convolution looks back on {weight.shape[1]}: "
                f"give the last {min(weight.shape[1], longest)}"
            )
