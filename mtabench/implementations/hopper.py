"""The CUDA kernels for Hopper GPUs: the convolution as banded products on the tensor cores."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

from mtabench.implementations import Implementation, Style
from mtabench.implementations._calls import backend_why_not, conv_attention_by
from mtabench.model import banded
from mtabench.model.devices import Device
from mtabench.model.fused import Tiles
from mtabench.model.kernel import Kernel
from mtabench.model.on_chip import FLOAT, STATISTICS, Tile
from mtabench.problem.case import Case
from mtabench.static.limits import Limits
from mtabench.static.shapes import Shape
from mtabench.static.sources import CudaKernel, Source, compiled, need_compiler


def kernels(case: Case, tiles: Tiles, device: Device) -> list[Kernel]:
    """The kernels of one call."""
    return (banded.forward if case.pass_ == "fwd" else banded.backward)(case, device.sm_count)


def never_on(case: Case, device: Device | None) -> str | None:
    """Why it cannot run a case on a device, as far as that is known without one, or None."""
    if device is not None and device.capability != (9, 0):
        return f"{device.name} is no Hopper GPU (sm_90), which is what hopper is for"
    if case.conv.query_taps > banded.MOST_TAPS[0] or case.conv.key_taps > banded.MOST_TAPS[1]:
        return "hopper takes up to {}x{} taps".format(*banded.MOST_TAPS)
    return None


def not_modelled(case: Case, device: Device | None) -> str | None:
    """Why the model says nothing of a cell, or None."""
    if case.pass_ == "bwd" and case.head_dim > banded.MOST_BACKWARD:
        return f"the backward of hopper above head dim {banded.MOST_BACKWARD}, that of cuda, is not modelled"
    return None


def tile(case: Case, device: Device) -> Tile | None:
    """Of a block and a slab of keys; None where there is no such kernel."""
    from mta_kernels.conv_attention.hopper import forward
    from mtabench.problem.inputs import DTYPES

    dtype = DTYPES[case.dtype]
    if device.capability != (9, 0) or forward.shape_unsupported(dtype, case.head_dim, *case.conv.taps):
        return None
    geometry = forward.ForwardConstants(dtype, case.head_dim, case.conv, case.operation.causal, False)
    rows, slab = geometry.warpgroups * forward.ROWS, forward.SLAB
    return {
        "queries": geometry.warpgroups * geometry.slabs * slab,
        "keys": geometry.slabs * slab,
        "values": -(-geometry.value_dim // forward.ROWS) * slab,
        "scores": rows * forward.ROWS * FLOAT,
        "statistics": STATISTICS * rows * FLOAT,
        "accumulator": rows * geometry.value_dim * FLOAT,
    }


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
        kernels=kernels, never_on=never_on, not_modelled=not_modelled,
        # Two kernels of a forward (host-time.csv). The backward was not measured: it is taken for little more.
        host_s={"fwd": 9e-6, "bwd": 10e-6}, tile=tile,
    ),
)  # fmt: skip
