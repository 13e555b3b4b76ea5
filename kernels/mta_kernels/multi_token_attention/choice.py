"""Which backend a call takes: the one that it names, or the fastest that can run it."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from mta_kernels.backend import Backend, Choice, Request
from mta_kernels.conv_attention.arguments import (
    as_float,
    autocast_dtype,
    cast_unless_float32,
    check_are_tensors,
    check_explained,
    like_cast,
    wants_gradient,
)
from mta_kernels.conv_attention.backends import CONV_ATTENTION
from mta_kernels.conv_attention.choice import explain as explain_conv_attention
from mta_kernels.multi_token_attention.arguments import NormGate, check_dropout, check_mixers
from mta_kernels.multi_token_attention.backends import MULTI_TOKEN_ATTENTION
from mta_kernels.multi_token_attention.mixers import Mixers, operation_of, with_dense_mixings
from mta_kernels.operation import Operation


def unsupported(
    backend: str,
    *,
    operation: Operation,
    device: torch.device | str,
    dtype: torch.dtype,
    head_dim: int,
    heads: int,
    backward: bool = False,
    dropout: float = 0.0,
    documents: bool = False,
    decode: bool = False,
) -> str | None:
    """Why `backend` cannot run this operation of `heads` query heads on this machine, or None if it can.

    `device` is a torch device or its type, "cuda" or "cpu"; `backward` is whether gradients are wanted as well,
    `documents` whether some are packed into a row of tokens. With `decode` the answer is about a decode step on
    contiguous caches. Raises ValueError for an unknown backend.
    """
    request = Request(
        operation, device, dtype, head_dim, backward, heads=heads, dropout=dropout, documents=documents
    )  # fmt: skip
    return MULTI_TOKEN_ATTENTION.unsupported(backend, request, decode=decode)


def explain(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    pre_conv: Tensor | None = None,
    pre_mix: Tensor | None = None,
    post_conv: Tensor | None = None,
    post_mix: Tensor | None = None,
    dropout: float = 0.0,
    causal: bool = True,
    cu_seqlens: Tensor | None = None,
    backend: str = "auto",
    decode: bool = False,
) -> Choice:
    """Which backend `multi_token_attention`, or `multi_token_attention_decode`, takes for these arguments, and why.

    The reason names the CUDA kernels that run, and the backward's too if a tensor requires a gradient. Besides these
    arguments only autocast and `requires_grad` change the choice. Raises ValueError for an unknown backend, for a named
    one that cannot run them, and for shapes and devices that do not fit. Raises TypeError for wrong dtypes and for
    arguments that are no tensors.
    """
    given = Mixers(pre_conv, pre_mix, post_conv, post_mix)
    check_are_tensors(q=q, k=k, v=v, **given._asdict(), cu_seqlens=cu_seqlens)
    given = Mixers(*map(cast_unless_float32, given))
    query = like_cast(q)
    check_explained(query, like_cast(k), like_cast(v), decode=decode)
    check_mixers(given, query)
    dropout = as_float(dropout)
    check_dropout(dropout, None, q)
    operation = operation_of(given, q.shape[-1], causal=causal, scale=None, pad_key="both")
    if is_conv_attention(operation, dropout, backend):
        weight = conv_attention_weight(given, q)
        conv = explain_conv_attention(q, k, v, weight, causal=causal, backend=backend, decode=decode)
        return Choice(conv.backend, f"conv_attention computes this; {conv.reason}")
    check_backend(backend, operation, dropout)
    request = Request(
        operation, q.device, autocast_dtype(q), q.shape[-1], wants_gradient(q, k, v, *given),
        (q, k, v) if decode else None, heads=q.shape[1], dropout=dropout, documents=cu_seqlens is not None,
    )  # fmt: skip
    kernels, reason = MULTI_TOKEN_ATTENTION.choose(backend, request)
    if kernels is None:
        return Choice("reference", reason)
    if q.device.type == "cuda":
        tensors = query, like_cast(k), like_cast(v)
        passes = zip(("with", "backward with"), _cuda_kernels(kernels, request, tensors, given), strict=False)
        reason = ", ".join([reason, *(f"{words} {_in_words(names)}" for words, names in passes if names)])
    return Choice(kernels.name, reason)


def _cuda_kernels(
    kernels: Backend, request: Request, tensors: tuple[Tensor, ...], given: Mixers
) -> list[tuple[str, ...]]:
    """The CUDA kernels of a forward, and of a backward if a tensor requires a gradient, or of a decode step.

    The plan of a decode step is for a full cache of contiguous keys.
    """
    from mta_kernels.multi_token_attention.decode.state import DecodeState
    from mta_kernels.plan import gpu_like, plan

    q, k, v = (torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta") for x in tensors)
    mixers = with_dense_mixings(Mixers(*(None if x is None else x.detach().to("meta") for x in given)))
    call, (batch, heads, _, _) = (request.operation, q, k, v, mixers), q.shape
    launched = partial(plan, gpu_like(torch.device(request.device)))
    if request.decode is not None:
        assert kernels.decode is not None
        state, lengths = None, q.new_empty(batch, dtype=torch.int32)
        if given.post_conv is not None:
            taps = given.post_conv.shape[1]
            state = DecodeState.empty(batch, heads, taps, k.shape[2], dtype=q.dtype, device="meta")
        return [launched(kernels.decode, *call, NormGate(), lengths, state, None, "auto").names("cuda")]
    documents = q.new_empty(2, k.shape[2], dtype=torch.int32) if request.documents else None
    passes = [launched(kernels.forward, *call, documents=documents)]
    if request.gradients:
        logsumexp = q.new_empty(q.shape[:3], dtype=torch.float32)
        passes.append(launched(kernels.backward, *call, logsumexp, q, documents=documents))
    return [found.names("cuda") for found in passes]


def _in_words(names: Sequence[str]) -> str:
    *others, last = names
    return f"the CUDA kernels {', '.join(others)} and {last}" if others else f"the CUDA kernel {last}"


def is_conv_attention(operation: Operation, dropout: float, backend: str) -> bool:
    """Whether `conv_attention` computes the whole operation, by a backend of this name."""
    has_backend = backend == "auto" or backend in CONV_ATTENTION.names
    return has_backend and not operation.is_more_than_conv_attention and not dropout


def conv_attention_weight(given: Mixers, q: Tensor) -> Tensor:
    """The weight that `conv_attention` takes: one tap of 1 where no convolution is given."""
    return q.new_ones(q.shape[1], 1, 1) if given.pre_conv is None else given.pre_conv


def check_backend(backend: str, operation: Operation, dropout: float) -> None:
    """Raise ValueError unless a backend of this name, or "auto", supports the operation."""
    if is_conv_attention(operation, dropout, backend) or backend == "auto":
        return
    if backend in CONV_ATTENTION.names and backend not in MULTI_TOKEN_ATTENTION.names:
        steps = ("pre_mix", "post_conv", "post_mix")
        more = [name for name in steps if getattr(operation, name)] + ["dropout"] * bool(dropout)
        raise ValueError(
            f"backend {backend!r} runs conv_attention alone, which has no {' and no '.join(more)}; "
            f"expected {MULTI_TOKEN_ATTENTION.any_of()}"
        )
    MULTI_TOKEN_ATTENTION.named(backend)


def choose(backend: str, request: Request) -> Backend | None:
    """The kernels that run a request, None for the reference; raises ValueError for a named backend that cannot.

    Warns if "auto" takes the reference on a GPU.
    """
    check_backend(backend, request.operation, request.dropout)
    kernels, reason = MULTI_TOKEN_ATTENTION.choose(backend, request)
    on_gpu = torch.device(request.device).type == "cuda" and not torch.compiler.is_compiling()
    if kernels is None and backend == "auto" and on_gpu:
        slowly = "the eager reference computes this on a GPU, slowly and with memory for all scores"
        warnings.warn(f"{slowly}: {reason}", stacklevel=3)
    return kernels
