"""The CUDA kernels for Hopper GPUs: the convolution as banded products on the tensor cores."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

from mtabench.implementations import Implementation, Style
from mtabench.implementations._calls import backend_why_not, conv_attention_by
from mtabench.static.limits import Limits
from mtabench.static.shapes import Shape
from mtabench.static.sources import CudaKernel, Source, compiled, need_compiler


def source(shape: Shape, limits: Limits) -> Iterator[CudaKernel]:
    """All kernels, by the compiler that a call takes. Raises SkippedError without it."""
    from mta_kernels.conv_attention.hopper import backward, forward
    from mta_kernels.conv_attention.hopper.prepare import PrepareConstants
    from mtabench.problem.inputs import DTYPES

    dtype = DTYPES[shape.dtype]
    if limits.capability != (9, 0) or forward.shape_unsupported(dtype, shape.head_dim, *shape.conv):
        return
    need_compiler()
    shape_of = (dtype, shape.head_dim, shape.operation.conv)
    launched: list[Any] = [PrepareConstants(*shape_of)]
    launched.append(forward.ForwardConstants(*shape_of, shape.causal, shape.packed))
    if shape.head_dim <= forward.MAX_BACKWARD_HEAD_DIM:
        launched.append(backward.BackwardConstants(*shape_of, shape.causal, shape.packed))
        launched.append(launched[-1].exact)
    for name, constants in zip(("prepare", "forward", "backward", "backward_exact"), launched, strict=False):
        code = compiled(constants.source)
        shared = constants.shared_memory
        yield CudaKernel(constants.kernel_name, code, constants.threads // 32, shared, f"hopper_{name}")


KERNELS = ("hopper_prepare", "hopper_forward", "hopper_backward", "hopper_backward_exact")

ENTRIES = (
    Implementation(
        order=40, name="hopper", op="conv-attention", passes=("fwd", "bwd"), devices=("cuda",), work="banded",
        summary="fused CUDA kernels for H100 and H200, the convolution as banded products on the tensor cores",
        note="above head dim 128 with the backward of cuda",
        build=partial(conv_attention_by, "hopper"), why_not=partial(backend_why_not, "hopper"),
        ranks_backend="hopper",
        style=Style("#0072B2", "#4FA3FF", "X", "-"), compiles=True,
        sources=(Source("hopper", source, KERNELS, order=40),),
        planned=True,
    ),
)  # fmt: skip
