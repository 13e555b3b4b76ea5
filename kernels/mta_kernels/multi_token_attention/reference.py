"""The whole multi-token attention as it is defined, in eager PyTorch: readable, any device, any dtype.

Of heads g and h, rows i and keys j; every step but the first and the softmax may be left out:

1. `s_g[i, j] = scale * q_g[i] . k_g[j]`
2. `c_g = conv(mask0(s_g), pre_conv_g)`
3. `l_h = sum_g pre_mix[h, g] * c_g`
4. `p_h = softmax(l_h)` over the visible keys
5. `a_g = mask0(conv(p_g, post_conv_g))`
6. `b_h = sum_g a_g * post_mix[g, h]`
7. dropout of b, then `o_h = b_h @ v_h`
8. RMSNorm of each head's output
9. `o * sigmoid(linear(o))`

The convolution is `conv_attention_reference`'s; mask0 sets scores of keys after the query to zero. This is
arXiv 2504.00927 with the masks of its implementation. float64 is the oracle.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mta_kernels.conv_attention.arguments import as_float, as_int, check_are_tensors, documents_of, row_range
from mta_kernels.conv_attention.reference import convolve_scores, repeat_heads
from mta_kernels.multi_token_attention.arguments import NormGate, check_call
from mta_kernels.multi_token_attention.dropout import kept, seed_tensor
from mta_kernels.multi_token_attention.mixers import Mixers, operation_of, rows_needed_before, with_dense_mixings
from mta_kernels.operation import HeadMix, Operation


def multi_token_attention_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    pre_conv: Tensor | None = None,
    pre_mix: Tensor | None = None,
    post_conv: Tensor | None = None,
    post_mix: Tensor | None = None,
    norm_weight: Tensor | None = None,
    norm_eps: float = 1e-5,
    depth: int | None = None,
    gate_weight: Tensor | None = None,
    gate_bias: Tensor | None = None,
    dropout: float = 0.0,
    seed: int | Tensor | None = None,
    causal: bool = True,
    scale: float | None = None,
    pad_key: str = "both",
    q_history: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    rows: tuple[int, int] | None = None,
) -> Tensor:
    """The whole multi-token attention of `q [B, Hq, M, D]`, `k, v [B, Hkv, N, D]`: `[B, Hq, M, D]`.

    Arguments are as for `multi_token_attention`. Stores the `M x N` scores of all heads, several times; reads
    `cu_seqlens` on the host. `rows = (start, stop)` computes those rows of q alone and returns
    `[B, Hq, stop - start, D]`, so that long sequences can be checked a block of rows at a time. Differentiable in every
    floating-point tensor, in all ways. Raises ValueError or TypeError for arguments that do not fit.
    """
    given = Mixers(pre_conv, pre_mix, post_conv, post_mix)
    after = NormGate.of(norm_weight, norm_eps, depth, gate_weight, gate_bias)
    check_are_tensors(
        q=q, k=k, v=v, **given._asdict(), **after.tensors, q_history=q_history, cu_seqlens=cu_seqlens
    )  # fmt: skip
    dropout, seed = as_float(dropout), as_int(seed)
    extras: dict[str, Any] = {"dropout": dropout, "seed": seed, "q_history": q_history, "cu_seqlens": cu_seqlens}
    check_call(q, k, v, given, after, pad_key, **extras)
    if rows is not None and cu_seqlens is not None:
        raise ValueError("rows and cu_seqlens are both given; cut the document out to have some of its rows")
    operation = operation_of(given, q.shape[3], causal=causal, scale=scale, pad_key=pad_key)
    out = mixed_attention(operation, q, k, v, with_dense_mixings(given), **extras, rows=rows)
    return norm_and_gate(out, *after.steps)


def mixed_attention(
    operation: Operation, q: Tensor, k: Tensor, v: Tensor, mixers: Mixers, *, dropout: float = 0.0,
    seed: int | Tensor | None = None, q_history: Tensor | None = None, cu_seqlens: Tensor | None = None,
    rows: tuple[int, int] | None = None,
) -> Tensor:  # fmt: skip
    """Steps 1 to 7 for checked arguments, with dense mixings."""
    drop = (dropout, seed_tensor(seed, q.device)) if dropout else None
    if cu_seqlens is not None:
        parts = [
            _definition(
                operation, q[:, :, at], k[:, :, at], v[:, :, at], mixers, (0, at.stop - at.start), drop, at.start
            )
            for at in documents_of(cu_seqlens)
        ]
        return torch.cat(parts, dim=2)
    start, stop = row_range(rows, q.shape[2])
    before = min(rows_needed_before(mixers), k.shape[2] - q.shape[2])
    if q_history is not None and before:
        q = torch.cat([q_history[:, :, -before:], q], dim=2)
    return _definition(operation, q, k, v, mixers, (start + before, stop + before), drop)


def _definition(
    operation: Operation, q: Tensor, k: Tensor, v: Tensor, mixers: Mixers, rows: tuple[int, int],
    drop: tuple[float, Tensor] | None, first_position: int = 0,
) -> Tensor:  # fmt: skip
    """The `rows` of q, which holds the queries of the last positions of k and v.

    `drop` is the share of probabilities to drop, and its seed; for the seed, k begins at `first_position`.
    """
    batch, heads, query_rows, _ = q.shape
    start, stop = rows
    # Convolutions read earlier rows: the second one probabilities, the first one scores, from these rows on.
    first_probability = max(0, start - (operation.post_conv.query_taps - 1 if operation.post_conv else 0))
    first_score = max(0, first_probability - (operation.conv.query_taps - 1))
    keys, values = (repeat_heads(x, heads) for x in (k, v))
    position = torch.arange(first_score, stop, device=q.device) + (k.shape[2] - query_rows)
    future = torch.arange(k.shape[2], device=q.device) > position[:, None]  # the key comes after the query

    def hide(x: Tensor, by: float) -> Tensor:
        """x of the last rows, with `by` at the keys after the query."""
        return x.masked_fill(future[-x.shape[2] :], by) if operation.causal else x

    scores = q[:, :, first_score:stop] @ keys.transpose(-1, -2) * operation.scale
    scores = hide(scores, 0)
    if operation.pre_conv is not None and mixers.pre_conv is not None:
        scores = convolve_scores(scores, mixers.pre_conv, operation.pre_conv)
    scores = scores[:, :, first_probability - first_score :]
    if mixers.pre_mix is not None:
        scores = mix_heads(scores, mixers.pre_mix, operation.pre_mix)
    logits = hide(scores, float("-inf"))
    probabilities = torch.softmax(logits, dim=-1, dtype=_at_least_float32(q.dtype)).to(q.dtype)
    if operation.post_conv is not None and mixers.post_conv is not None:
        probabilities = hide(convolve_scores(probabilities, mixers.post_conv, operation.post_conv), 0)
    probabilities = probabilities[:, :, start - first_probability :]
    if mixers.post_mix is not None:
        probabilities = mix_heads(probabilities, mixers.post_mix.T, operation.post_mix)
    if drop is not None:
        dropout, seed = drop
        at = first_position + k.shape[2] - query_rows
        columns = first_position, first_position + k.shape[2]
        stays = kept(dropout, seed, batch, heads, (at + start, at + stop), columns)
        probabilities = (probabilities / (1 - dropout)).masked_fill(~stays, 0)
    return probabilities @ values


def mix_heads(x: Tensor, mix: Tensor, heads: HeadMix | None) -> Tensor:
    """`sum_g mix[h, g] x_g` of `x [B, H, M, N]` by the dense `mix [H, H]`, within each group of heads alone."""
    groups = heads.groups if heads else 1
    blocks = mix.to(x.dtype).unflatten(0, (groups, -1)).unflatten(2, (groups, -1)).diagonal(dim1=0, dim2=2)
    return torch.einsum("hgn,bngij->bnhij", blocks, x.unflatten(1, (groups, -1))).flatten(1, 2)


def norm_and_gate(
    out: Tensor, norm_weight: Tensor | None, norm_eps: float, factor: float, gate_weight: Tensor | None,
    gate_bias: Tensor | None,
) -> Tensor:  # fmt: skip
    """Steps 8 and 9 for `out [..., D]`, in its dtype; None leaves a step out.

    The RMSNorm is computed in float32 (float64 stays), and multiplied by `norm_weight [D]` and the number `factor`
    before it is rounded. The gate, `[1, D]` or `[D, D]` with a bias, multiplies the result.
    """
    if norm_weight is not None:
        wide = out.to(_at_least_float32(out.dtype))
        normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + norm_eps)
        out = (normed * (norm_weight.to(wide.dtype) * factor)).to(out.dtype)
    if gate_weight is not None:
        bias = None if gate_bias is None else gate_bias.to(out.dtype)
        out = out * torch.sigmoid(F.linear(out, gate_weight.to(out.dtype), bias))
    return out


def _at_least_float32(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)
