"""What `mtabench inspect` compiles: the kernels in the plans of these calls."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from mtabench.static.compiling import Source
from mtabench.static.limits import Limits
from mtabench.static.shapes import Shape

if TYPE_CHECKING:
    from torch import Tensor

    from mta_kernels.plan import KernelCall, Plan, PlannedGpu

Plans = Callable[[Shape, "PlannedGpu"], Iterator["Plan"]]
REFUSALS = ("cannot run this", "has no decode")  # of a backend that is named
TOKENS = (1024, 4096)  # of the whole operation: rows of few keys and of many, and more than one chunk
# The layers of a model: heads mixed alone, all steps, and each convolution without the other.
LAYERS = (
    ("pre_mix", "post_mix"),
    ("pre_conv", "pre_mix", "post_conv", "post_mix"),
    ("pre_conv", "pre_mix"),
    ("pre_mix", "post_conv", "post_mix"),
)


def launches(plans: Plans, shape: Shape, limits: Limits) -> Iterator[KernelCall]:
    """What some calls launch on a GPU of these limits."""
    for plan in plans(shape, limits.planned):
        yield from plan.calls


def conv_attention(shape: Shape, gpu: PlannedGpu) -> Iterator[Plan]:
    """Forward and backward by each backend that runs there."""
    from mta_kernels.conv_attention import BACKENDS, conv_attention

    bounds = {"cu_seqlens": _tensor(3, dtype="int32")} if shape.packed else {}
    for backend in (name for name in BACKENDS if name != "reference"):
        for backward in (False, True):
            inputs, options = _inputs(shape, backward), {"causal": shape.causal, "backend": backend, **bounds}
            yield from _plans(gpu, conv_attention, *inputs, **options, backward=backward)


def conv_attention_decode(shape: Shape, gpu: PlannedGpu) -> Iterator[Plan]:
    """A step by each backend that runs there: of one sequence, and of many, whose programs share fewer keys."""
    from mta_kernels.conv_attention import BACKENDS, conv_attention_decode

    weight = _tensor(shape.heads, *shape.conv, dtype=shape.dtype)
    for backend in (name for name in BACKENDS if name != "reference"):
        for batch in (1, 64):
            q, cache, options = _cache(shape, batch)
            yield from _plans(gpu, conv_attention_decode, q, cache, cache, weight, backend=backend, **options)


def multi_token_attention(shape: Shape, gpu: PlannedGpu) -> Iterator[Plan]:
    """Forward and backward of each layer, with and without kernels in CUDA C++."""
    from mta_kernels.multi_token_attention import multi_token_attention

    bounds = {"cu_seqlens": _tensor(3, dtype="int32")} if shape.packed else {}
    options = {"causal": shape.causal, "backend": "triton", **bounds}
    for tokens, layer in itertools.product(TOKENS, LAYERS):
        for on, backward in itertools.product((gpu, replace(gpu, has_nvrtc=False)), (False, True)):
            *qkv, _ = _inputs(replace(shape, seq=tokens), backward)
            yield from _plans(on, multi_token_attention, *qkv, **_mixers(shape, layer), **options, backward=backward)


def multi_token_attention_decode(shape: Shape, gpu: PlannedGpu) -> Iterator[Plan]:
    """A step of a layer that mixes heads alone and of one with all steps, with and without kernels in CUDA C++."""
    from mta_kernels.multi_token_attention import DecodeState, multi_token_attention_decode

    for layer, on in itertools.product(LAYERS[:2], (gpu, replace(gpu, has_nvrtc=False))):
        q, cache, options = _cache(shape, 1)
        if "post_conv" in layer:
            rows = 1, shape.heads, shape.conv[0]
            logits, logsumexp = _tensor(*rows, shape.seq, dtype=shape.dtype), _tensor(*rows, dtype="fp32")
            options["state"] = DecodeState(logits, logsumexp, options["lengths"])
        options |= {"norm_weight": _tensor(shape.head_dim, dtype=shape.dtype), "backend": "triton"}
        yield from _plans(on, multi_token_attention_decode, q, cache, cache, **_mixers(shape, layer), **options)


def norm_and_gate(shape: Shape, gpu: PlannedGpu) -> Iterator[Plan]:
    """Norm and gate behind a layer: a gate a row, and a gate a number."""
    from mta_kernels.multi_token_attention import multi_token_attention

    options = {"causal": shape.causal, "backend": "triton", **_mixers(shape, LAYERS[0])}
    for numbers, backward in itertools.product((1, shape.head_dim), (False, True)):
        *qkv, _ = _inputs(replace(shape, seq=TOKENS[0]), backward)
        sizes = {"norm_weight": (shape.head_dim,), "gate_weight": (numbers, shape.head_dim), "gate_bias": (numbers,)}
        after = {name: _tensor(*size, dtype="fp32").requires_grad_(backward) for name, size in sizes.items()}
        yield from _plans(gpu, multi_token_attention, *qkv, **options, **after, backward=backward)


def ladder(shape: Shape, gpu: PlannedGpu) -> Iterator[Plan]:
    """The rungs of plain attention in Triton and in CUDA, and the published approach to conv attention."""
    from mta_ladder import RUNGS, attention, cuda_conv

    if not shape.by_name:
        return
    *qkv, weight = _inputs(shape, False)
    for rung in (name for name in RUNGS if name.startswith(("triton-", "cuda-"))):
        yield from _plans(gpu, attention, *qkv, causal=shape.causal, rung=rung)
    for backward in (False, True):
        inputs = _inputs(shape, backward)
        yield from _plans(gpu, cuda_conv.conv_attention, *inputs, causal=shape.causal, backward=backward)
    q, cache, options = _cache(shape, 1)
    yield from _plans(gpu, cuda_conv.conv_attention_decode, q, cache, cache, weight, **options)


def _plans(gpu: PlannedGpu, call: Callable[..., Any], *args: Any, **options: Any) -> Iterator[Plan]:
    """The plan of a call, none if its backend refuses it."""
    from mta_kernels.plan import plan

    try:
        yield plan(gpu, call, *args, **options)
    except ValueError as error:
        if not any(words in str(error) for words in REFUSALS):
            raise


def _inputs(shape: Shape, backward: bool) -> list[Tensor]:
    """q, k, v and weight, without memory."""
    sizes = [(1, heads, shape.seq, shape.head_dim) for heads in (shape.heads, shape.kv_heads, shape.kv_heads)]
    found = (_tensor(*size, dtype=shape.dtype) for size in (*sizes, (shape.heads, *shape.conv)))
    return [x.requires_grad_(backward) for x in found]


def _cache(shape: Shape, batch: int) -> tuple[Tensor, Tensor, dict[str, Any]]:
    """The window of queries and a cache of keys, or of values, without memory; lengths and table of a step."""
    q = _tensor(batch, shape.heads, shape.conv[0], shape.head_dim, dtype=shape.dtype)
    options: dict[str, Any] = {"lengths": _tensor(batch, dtype="int32")}
    if not shape.page_size:
        return q, _tensor(batch, shape.kv_heads, shape.seq, shape.head_dim, dtype=shape.dtype), options
    pages = -(-shape.seq // shape.page_size)
    options["block_table"] = _tensor(batch, pages, dtype="int32")
    return q, _tensor(batch * pages, shape.kv_heads, shape.page_size, shape.head_dim, dtype=shape.dtype), options


def _mixers(shape: Shape, layer: tuple[str, ...]) -> dict[str, Tensor]:
    sizes = {"conv": shape.conv, "mix": (shape.heads,)}
    return {name: _tensor(shape.heads, *sizes[name.rpartition("_")[2]], dtype=shape.dtype) for name in layer}


def _tensor(*sizes: int, dtype: str) -> Tensor:
    import torch

    from mtabench.problem.inputs import DTYPES

    return torch.empty(sizes, dtype=torch.int32 if dtype == "int32" else DTYPES[dtype], device="meta")


CALLS: tuple[Plans, ...] = (
    conv_attention, conv_attention_decode, multi_token_attention, multi_token_attention_decode, norm_and_gate, ladder,
)  # fmt: skip
SOURCES = tuple(Source(plans.__name__, partial(launches, plans)) for plans in CALLS)
