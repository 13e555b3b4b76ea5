"""The public face of conv attention: one function, one module, and the question which backend would run."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from mta_kernels.conv_attention.arguments import check_arguments, key_padding
from mta_kernels.conv_attention.reference import (
    check_decode_arguments,
    conv_attention_decode_reference,
    conv_attention_reference,
)

BACKENDS = ("reference", "triton")


@dataclass(frozen=True)
class Choice:
    """The backend that a call takes, and why."""

    backend: str
    reason: str

    def __str__(self) -> str:
        return f"{self.backend}: {self.reason}"


def unsupported(
    backend: str, *, device: str, dtype: torch.dtype, head_dim: int, query_taps: int, key_taps: int
) -> str | None:
    """Why `backend` cannot run conv attention with these on this machine, or None if it can.

    `device` is a torch device type, "cuda" or "cpu". Raises ValueError for an unknown backend.
    """
    if backend == "reference":
        return None
    if backend == "triton":
        from mta_kernels.conv_attention.triton import triton_unsupported

        return triton_unsupported(
            device=device, dtype=dtype, head_dim=head_dim, query_taps=query_taps, key_taps=key_taps
        )
    raise ValueError(f"backend is {backend!r}; expected 'auto' or one of {', '.join(map(repr, BACKENDS))}")


def explain(q: Tensor, k: Tensor, v: Tensor, weight: Tensor, *, backend: str = "auto") -> Choice:
    """Which backend `conv_attention` (and `conv_attention_decode`) takes for these arguments, and why.

    Raises ValueError for an unknown backend, or a named one that cannot run them.
    """
    reasons = {
        name: unsupported(
            name,
            device=q.device.type,
            dtype=q.dtype,
            head_dim=q.shape[-1],
            query_taps=weight.shape[-2],
            key_taps=weight.shape[-1],
        )
        for name in (BACKENDS if backend == "auto" else (backend,))
    }
    if backend != "auto":
        if reasons[backend]:
            raise ValueError(
                f"backend {backend!r} cannot run this: {reasons[backend]}; backend='auto' picks one that can"
            )
        return Choice(backend, "asked for")
    if reasons["triton"] is None:
        return Choice("triton", "the fastest backend for these arguments")
    return Choice("reference", f"triton cannot run this: {reasons['triton']}")


def conv_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    weight: Tensor,
    *,
    causal: bool = True,
    scale: float | None = None,
    pad_key: str = "both",
    backend: str = "auto",
) -> Tensor:
    """Multi-Token Attention (arXiv 2504.00927): attention whose scores are convolved before the softmax.

    `q [B, Hq, N, D]`, `k, v [B, Hkv, N, D]` with `Hq` a multiple of `Hkv`, `weight [Hq, cq, ck]` in q's dtype
    or float32; returns `[B, Hq, N, D]`. `scale` is the factor on `q . k`, `1 / sqrt(D)` unless given;
    `pad_key` places the key taps ("both", "left" or "right"). Differentiable in q, k, v and weight.
    `backend` is "auto" (`explain` says which that is), "reference" or "triton"; a named one never falls back.
    Raises ValueError or TypeError, in one sentence, for arguments that do not fit or a backend that cannot run.
    """
    check_arguments(q, k, v, weight, pad_key)
    if explain(q, k, v, weight, backend=backend).backend == "reference":
        return conv_attention_reference(q, k, v, weight, causal=causal, scale=scale, pad_key=pad_key)
    from mta_kernels.conv_attention.triton import conv_attention_triton

    return conv_attention_triton(q, k, v, weight, causal=causal, scale=scale, pad_key=pad_key)


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
    last; `k_cache, v_cache [B, Hkv, S, D]`; `lengths [B]` counts each sequence's tokens, the new one included.
    With `block_table [B, max_pages]` int32 the caches are pages, `[pages, Hkv, page_size, D]` of 16 to 256 keys, and
    key `y` of sequence `b` is row `y % page_size` of page `block_table[b, y // page_size]`; entries past a sequence's
    length may be anything. `backend` as in `conv_attention`; `splits`, the programs that share the keys of a head,
    is for Triton alone. Not differentiable through Triton; nothing waits for the device.
    Raises ValueError or TypeError as `conv_attention`.
    """
    check_decode_arguments(q_window, k_cache, v_cache, weight, lengths, pad_key, block_table)
    if explain(q_window, k_cache, v_cache, weight, backend=backend).backend == "reference":
        if splits != "auto":
            raise ValueError(f"splits is {splits!r}; the reference backend does not split the keys: leave it at 'auto'")
        return conv_attention_decode_reference(
            q_window,
            k_cache,
            v_cache,
            weight,
            lengths=lengths,
            scale=scale,
            pad_key=pad_key,
            block_table=block_table,
        )
    from mta_kernels.conv_attention.triton.decode import conv_attention_decode_triton

    return conv_attention_decode_triton(
        q_window,
        k_cache,
        v_cache,
        weight,
        lengths=lengths,
        scale=scale,
        pad_key=pad_key,
        splits=splits,
        block_table=block_table,
    )


def identity_weight(
    heads: int,
    query_taps: int,
    key_taps: int,
    *,
    pad_key: str = "both",
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
) -> Tensor:
    """`[heads, query_taps, key_taps]`: the convolution that changes nothing, so that plain attention remains."""
    weight = torch.zeros(heads, query_taps, key_taps, dtype=dtype, device=device)
    weight[:, query_taps - 1, key_padding(key_taps, pad_key)] = 1
    return weight


class ConvAttention(nn.Module):
    """`conv_attention` with its weight as a parameter `[heads, query_taps, key_taps]`, the identity at first.

    Takes `q [B, heads, N, D]`, `k, v [B, Hkv, N, D]`; options as those of `conv_attention`.
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
        backend: str = "auto",
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self.causal, self.scale, self.pad_key, self.backend = causal, scale, pad_key, backend
        self.weight = nn.Parameter(
            identity_weight(heads, query_taps, key_taps, pad_key=pad_key, dtype=dtype, device=device)
        )

    def reset_parameters(self) -> None:
        """Make the convolution the identity again: plain attention."""
        with torch.no_grad():
            self.weight.copy_(identity_weight(*self.weight.shape, pad_key=self.pad_key))

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """`[B, heads, N, D]`, as `conv_attention`."""
        return conv_attention(
            q,
            k,
            v,
            self.weight,
            causal=self.causal,
            scale=self.scale,
            pad_key=self.pad_key,
            backend=self.backend,
        )

    def extra_repr(self) -> str:
        heads, query_taps, key_taps = self.weight.shape
        return (
            f"{heads}, {query_taps}, {key_taps}, causal={self.causal}, scale={self.scale}, "
            f"pad_key={self.pad_key!r}, backend={self.backend!r}"
        )
