"""Which backend a call takes: the one that it names, or the fastest that can run it."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from mta_kernels.backend_lookup import any_of, check_can_run
from mta_kernels.conv_attention import backends as conv_backends
from mta_kernels.conv_attention.arguments import (
    as_float,
    autocast_dtype,
    cast_unless_float32,
    check_are_tensors,
    check_asked,
    like_cast,
    wants_gradient,
)
from mta_kernels.conv_attention.choice import Choice
from mta_kernels.conv_attention.choice import explain as explain_conv_attention
from mta_kernels.multi_token_attention import backends
from mta_kernels.multi_token_attention.arguments import NormGate, check_dropout, check_mixers
from mta_kernels.multi_token_attention.backend import MtaBackend, Request
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
    kernels = backends.named(backend)
    if kernels is None:
        return None
    if decode and kernels.decode is None:
        return "it has no decode"
    caches = (torch.empty(1, 1, 1, head_dim, device="meta"),) * 3 if decode else None
    return kernels.why_not(Request(operation, device, dtype, head_dim, heads, backward, dropout, documents, caches))


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

    The reason names the CUDA kernels that run, of the backward too where a gradient may be asked for. No other argument
    changes the choice; autocast does, and whether a gradient may be asked for. Raises ValueError for an unknown
    backend, a named one that cannot run them, or shapes and devices that do not fit, and TypeError for dtypes that do
    not, or what is no tensor.
    """
    given = Mixers(pre_conv, pre_mix, post_conv, post_mix)
    check_are_tensors(q=q, k=k, v=v, **given._asdict(), cu_seqlens=cu_seqlens)
    given = Mixers(*map(cast_unless_float32, given))
    asked = like_cast(q)
    check_asked(asked, like_cast(k), like_cast(v), decode=decode)
    check_mixers(given, asked)
    dropout = as_float(dropout)
    check_dropout(dropout, None, q)
    operation = operation_of(given, q.shape[-1], causal=causal, scale=None, pad_key="both")
    if is_conv_attention(operation, dropout, backend):
        weight = conv_attention_weight(given, q)
        conv = explain_conv_attention(q, k, v, weight, causal=causal, backend=backend, decode=decode)
        return Choice(conv.backend, f"conv_attention computes this; {conv.reason}")
    request = Request(
        operation, q.device, autocast_dtype(q), q.shape[-1], q.shape[1],
        wants_gradient(q, k, v, *given), dropout, cu_seqlens is not None, (q, k, v) if decode else None,
    )  # fmt: skip
    if backend == "auto":
        kernels, reason = _fastest(request)
    else:
        kernels, reason = choose(backend, request), "asked for"
    if kernels is None:
        return Choice("reference", reason)
    if q.device.type == "cuda":
        tensors = asked, like_cast(k), like_cast(v)
        passes = zip(("with", "backward with"), _cuda_kernels(kernels, request, tensors, given), strict=False)
        reason = ", ".join([reason, *(f"{words} {_in_words(names)}" for words, names in passes if names)])
    return Choice(kernels.name, reason)


def _cuda_kernels(
    kernels: MtaBackend, request: Request, tensors: tuple[Tensor, ...], given: Mixers
) -> list[tuple[str, ...]]:
    """Those that a forward would launch, and a backward if gradients are wanted, or a decode step.

    A decode step is planned for a cache of contiguous keys that is full.
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
    """Whether `conv_attention` computes all of it, by a backend of this name."""
    has_backend = backend == "auto" or backend in conv_backends.BACKENDS
    return has_backend and not operation.is_more_than_conv_attention and not dropout


def conv_attention_weight(given: Mixers, q: Tensor) -> Tensor:
    """The weight that `conv_attention` takes: one tap of 1 where no convolution is given."""
    return q.new_ones(q.shape[1], 1, 1) if given.pre_conv is None else given.pre_conv


def check_backend(backend: str, operation: Operation, dropout: float) -> None:
    """Raise ValueError unless a backend of this name, or "auto", is for such an operation."""
    if is_conv_attention(operation, dropout, backend) or backend == "auto":
        return
    own, of_conv_attention = ([x.name for x in module.KERNELS] for module in (backends, conv_backends))
    if backend in of_conv_attention and backend not in own:
        steps = ("pre_mix", "post_conv", "post_mix")
        more = [name for name in steps if getattr(operation, name)] + ["dropout"] * bool(dropout)
        raise ValueError(
            f"backend {backend!r} runs conv_attention alone, which has no {' and no '.join(more)}; "
            f"expected {any_of(backends.KERNELS)}"
        )
    backends.named(backend)


def choose(backend: str, request: Request) -> MtaBackend | None:
    """The kernels that run a request, None for the reference; raises ValueError for a named backend that cannot.

    Warns where "auto" leaves a GPU to the reference.
    """
    if backend == "auto":
        kernels, reason = _fastest(request)
        if kernels is None and torch.device(request.device).type == "cuda" and not torch.compiler.is_compiling():
            slowly = "the eager reference computes this on a GPU, slowly and with memory for all scores"
            warnings.warn(f"{slowly}: {reason}", stacklevel=3)
        return kernels
    check_backend(backend, request.operation, request.dropout)
    kernels = backends.named(backend)
    if kernels is None:
        return None
    if request.decode is not None and kernels.decode is None:
        raise ValueError(f"backend {backend!r} has no decode; use 'auto', which picks one that has")
    check_can_run(kernels, request)
    return kernels


def _fastest(request: Request) -> tuple[MtaBackend | None, str]:
    """The fastest backend that can run a request, or else the reference; and why."""
    ranked: dict[int, MtaBackend] = {}  # the backends of a request have different ranks
    for kernels in backends.KERNELS:
        rank = kernels.rank(request) if request.decode is None or kernels.decode is not None else None
        if rank is not None:  # no `:=` in a comprehension, which torch.compile does not know
            ranked[rank] = kernels
    refused = []
    for rank in sorted(ranked):
        why_not = ranked[rank].why_not(request)
        if why_not is None:
            return ranked[rank], "the fastest backend for these arguments"
        refused.append(f"{ranked[rank].name} cannot run this: {why_not}")
    return None, "; ".join(refused) or "no kernels compute this yet"
