"""The Hopper backend: forward and backward for H100, H200 and GH200; what it runs, and its kernels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from mta_kernels.conv_attention.backend import Backend, Gradients, Request
from mta_kernels.conv_attention.hopper import backward, forward
from mta_kernels.conv_attention.hopper.forward import shape_unsupported
from mta_kernels.gpu_limits import absent
from mta_kernels.nvrtc.compiler import missing_package
from mta_kernels.torch_compile import asked_once


def why_not(request: Request) -> str | None:
    """Why the Hopper kernels cannot run a request on this machine, or None if they can."""
    return (
        absent(request.device)
        or platform_unsupported(request.device)
        or shape_unsupported(request.dtype, request.head_dim, *request.operation.conv.taps, request.gradients)
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


def _replay_backward(*operation_and_tensors: Any) -> Callable[..., Gradients]:
    return backward.launches_for(*operation_and_tensors).gradients


def _tiles(head_chunk: int) -> Any:
    from mta_kernels.conv_attention.context_parallel.fused import HopperTiles

    return HopperTiles(head_chunk)


HOPPER = Backend(
    "hopper", why_not, rank, forward.conv_attention_forward, backward.conv_attention_backward,
    replay=forward.launches_for, replay_backward=_replay_backward, tiles=_tiles,
)  # fmt: skip
