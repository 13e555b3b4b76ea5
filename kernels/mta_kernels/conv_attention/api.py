"""The public interface of conv attention: two functions and a module."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from mta_kernels.backend import Request
from mta_kernels.conv_attention.arguments import (
    as_int,
    cast_for_autocast,
    check_are_tensors,
    check_arguments,
    check_count,
    check_floating_point,
    check_scale,
    check_splits,
    under_autocast,
    wants_gradient,
)
from mta_kernels.conv_attention.backends import CONV_ATTENTION
from mta_kernels.conv_attention.operators import conv_attention_decode_op, conv_attention_op
from mta_kernels.conv_attention.reference import (
    check_decode_arguments,
    conv_attention_decode_reference,
    conv_attention_reference,
)
from mta_kernels.conv_attention.replay import Call, replay_or_call
from mta_kernels.operation import Operation, key_padding


def conv_attention(
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
    backend: str = "auto",
) -> Tensor:
    """Multi-Token Attention (arXiv 2504.00927): attention whose scores are convolved before the softmax.

    `q [B, Hq, M, D]`, `k, v [B, Hkv, N, D]` with `Hq` a multiple of `Hkv` and `M <= N`, `weight [Hq, cq, ck]` in q's
    dtype or float32; returns `[B, Hq, M, D]`. `scale` is the factor on `q . k`, `1 / sqrt(D)` unless given;
    `pad_key` places the key taps ("both", "left" or "right"). Differentiable in every floating-point tensor. The fused
    backends have first derivatives, by a backward; the reference also forward mode (`torch.func.jvp`) and second ones.

    - With `M < N` (a chunk of a prompt) q holds the last `M` positions, and `q_history [B, Hq, H, D]` the queries just
      before them, oldest first, `H >= min(cq - 1, N - M)`; more are ignored.
    - `cu_seqlens [S + 1]`, int32 or int64, packs S documents into one row of tokens, `B = 1` and `M = N`: document s is
      rows `cu_seqlens[s]` to `cu_seqlens[s + 1]`, and neither attention nor convolution crosses a bound. Documents may
      be empty. It starts at 0 and ends at N, which is checked on a CPU alone: nothing waits for a GPU.
    - A backend computes `head_chunk` query heads at a time, which bounds the memory. It divides the heads that share a
      KV head, or is a multiple of them. Hopper's forward needs almost no scratch and computes all heads at once.

    `backend` is "auto" (`explain` returns its choice), "reference", "triton", "hopper" (H100 and H200) or "cuda" (any
    NVIDIA GPU from sm_80 on), the last two in float16 and bfloat16. A named one never falls back; `unsupported`
    returns why it cannot run a call. Under autocast q, k and v are cast to its dtype, and so is the weight unless it is
    float32; float64 stays as it is.
    A row depends on no later token and on no other document, for every finite input. In every backend, infinity or NaN
    in q, k, v or the weight makes all rows and gradients of the heads that read it undefined. A row is undefined, too,
    if its `scale * q . k` overflows float32.
    Raises ValueError or TypeError, in one sentence, for arguments that do not fit or a backend that cannot run, and
    RuntimeError for a derivative that the backend does not have.
    """
    return replay_or_call(_checked, q, k, v, weight, q_history, cu_seqlens, causal, scale, pad_key, head_chunk, backend)


def _checked(
    q: Tensor, k: Tensor, v: Tensor, weight: Tensor, q_history: Tensor | None, cu_seqlens: Tensor | None, causal: bool,
    scale: float | None, pad_key: str, head_chunk: int | None, backend: str,
) -> Call:  # fmt: skip
    """A call of `conv_attention`, which raises ValueError or TypeError unless its arguments fit."""
    check_are_tensors(q=q, k=k, v=v, weight=weight, q_history=q_history, cu_seqlens=cu_seqlens)
    if under_autocast(q):
        weight, q, k, v, q_history = cast_for_autocast(weight, q, k, v, q_history)
    head_chunk = as_int(head_chunk)
    extras: dict[str, Any] = {"q_history": q_history, "cu_seqlens": cu_seqlens, "head_chunk": head_chunk}
    check_arguments(q, k, v, pad_key, {"weight": weight}, **extras)
    check_scale(scale)
    head_dim = q.shape[3]
    operation = Operation.of(weight.shape[1:], head_dim, causal=causal, scale=scale, pad_key=pad_key)
    gradients = wants_gradient(q, k, v, weight, q_history)
    request = Request(operation, q.device, q.dtype, head_dim, gradients)
    kernels, _ = CONV_ATTENTION.choose(backend, request)
    if kernels is None:
        extras |= {"causal": causal, "scale": scale, "pad_key": pad_key}
        return Call(operation, None, partial(conv_attention_reference, q, k, v, weight, **extras))
    return Call(operation, kernels, partial(conv_attention_op, operation, q, k, v, weight, **extras, backend=kernels))


def conv_attention_decode(
    q_window: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    weight: Tensor,
    *,
    lengths: Tensor,
    scale: float | None = None,
    pad_key: str = "both",
    backend: str = "auto",
    splits: int | str = "auto",
    block_table: Tensor | None = None,
) -> Tensor:
    """One decode step: the newest row of causal conv attention, `[B, Hq, 1, D]`, from the KV cache.

    `q_window [B, Hq, W, D]` holds the last `W >= min(cq, tokens so far)` queries, oldest first, the new one
    last; `k_cache, v_cache [B, Hkv, S, D]`; `lengths [B]`, int32 or int64, counts each sequence's tokens, the new one
    included, and is at most `S`, which the reference checks on a CPU. A sequence of length 0 gives zeros. What lies in
    a cache beyond a length, and in q_window before a sequence's first token, may be anything, NaN included.
    With `block_table [B, max_pages]` int32 the caches are pages, `[pages, Hkv, page_size, D]` of 16, 32, 64, 128 or 256
    keys, and key `y` of sequence `b` is row `y % page_size` of page `block_table[b, y // page_size]`; entries past a
    sequence's length may be anything. `backend` is "auto" (`explain` returns its choice), "reference", "triton" (caches
    whose last stride is 1) or "cuda" (any NVIDIA GPU from sm_80 on, float16 and bfloat16); `splits`, the programs that
    share the keys of a head, is for the last two. Derivatives through those two raise RuntimeError; the reference is
    differentiable. Nothing waits for the device.
    Raises ValueError or TypeError as `conv_attention`.
    """
    check_are_tensors(
        q_window=q_window, k_cache=k_cache, v_cache=v_cache, weight=weight, lengths=lengths, block_table=block_table
    )
    if under_autocast(q_window):
        weight, q_window, k_cache, v_cache = cast_for_autocast(weight, q_window, k_cache, v_cache)
    check_decode_arguments(q_window, k_cache, v_cache, weight, lengths, pad_key, block_table)
    splits = as_int(splits)
    check_splits(splits)
    check_scale(scale)
    head_dim = q_window.shape[3]
    operation = Operation.of(weight.shape[1:], head_dim, scale=scale, pad_key=pad_key)
    tensors = q_window, k_cache, v_cache
    options: dict[str, Any] = {
        "lengths": lengths, "scale": operation.scale, "pad_key": pad_key, "block_table": block_table
    }  # fmt: skip
    request = Request(operation, q_window.device, q_window.dtype, head_dim, decode=tensors)
    kernels, _ = CONV_ATTENTION.choose(backend, request)
    if kernels is None and splits != "auto":
        raise ValueError(f"splits is {splits!r}; the reference backend does not split the keys: leave it at 'auto'")
    if kernels is None:
        return conv_attention_decode_reference(*tensors, weight, **options)
    return conv_attention_decode_op(*tensors, weight, splits=splits, backend=kernels, **options)


def identity_weight(
    heads: int,
    query_taps: int,
    key_taps: int,
    *,
    pad_key: str = "both",
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
) -> Tensor:
    """`[heads, query_taps, key_taps]`: the convolution that changes nothing, so that plain attention remains.

    Raises ValueError for counts that are no whole numbers from 1 on, and for an unknown pad_key; TypeError for a dtype
    that is not of floating-point numbers.
    """
    heads, query_taps, key_taps = map(as_int, (heads, query_taps, key_taps))
    for name, count in (("heads", heads), ("query_taps", query_taps), ("key_taps", key_taps)):
        check_count(name, count)
    if dtype is not None:
        check_floating_point(dtype)
    weight = torch.zeros(heads, query_taps, key_taps, dtype=dtype, device=device)
    weight[:, query_taps - 1, key_padding(key_taps, pad_key)] = 1
    return weight


class ConvAttention(nn.Module):
    """`conv_attention` with its weight as a parameter `[heads, query_taps, key_taps]`, the identity at first.

    Takes `q [B, heads, M, D]`, `k, v [B, Hkv, N, D]`; with the options of `conv_attention`. Raises ValueError or
    TypeError for options that no call could have.
    """

    def __init__(
        self,
        heads: int,
        query_taps: int = 6,
        key_taps: int = 11,
        *,
        causal: bool = True,
        scale: float | None = None,
        pad_key: str = "both",
        head_chunk: int | None = None,
        backend: str = "auto",
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        Operation.of(None, 1, causal=causal, scale=scale)
        if backend != "auto":
            CONV_ATTENTION.named(backend)
        head_chunk = as_int(head_chunk)
        if head_chunk is not None:
            check_count("head_chunk", head_chunk)
        self.causal, self.scale, self.pad_key = causal, scale, pad_key
        self.head_chunk, self.backend = head_chunk, backend
        self.weight = nn.Parameter(
            identity_weight(heads, query_taps, key_taps, pad_key=pad_key, dtype=dtype, device=device)
        )

    def reset_parameters(self) -> None:
        """Make the convolution the identity again: plain attention."""
        with torch.no_grad():
            self.weight.copy_(identity_weight(*self.weight.shape, pad_key=self.pad_key, device=self.weight.device))

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        q_history: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
    ) -> Tensor:
        """`[B, heads, M, D]`, as `conv_attention`.

        `q_history` is for a chunk of a prompt, `cu_seqlens` for documents.
        """
        return conv_attention(
            q, k, v, self.weight, q_history=q_history, cu_seqlens=cu_seqlens, causal=self.causal, scale=self.scale,
            pad_key=self.pad_key, head_chunk=self.head_chunk, backend=self.backend,
        )  # fmt: skip

    def extra_repr(self) -> str:
        heads, query_taps, key_taps = self.weight.shape
        return (
            f"{heads}, {query_taps}, {key_taps}, causal={self.causal}, scale={self.scale}, "
            f"pad_key={self.pad_key!r}, head_chunk={self.head_chunk}, backend={self.backend!r}"
        )
