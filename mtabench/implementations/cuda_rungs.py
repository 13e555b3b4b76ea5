"""The ladder's rungs in CUDA."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from mtabench.implementations import Style
from mtabench.implementations._calls import gpu_rung
from mtabench.problem.rungs import Rung
from mtabench.static.limits import Limits
from mtabench.static.shapes import Shape
from mtabench.static.sources import CudaKernel, Source, compiled, need_compiler

STEPS = ("scores", "softmax_rows", "weighted_sum")


def source(shape: Shape, limits: Limits) -> Iterator[CudaKernel]:
    """The kernels of all three. Raises SkippedError without a compiler."""
    import torch

    from mta_kernels.attention import cuda_flash, cuda_unfused
    from mta_kernels.attention.cuda_launch import source
    from mta_kernels.nvrtc.structures import ALL_ELEMENTS
    from mtabench.problem.inputs import DTYPES

    if not shape.by_name:
        return
    need_compiler()
    dtype = DTYPES[shape.dtype]
    for prefix in ("cuda_naive", "cuda_tiled"):
        code = compiled(source(f"{prefix}.cu", limits.target, (("ELEMENT", ALL_ELEMENTS[dtype]),)))
        for name in STEPS:
            yield CudaKernel(name, code, cuda_unfused.THREADS // 32, 0, f"{prefix}_{name}")
    if dtype != torch.float32 and shape.head_dim % 8 == 0:
        geometry = cuda_flash.Geometry(dtype, shape.head_dim, shape.head_dim)
        code = compiled(source("cuda_flash.cu", limits.target, geometry.constants))
        yield CudaKernel("cuda_flash", code, geometry.threads // 32, geometry.shared_memory)


KERNELS = (*(f"cuda_{name}_{step}" for name in ("naive", "tiled") for step in STEPS), "cuda_flash")

_rung = partial(gpu_rung, sources=(Source("cuda_attention", source, KERNELS, order=80),))

ENTRIES = (
    _rung(
        order=130, name="cuda-naive", work="dense",
        summary="plain attention: three CUDA kernels, a thread an element; stores the N x N scores",
        style=Style("#117733", "#3CC46B", "o", (0, (1.2, 1.2)), alone=True),
        flops=1e12,  # a guess, as the others
        stores=Rung(score_bytes=4, passes=6),
    ),
    _rung(
        order=140, name="cuda-tiled", work="tiled",
        summary="plain attention: the same by tiles in shared memory; stores the N x N scores",
        style=Style("#117733", "#3CC46B", "s", (0, (4, 1.6)), alone=True), flops=1e13,
        stores=Rung(score_bytes=4, passes=6, columns=64, causal_skips=True),
    ),
    _rung(
        order=150, name="cuda-flash", work="tiled",
        summary="plain attention: one fused CUDA kernel, tensor cores, online softmax",
        style=Style("#117733", "#3CC46B", "^", "-", alone=True),
        stores=Rung(),
    ),
)  # fmt: skip
