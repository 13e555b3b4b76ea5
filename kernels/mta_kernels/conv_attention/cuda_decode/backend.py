"""The CUDA backend: forward, backward and decode for any NVIDIA GPU from sm_80 on; what it runs, and its kernels."""

from __future__ import annotations

import torch

from mta_kernels.backend import Backend, Request
from mta_kernels.conv_attention.cuda_decode import decode
from mta_kernels.conv_attention.cuda_sm80 import backward, forward
from mta_kernels.conv_attention.cuda_sm80.backward import ON_EVERY_GPU, no_room
from mta_kernels.gpu_limits import absent, capability, cuda_capability, shared_memory_limit
from mta_kernels.nvrtc.compiler import missing_package
from mta_kernels.torch_compile import cached_constant, statically_true


def why_not(request: Request) -> str | None:
    """Why the CUDA kernels cannot run a request on this machine, or None if they can."""
    shape = request.dtype, request.head_dim, *request.operation.conv.taps
    return (
        absent(request.device)
        or platform_unsupported(request.device)
        or (_passes_unsupported(request) if request.decode is None else decode.shape_unsupported(*shape))
    )


def _passes_unsupported(request: Request) -> str | None:
    """Why the forward cannot run, or the backward if a tensor requires a gradient; None if they can."""
    taps = request.operation.conv.taps
    reason = forward.shape_unsupported(request.dtype, request.head_dim, *taps)
    if reason is None and request.gradients and request.head_dim > ON_EVERY_GPU:
        return _no_room_for_backward(request.device, request.head_dim, *taps)
    return reason


@cached_constant
def _no_room_for_backward(device: torch.device | str, head_dim: int, query_taps: int, key_taps: int) -> str | None:
    return no_room(head_dim, query_taps, key_taps, shared_memory_limit(torch.device(device)))


@cached_constant
def platform_unsupported(device: torch.device | str) -> str | None:
    """Why no kernel of this backend could run on this machine, or None."""
    device = torch.device(device)
    if device.type != "cuda":
        return f"the CUDA kernels need an NVIDIA GPU, not a {device.type} device"
    if cuda_capability(device) < (8, 0):
        return f"{torch.cuda.get_device_name(device)} is older than sm_80"
    return missing_package(device)


# A forward ranks before Triton's up to this share of its multiply-adds. At a share of 0.61 (head dim 64, 6 x 11 taps)
# it takes 0.56 to 1.12 of Triton's time on an H100 and an H200, where Triton has the faster products of Hopper. Both
# passes together have the same share, or up to 0.02 less.
MOST_MULTIPLY_ADDS = 0.65
# Above it, on Hopper GPUs, the forward alone takes 1.4 to 2.3 times Triton's time, and both passes 0.65 to 0.96.
# Triton's kernels compiled for sm_80 take longer than this forward, too (docs/design/cuda-forward.md).
MOST_HEAD_DIM = 128


def rank(request: Request) -> int | None:
    """Rank this backend before Triton where it is faster, after it elsewhere.

    Faster in decode: where query heads share KV heads, or where the numbers of a key are not contiguous.
    """
    if request.decode is None:
        return 2 if _pays(request) else 4
    q, k, _ = request.decode
    return 1 if q.shape[1] != k.shape[1] or request.has_strided_head_dim() else None


def _pays(request: Request) -> bool:
    """Whether it has so much less to multiply than Triton that it is faster."""
    taps = request.operation.conv.taps
    is_wide_forward = not request.gradients and not statically_true(request.head_dim <= MOST_HEAD_DIM)
    of_triton = (min(taps) + 1) * request.head_dim
    fewer = forward.multiply_adds(request.head_dim, *taps) <= MOST_MULTIPLY_ADDS * of_triton
    return statically_true(fewer) and _multiplies_alike(request.device, is_wide_forward)


@cached_constant
def _multiplies_alike(device: torch.device | str, is_wide_forward: bool) -> bool:
    """Whether Triton's products are this kernel's on a GPU, or measurements cover both: not on sm_100 to sm_110.

    On those Triton uses products of tensor memory, which were not measured against this kernel. On Hopper Triton's
    products make it the faster one in a forward of wide heads.
    """
    device = torch.device(device)
    alike = (8, 12) if is_wide_forward else (8, 9, 12)
    return device.type == "cuda" and absent(device) is None and capability(device)[0] in alike


CUDA = Backend(
    "cuda", why_not, rank, forward.conv_attention_forward, backward.conv_attention_backward,
    decode=decode.conv_attention_decode,
)  # fmt: skip
