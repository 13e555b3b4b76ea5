"""The CUDA forward, backward and decode, for every NVIDIA GPU from sm_80 on."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from mtabench.implementations import Implementation, Style
from mtabench.implementations._calls import backend_why_not, conv_attention_by
from mtabench.problem.case import Case
from mtabench.static.limits import Limits
from mtabench.static.shapes import Shape
from mtabench.static.sources import CudaKernel, Source, compiled, need_compiler


def splits_used(case: Case) -> int:
    """The programs that share the keys of a KV head in this decode step, rounded up."""
    import torch

    from mta_kernels.conv_attention.cuda_decode.decode import choose_splits
    from mtabench.problem.inputs import DTYPES

    if isinstance(case.splits, int):
        return case.splits
    return choose_splits(
        case.batch, case.heads, case.kv_heads, case.capacity, DTYPES[case.dtype], case.head_dim,
        case.conv.taps, torch.device(case.device), page_size=case.page_size,
    )  # fmt: skip


def forward_source(shape: Shape, limits: Limits) -> Iterator[CudaKernel]:
    """The forward. Raises SkippedError without a compiler."""
    from mta_kernels.conv_attention.cuda_sm80.forward import ForwardConstants, shape_unsupported
    from mtabench.problem.inputs import DTYPES

    dtype = DTYPES[shape.dtype]
    if shape_unsupported(dtype, shape.head_dim, *shape.conv):
        return
    need_compiler()
    constants = ForwardConstants(
        dtype, shape.head_dim, shape.operation.conv, shape.causal, shape.packed, limits.shared_per_block
    )
    code = compiled(constants.source(limits.target))
    yield CudaKernel("cuda_forward", code, constants.warps, constants.shared_memory)


def backward_source(shape: Shape, limits: Limits) -> Iterator[CudaKernel]:
    """The backward's three kernels. Raises SkippedError without a compiler."""
    from mta_kernels.conv_attention.cuda_sm80 import backward
    from mta_kernels.conv_attention.cuda_sm80.backward_constants import constants_for
    from mta_kernels.conv_attention.cuda_sm80.forward import shape_unsupported
    from mtabench.problem.inputs import DTYPES

    dtype = DTYPES[shape.dtype]
    if shape_unsupported(dtype, shape.head_dim, *shape.conv):
        return
    constants = constants_for(
        dtype, shape.head_dim, shape.operation.conv, shape.causal, shape.packed, limits.shared_per_block
    )
    if constants is None:
        return
    need_compiler()
    exact = constants.exact(limits.target)
    prepare = compiled(constants.prepare_source(limits.target))
    yield CudaKernel(backward.PREPARE_NAME, prepare, backward.PREPARE_THREADS // 32, backward.PREPARE_BYTES)
    rows_and_products = compiled(constants.source(limits.target))
    yield CudaKernel(constants.kernel_name, rows_and_products, constants.warps, constants.shared_memory)
    code = compiled(exact.source)
    yield CudaKernel(exact.kernel_name, code, exact.threads // 32, exact.shared_memory, "cuda_backward_exact")


def decode_source(shape: Shape, limits: Limits) -> Iterator[CudaKernel]:
    """The decode. Raises SkippedError without a compiler."""
    from mta_kernels.conv_attention.cuda_decode.decode import shape_unsupported
    from mta_kernels.conv_attention.cuda_decode.hopper_plan import KEYS, hopper_plan_on
    from mta_kernels.conv_attention.cuda_decode.plan import MERGE_BYTES, MERGE_THREADS, plan_on
    from mtabench.problem.inputs import DTYPES

    dtype = DTYPES[shape.dtype]
    if shape_unsupported(dtype, shape.head_dim, *shape.conv):
        return
    need_compiler()
    wanted = (
        limits.shared_per_block, limits.sms, dtype, shape.head_dim, shape.operation.conv,
        shape.heads // shape.kv_heads, bool(shape.page_size),
    )  # fmt: skip
    of_hopper = limits.target == "sm_90" and (shape.page_size or 0) % KEYS == 0
    plan = (hopper_plan_on(*wanted) if of_hopper else None) or plan_on(*wanted, shape.head_dim % 8 == 0)
    constants = plan.constants
    code = compiled(constants.source(limits.target))
    yield CudaKernel("cuda_decode", code, constants.warps, constants.shared_memory)
    if not constants.last_adds_up:
        merge = compiled(constants.source(limits.target, "merge"))
        yield CudaKernel("cuda_decode_merge", merge, MERGE_THREADS // 32, MERGE_BYTES, "cuda_decode_merge")


BACKWARD_KERNELS = ("cuda_backward_prepare", "cuda_backward", "cuda_backward_exact")

ENTRIES = (
    Implementation(
        order=50, name="cuda", op="conv-attention", passes=("fwd", "bwd", "decode"), devices=("cuda",), work="banded",
        summary="fused CUDA kernels for every NVIDIA GPU from sm_80 on, the convolution as banded products on the "
        "tensor cores; in decode, the keys shared evenly by all programs",
        build=partial(conv_attention_by, "cuda"), why_not=partial(backend_why_not, "cuda"), splits_used=splits_used,
        pages=True,
        style=Style("#00796B", "#2BC4B0", "p", "-"),
        compiles=True, planned=True,
        sources=(
            Source("cuda_forward", forward_source, ("cuda_forward",), order=45),
            Source("cuda_backward", backward_source, BACKWARD_KERNELS, order=46),
            Source("cuda_decode", decode_source, ("cuda_decode", "cuda_decode_merge"), order=50),
        ),
    ),
)  # fmt: skip
