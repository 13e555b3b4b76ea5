"""The Hopper backend: forward and backward for H100, H200 and GH200; what it runs, and its kernels."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from mta_kernels.backend import Backend, Gradients, Request
from mta_kernels.conv_attention.cuda_sm80 import backward as cuda_backward
from mta_kernels.conv_attention.hopper import backward, forward
from mta_kernels.conv_attention.hopper.forward import MAX_BACKWARD_HEAD_DIM, shape_unsupported
from mta_kernels.gpu_limits import absent, cuda_capability, device_name
from mta_kernels.nvrtc.compiler import missing_package
from mta_kernels.operation import Operation
from mta_kernels.torch_compile import cached_constant


def why_not(request: Request) -> str | None:
    """Why the Hopper kernels cannot run a request on this machine, or None if they can."""
    return (
        absent(request.device)
        or platform_unsupported(request.device)
        or shape_unsupported(request.dtype, request.head_dim, *request.operation.conv.taps)
    )


@cached_constant
def platform_unsupported(device: torch.device | str) -> str | None:
    """Why no Hopper kernel could run on this machine, or None."""
    device = torch.device(device)
    if device.type != "cuda":
        return f"Hopper kernels need an NVIDIA H100, H200 or GH200, not a {device.type} device"
    if cuda_capability(device) != (9, 0):
        return f"{device_name(device)} is no Hopper GPU (sm_90), whose instructions these kernels use"
    return missing_package(device)


def rank(request: Request) -> int | None:
    """Before Triton."""
    return None if request.decode is not None else 1


# Above its own head dims the backward is cuda's, which rounds scores and marks rows as this forward does.


def _backward(operation: Operation, q: Tensor, *tensors: Tensor, **options: Any) -> Gradients:
    of = backward if q.shape[3] <= MAX_BACKWARD_HEAD_DIM else cuda_backward
    return of.conv_attention_backward(operation, q, *tensors, **options)


def _replay_backward(operation: Operation, q: Tensor, *tensors: Any) -> Callable[..., Gradients]:
    if q.shape[3] > MAX_BACKWARD_HEAD_DIM:
        return partial(cuda_backward.conv_attention_backward, operation)
    return backward.BackwardLaunches.of(operation, q, *tensors).gradients


HOPPER = Backend(
    "hopper", why_not, rank, forward.conv_attention_forward, _backward,
    replay=forward.ForwardLaunches.of, replay_backward=_replay_backward,
)  # fmt: skip
