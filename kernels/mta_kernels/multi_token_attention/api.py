"""The public interface of the whole multi-token attention: one function."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from mta_kernels.backend import Backend, Request
from mta_kernels.call_memory import CallMemory
from mta_kernels.conv_attention import conv_attention
from mta_kernels.conv_attention.arguments import (
    as_float,
    as_int,
    autocast_dtype,
    cast_unless_float32,
    check_are_tensors,
    under_autocast,
    wants_gradient,
)
from mta_kernels.multi_token_attention import reference
from mta_kernels.multi_token_attention.arguments import NormGate, check_call
from mta_kernels.multi_token_attention.choice import choose, conv_attention_weight, is_conv_attention
from mta_kernels.multi_token_attention.mixers import Mixers, operation_of, with_dense_mixings
from mta_kernels.multi_token_attention.norm_gate import norm_and_gate
from mta_kernels.multi_token_attention.operators import multi_token_attention_op
from mta_kernels.operation import Operation

_checked: CallMemory[tuple[Operation, Backend]] = CallMemory()


def multi_token_attention(
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
    backend: str = "auto",
) -> Tensor:
    """The whole Multi-Token Attention (arXiv 2504.00927); each part is optional.

    `q [B, Hq, M, D]`, `k, v [B, Hkv, N, D]` with `Hq` a multiple of `Hkv` and `M <= N`; returns `[B, Hq, M, D]`. All
    other tensors are in q's dtype or float32. The parts, in the order in which they are applied:

    - `pre_conv [Hq, cq, ck]` convolves each head's scores, as `conv_attention` does; `pad_key` places the key taps
      ("both", "left" or "right") of both convolutions.
    - `pre_mix` mixes the scores of heads: `[Hq, Hq]`, (out, in) as the weight of a `torch.nn.Linear`, or groups of
      heads `[G, c, c]`, each (out, in), `G * c = Hq`. The softmax follows; `causal` hides later keys from it.
    - `post_conv [Hq, cq2, ck2]` convolves each head's probabilities.
    - `post_mix` mixes the probabilities of heads: `[Hq, Hq]` or `[G, c, c]`, but (in, out), the paper's order.
    - `dropout` drops that share of the mixed probabilities and scales the others. `seed`, a whole number or a 0-d int64
      tensor on q's device, makes it repeatable on every device; without one PyTorch's generator draws it.
    - `norm_weight [D]` is the weight of an RMSNorm of each head's output, with `norm_eps`. `depth`, the layer's index
      from 0, multiplies it by `1 - (0.8 - 0.6 exp(-0.3 depth))`.
    - `gate_weight [1, D]` or `[D, D]`, with `gate_bias [1]` or `[D]`, multiplies by `sigmoid(linear(out))`.

    With `M < N` (a chunk of a prompt) q holds the last `M` positions, and `q_history [B, Hq, H, D]` the queries just
    before them, oldest first, `H >= min((cq - 1) + (cq2 - 1), N - M)`; more are ignored. `cu_seqlens [S + 1]` packs S
    documents into one row of tokens, as in `conv_attention`: no part crosses a bound.

    `scale` is the factor on `q . k`, `1 / sqrt(D)` unless given. `backend` is "auto" (`explain` names its choice),
    "reference", which runs everything everywhere, or one of `BACKENDS`; a named one never falls back. Where the call is
    plain `conv_attention`, that function runs, and its backends may be named. Under autocast q, k and v are cast to its
    dtype, and so are the other tensors unless they are float32; float64 stays as it is.

    Differentiable in every floating-point tensor: kernels once, by a backward; the reference in all ways. A row depends
    on no later token and on no other document, for every finite input. NaN or infinity in v may reach earlier rows.
    Raises ValueError or TypeError, in one sentence, for arguments that do not fit or a backend that cannot run, and
    RuntimeError for a derivative that the backend does not have.
    """
    given = Mixers(pre_conv, pre_mix, post_conv, post_mix)
    dropout = as_float(dropout)
    after = NormGate.of(norm_weight, norm_eps, depth, gate_weight, gate_bias)
    check_are_tensors(
        q=q, k=k, v=v, **given._asdict(), **after.tensors, q_history=q_history, cu_seqlens=cu_seqlens
    )  # fmt: skip
    if under_autocast(q):
        q, k, v = (x.to(autocast_dtype(x)) for x in (q, k, v))
        q_history = None if q_history is None else q_history.to(autocast_dtype(q_history))
        given = Mixers(*map(cast_unless_float32, given))
        after = NormGate(*map(cast_unless_float32, after))
    optional = *given, *after.tensors.values()
    tensors = q, k, v, *(x for x in optional if x is not None)
    options = causal, scale, pad_key, after.norm_eps, after.depth, dropout, backend, *(x is None for x in optional)
    more: dict[str, Any] = {"q_history": q_history, "cu_seqlens": cu_seqlens}
    may_be_known = q_history is None and cu_seqlens is None and seed is None
    if may_be_known and (known := _checked.find(options, *tensors)) is not None:
        operation, kernels = known
        out = multi_token_attention_op(operation, q, k, v, with_dense_mixings(given), **more, backend=kernels)
        return norm_and_gate(out, *after.steps)
    seed = as_int(seed)
    check_call(q, k, v, given, after, pad_key, dropout=dropout, seed=seed, **more)
    operation = operation_of(given, q.shape[3], causal=causal, scale=scale, pad_key=pad_key)
    finish = reference.norm_and_gate if backend == "reference" else norm_and_gate
    if is_conv_attention(operation, dropout, backend):
        out = conv_attention(
            q, k, v, conv_attention_weight(given, q), **more, causal=causal, scale=scale, pad_key=pad_key,
            backend=backend,
        )  # fmt: skip
    else:
        gradients = wants_gradient(q, k, v, *given, q_history)
        request = Request(
            operation, q.device, q.dtype, q.shape[3], gradients, heads=q.shape[1], dropout=dropout,
            documents=cu_seqlens is not None,
        )  # fmt: skip
        chosen = choose(backend, request)
        mixers = with_dense_mixings(given)
        if chosen is None:
            out = reference.mixed_attention(operation, q, k, v, mixers, dropout=dropout, seed=seed, **more)
            finish = reference.norm_and_gate
        else:
            if may_be_known:
                _checked.keep(options, (operation, chosen), *tensors)
            out = multi_token_attention_op(operation, q, k, v, mixers, **more, backend=chosen)
    return finish(out, *after.steps)
