"""The CUDA backend: forward and decode for any NVIDIA GPU from sm_80 on; what it runs, and its kernels."""

from __future__ import annotations

import torch

from mta_kernels.conv_attention.backend import Backend, Request
from mta_kernels.conv_attention.cuda_decode import decode
from mta_kernels.conv_attention.cuda_forward import forward
from mta_kernels.gpu_limits import absent
from mta_kernels.nvrtc.compiler import missing_package
from mta_kernels.torch_compile import asked_once


def why_not(request: Request) -> str | None:
    """Why the CUDA kernels cannot run a request on this machine, or None if they can."""
    shape = request.dtype, request.head_dim, *request.operation.conv.taps
    return (
        absent(request.device)
        or platform_unsupported(request.device)
        or (_forward_unsupported(request) if request.decode is None else decode.shape_unsupported(*shape))
    )


def _forward_unsupported(request: Request) -> str | None:
    if request.gradients:
        return "it has no backward, and a gradient may be asked for (torch.no_grad() rules that out)"
    return forward.shape_unsupported(request.dtype, request.head_dim, *request.operation.conv.taps)


@asked_once
def platform_unsupported(device: torch.device | str) -> str | None:
    """Why no kernel of this backend could run on this machine, or None."""
    device = torch.device(device)
    if device.type != "cuda":
        return f"the CUDA kernels need an NVIDIA GPU, not a {device.type} device"
    if torch.cuda.get_device_capability(device) < (8, 0):
        return f"{torch.cuda.get_device_name(device)} is older than sm_80"
    return missing_package()


def rank(request: Request) -> int | None:
    """Decode: before Triton where query heads share KV heads, or where the numbers of a key do not lie side by side.

    A forward is only for those who name this backend: it was not measured against Triton.
    """
    if request.decode is None or request.over_ranks:
        return None
    q, k, _ = request.decode
    return 1 if q.shape[1] != k.shape[1] or request.keys_lie_apart() else None


CUDA = Backend("cuda", why_not, rank, forward.conv_attention_forward, decode=decode.conv_attention_decode)
