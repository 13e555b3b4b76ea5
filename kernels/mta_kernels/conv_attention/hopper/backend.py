"""The Hopper backend: forward and backward for H100, H200 and GH200; what it runs, and its kernels."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mta_kernels.conv_attention.backend import Backend, Gradients, Request
from mta_kernels.conv_attention.hopper import backward, forward
from mta_kernels.conv_attention.hopper.forward import shape_unsupported
from mta_kernels.conv_attention.surroundings import on_device_of, without_autocast
from mta_kernels.gpu_limits import absent
from mta_kernels.nvrtc.compiler import missing_package
from mta_kernels.operation import Operation
from mta_kernels.torch_compile import asked_once


def why_not(request: Request) -> str | None:
    """Why the Hopper kernels cannot run a request on this machine, or None if they can."""
    conv = request.operation.conv
    return (
        absent(request.device)
        or platform_unsupported(request.device)
        or shape_unsupported(request.dtype, request.head_dim, conv.query_taps, conv.key_taps, request.gradients)
    )


@asked_once
def platform_unsupported(device: torch.device | str) -> str | None:
    """Why no Hopper kernel could run on this machine, or None."""
    device = torch.device(device)
    if device.type != "cuda":
        return f"Hopper kernels need an NVIDIA H100, H200 or GH200, not a {device.type} device"
    if torch.cuda.get_device_capability(device) != (9, 0):
        return f"{torch.cuda.get_device_name(device)} is no Hopper GPU (sm_90), whose instructions these kernels use"
    return missing_package()


def rank(request: Request) -> int | None:
    """Before Triton."""
    return None if request.decode is not None else 1


def _forward(
    operation: Operation, q: Tensor, k: Tensor, v: Tensor, weight: Tensor, *, head_chunk: int, spans: Tensor | None
) -> tuple[Tensor, Tensor]:
    # Its scratch is too small for head_chunk to matter.
    return forward.conv_attention_forward(operation, q, k, v, weight, spans=spans)


def _backward(
    operation: Operation, q: Tensor, k: Tensor, v: Tensor, weight: Tensor, out: Tensor, logsumexp: Tensor,
    grad_out: Tensor, *, head_chunk: int, spans: Tensor | None,
) -> Gradients:  # fmt: skip
    tensors = q, k, v, weight, out, logsumexp, grad_out
    with on_device_of(q), without_autocast(q):
        return backward.conv_attention_backward(operation, *tensors, head_chunk=head_chunk, spans=spans)


def _tiles(head_chunk: int) -> Any:
    from mta_kernels.conv_attention.context_parallel.fused import HopperTiles

    return HopperTiles(head_chunk)


HOPPER = Backend(
    "hopper", why_not, rank, _forward, _backward,
    replay=forward.launches_for, replay_backward=backward.launches_for, tiles=_tiles,
)  # fmt: skip
