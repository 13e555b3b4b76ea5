"""What is compiled: one literal table, and a function for each row that calls the host code of some kernels.

A function gets the shape and the limits of the target. Triton's kernels compile as the host code launches
them. A CUDA source is compiled by the function itself, which yields its kernels: see `hopper`.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mtabench.static.limits import Limits
from mtabench.static.shapes import Shape

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class Row:
    """Where the function that calls some host code is, "module:function", and which kernels it may launch."""

    place: str
    kernels: tuple[str, ...]


SOURCES: dict[str, Row] = {
    "forward": Row("mtabench.static.sources:forward", (
        "near_scores", "band", "prepare", "conv_attention_fwd", "pad_rows",
    )),
    "backward": Row("mtabench.static.sources:backward", (
        "output_gradient", "probabilities", "value_gradients", "transposed_product", "row_product", "overlap_add",
        "expand_transposed", "weight_gradient", "band_gradients", "band_transposed", "near_transposed",
        "band_weight_gradient",
    )),
    "decode": Row("mtabench.static.sources:decode", ("conv_attention_decode", "combine_splits")),
    "hopper": Row("mtabench.static.sources:hopper", (
        "hopper_prepare", "hopper_forward", "hopper_backward", "hopper_backward_exact",
    )),
    "cuda_decode": Row("mtabench.static.sources:cuda_decode", ("cuda_decode",)),
    "cuda_conv": Row("mtabench.static.sources:cuda_conv", (
        "cuda_conv_forward", "cuda_conv_backward_q", "cuda_conv_backward_kv", "cuda_conv_decode_split",
        "cuda_conv_decode_combine",
    )),
    "attention": Row("mtabench.static.sources:triton_rungs", (
        "attention_pointer", "attention_descriptor", "attention_fmha",
    )),
    "cuda_attention": Row("mtabench.static.sources:cuda_rungs", (
        "cuda_naive_scores", "cuda_naive_softmax_rows", "cuda_naive_weighted_sum", "cuda_tiled_scores",
        "cuda_tiled_softmax_rows", "cuda_tiled_weighted_sum", "cuda_flash",
    )),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class CudaCode:
    """A compiled CUDA source: its cubin, what `ptxas -v` said of it, and its compiler, such as ("nvcc", "13.0.88")."""

    cubin: bytes
    log: str
    compiler: tuple[str, str]


@dataclass(frozen=True, slots=True)
class CudaKernel:
    """A kernel of a CUDA source, by its name there, and the warps and bytes of dynamic shared memory of a block.

    `label` is what it is called in tables, where its name alone does not tell it from others.
    """

    name: str
    code: CudaCode
    warps: int
    dynamic_shared: int
    label: str = ""


class SkippedError(Exception):
    """A source that cannot be compiled on this machine; the text says why, and what to install."""


Source = Callable[[Shape, Limits], Iterable[CudaKernel] | None]


def resolve(place: str) -> Source:
    """The function at "module:function"."""
    module, _, name = place.partition(":")
    return getattr(importlib.import_module(module), name)


def forward(shape: Shape, limits: Limits) -> None:
    """The forward pass."""
    from mta_kernels.conv_attention.triton.forward import conv_attention_forward

    conv_attention_forward(*_inputs(shape), **_options(shape))


def backward(shape: Shape, limits: Limits) -> None:
    """The backward pass, which prepares again what the forward had prepared."""
    import torch

    from mta_kernels.conv_attention.triton.backward import conv_attention_backward
    from mtabench.static.absent_gpu import tensor

    q, k, v, weight = _inputs(shape)
    logsumexp = tensor(*q.shape[:3], dtype=torch.float32)
    conv_attention_backward(q, k, v, weight, q, logsumexp, q, **_options(shape))


def decode(shape: Shape, limits: Limits) -> None:
    """One decode step, with as many splits as a call takes on its own."""
    import torch

    from mta_kernels.conv_attention.triton.decode import conv_attention_decode_triton
    from mtabench.static.absent_gpu import tensor

    q, k, _, weight = _inputs(shape)
    table = None
    if shape.page_size:
        pages = -(-shape.seq // shape.page_size)
        k = tensor(pages, shape.kv_heads, shape.page_size, shape.head_dim, dtype=k.dtype)
        table = tensor(1, pages, dtype=torch.int32)
    conv_attention_decode_triton(
        q[:, :, : shape.conv[0]], k, k, weight, lengths=tensor(1, dtype=torch.int32), block_table=table
    )


def hopper(shape: Shape, limits: Limits) -> Iterator[CudaKernel]:
    """The CUDA kernels for Hopper, by the compiler that a call takes. Raises SkippedError without it."""
    from mta_kernels.conv_attention.arguments import key_padding
    from mta_kernels.conv_attention.hopper import backward, forward
    from mta_kernels.conv_attention.hopper import prepare as preparing
    from mta_kernels.cuda import compiler
    from mtabench.problem.inputs import DTYPES

    dtype = DTYPES[shape.dtype]
    if limits.capability != (9, 0) or forward.shape_unsupported(dtype, shape.head_dim, *shape.conv):
        return
    if reason := compiler.missing_package():
        raise SkippedError(reason)
    shape_of = (dtype, shape.head_dim, *shape.conv, key_padding(shape.conv[1], "both"))
    launched: list[Any] = [preparing.Prepared(*shape_of), forward.Geometry(*shape_of, shape.causal, shape.packed)]
    if shape.head_dim <= forward.MAX_BACKWARD_HEAD_DIM:
        launched.append(backward.Geometry(*shape_of, shape.causal, shape.packed))
        launched.append(backward.Exact(launched[0], shape.causal, shape.packed))
    for name, constants in zip(("prepare", "forward", "backward", "backward_exact"), launched, strict=False):
        code = _compiled(constants.source)
        yield CudaKernel(f"hopper_{name}", code, constants.threads // 32, constants.shared_memory)


def cuda_decode(shape: Shape, limits: Limits) -> Iterator[CudaKernel]:
    """Decode in CUDA. Raises SkippedError without a compiler."""
    from mta_kernels.conv_attention.arguments import key_padding
    from mta_kernels.conv_attention.cuda_decode.decode import shape_unsupported
    from mta_kernels.conv_attention.cuda_decode.geometry import plan_on
    from mta_kernels.cuda import compiler
    from mtabench.problem.inputs import DTYPES

    dtype, pad = DTYPES[shape.dtype], key_padding(shape.conv[1], "both")
    if shape_unsupported(dtype, shape.head_dim, *shape.conv):
        return
    if reason := compiler.missing_package():
        raise SkippedError(reason)
    geometry = plan_on(
        limits.shared_per_block, limits.sms, dtype, shape.head_dim, *shape.conv, pad, shape.heads // shape.kv_heads,
        bool(shape.page_size), shape.head_dim % 8 == 0,
    ).geometry  # fmt: skip
    yield CudaKernel("cuda_decode", _compiled(geometry.source(limits.target)), geometry.warps, geometry.shared_memory)


def cuda_conv(shape: Shape, limits: Limits) -> Iterator[CudaKernel]:
    """The published approach to conv attention. Raises SkippedError without a compiler."""
    from mta_kernels.conv_attention.cuda_conv import shape as shapes
    from mta_kernels.cuda import compiler
    from mtabench.problem.inputs import DTYPES

    dtype = DTYPES[shape.dtype]
    if not shape.by_name or shapes.shape_unsupported(dtype, shape.head_dim, *shape.conv):
        return
    if reason := compiler.missing_package():
        raise SkippedError(reason)
    geometry = shapes.Shape(dtype, shape.head_dim, *shape.conv)
    of_decode = ("conv_attention_decode_split", "conv_attention_decode_combine")
    for file, names in {
        "forward.cu": ("conv_attention_forward",),
        "backward_q.cu": ("conv_attention_backward_q",),
        "backward_kv.cu": ("conv_attention_backward_kv",),
        "decode.cu": of_decode,
    }.items():
        code = _compiled(geometry.source(file, limits.target))
        for name in names:
            label = name.replace("conv_attention", "cuda_conv")
            yield CudaKernel(name, code, shapes.THREADS // 32, geometry.shared_memory[file], label)


def triton_rungs(shape: Shape, limits: Limits) -> None:
    """The rungs of plain attention in Triton."""
    if not shape.by_name:
        return
    from mta_kernels.attention import triton_descriptor, triton_fmha, triton_pointer
    from mta_kernels.conv_attention.arguments import softmax_scale

    q, k, v, _ = _inputs(shape)
    for rung in (triton_pointer, triton_descriptor, triton_fmha):
        rung.attention(q, k, v, causal=shape.causal, scale=softmax_scale(None, shape.head_dim))


def cuda_rungs(shape: Shape, limits: Limits) -> Iterator[CudaKernel]:
    """The rungs of plain attention in CUDA. Raises SkippedError without a compiler."""
    import torch

    from mta_kernels.attention import cuda_flash, cuda_naive, cuda_tiled
    from mta_kernels.attention.cuda_launch import ELEMENTS, source
    from mta_kernels.cuda import compiler
    from mtabench.problem.inputs import DTYPES

    if not shape.by_name:
        return
    if reason := compiler.missing_package():
        raise SkippedError(reason)
    dtype = DTYPES[shape.dtype]
    for prefix, rung in (("cuda_naive", cuda_naive), ("cuda_tiled", cuda_tiled)):
        code = _compiled(source(f"{prefix}.cu", limits.target, (("ELEMENT", ELEMENTS[dtype]),)))
        for name in ("scores", "softmax_rows", "weighted_sum"):
            yield CudaKernel(name, code, rung.THREADS // 32, 0, f"{prefix}_{name}")
    if dtype != torch.float32 and shape.head_dim % 8 == 0:
        geometry = cuda_flash.Geometry(dtype, shape.head_dim, shape.head_dim)
        code = _compiled(source("cuda_flash.cu", limits.target, geometry.constants))
        yield CudaKernel("cuda_flash", code, geometry.threads // 32, geometry.shared_memory)


def _compiled(source: Any) -> CudaCode:
    """A `mta_kernels.cuda.compiler.Source` by the compiler that a call takes."""
    from mta_kernels.cuda import compiler

    return CudaCode(*compiler.compile_source(source), ("nvrtc", compiler.version()))


def _inputs(shape: Shape) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """q, k, v and weight."""
    from mtabench.problem.inputs import DTYPES
    from mtabench.static.absent_gpu import tensor

    dtype = DTYPES[shape.dtype]
    q = tensor(1, shape.heads, shape.seq, shape.head_dim, dtype=dtype)
    k = tensor(1, shape.kv_heads, shape.seq, shape.head_dim, dtype=dtype)
    return q, k, k, tensor(shape.heads, *shape.conv, dtype=dtype)


def _options(shape: Shape) -> Mapping[str, Any]:
    """What host code takes beside tensors."""
    import torch

    from mta_kernels.conv_attention.arguments import key_padding, softmax_scale
    from mtabench.static.absent_gpu import tensor

    spans = tensor(2, shape.seq, dtype=torch.int32) if shape.packed else None
    pad = key_padding(shape.conv[1], "both")
    return {"causal": shape.causal, "scale": softmax_scale(None, shape.head_dim), "pad": pad, "spans": spans}
