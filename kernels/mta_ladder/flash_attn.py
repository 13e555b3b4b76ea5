"""Top rungs `flash-attn`, `flash-attn-3`, `flash-attn-4`: the packages of FlashAttention's authors, if installed."""

from __future__ import annotations

import functools
import importlib
import importlib.util
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor


class Package(NamedTuple):
    """A package: the module that has its function, how to install it, the GPUs that it is for."""

    module: str
    install: str
    capabilities: tuple[tuple[int, int], tuple[int, int]]  # the first, and the first that is too new
    gpus: str
    head_dim: int = 256  # at most
    head_dim_hopper: int = 256


PACKAGES = {
    "flash-attn": Package(
        "flash_attn", "pip install flash-attn --no-build-isolation", ((8, 0), (100, 0)), "a GPU of sm_80 or later"
    ),
    "flash-attn-3": Package(
        "flash_attn_interface",
        "pip install --no-build-isolation 'git+https://github.com/Dao-AILab/flash-attention#subdirectory=hopper'",
        ((9, 0), (9, 1)),
        "an H100 or H200 (sm_90)",
    ),
    "flash-attn-4": Package(
        "flash_attn.cute",
        "pip install --pre flash-attn-4",
        ((9, 0), (100, 0)),
        "a GPU of sm_90 or later",
        head_dim=128,
    ),
}


def attention(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float, package: str) -> Tensor:
    """Attention of `q [B, Hq, M, D]`, `k [B, Hkv, N, D]`, `v [B, Hkv, N, D]`: `[B, Hq, M, D]` in q's dtype.

    Causal: the queries are the last M of N positions. Inputs whose head dim is not contiguous are copied. The output
    is a view of `[B, M, Hq, D]`. Differentiable.
    """
    function = _function(PACKAGES[package].module)
    out = function(*(x.transpose(1, 2) for x in (q, k, v)), softmax_scale=scale, causal=causal)
    return (out[0] if isinstance(out, tuple) else out).transpose(1, 2)  # some versions add the logsumexp


def unsupported(*, device: torch.device, dtype: torch.dtype, head_dim: int, package: str) -> str | None:
    """Why it cannot run, or None."""
    found = PACKAGES[package]
    if device.type != "cuda":
        return f"{package} needs a CUDA GPU"
    if not _installed(found.module):
        return f"{package} is not installed ({found.install})"
    if dtype not in (torch.float16, torch.bfloat16):
        return f"{package} takes fp16 and bf16 only"
    first, too_new = found.capabilities
    capability = torch.cuda.get_device_capability(device)
    if not first <= capability < too_new:
        return f"{package} needs {found.gpus}"
    most = found.head_dim_hopper if capability[0] == 9 else found.head_dim
    if head_dim % 8 or head_dim > most:
        return f"{package} takes head dims that are multiples of 8 up to {most} on this GPU, not {head_dim}"
    try:
        _function(found.module)
    except (ImportError, AttributeError, OSError) as error:  # compiled for another PyTorch, most often
        return f"{package} is installed and does not import: {' '.join(str(error).split())}"
    return None


def _installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # the package that the module lies in
        return False


@functools.cache
def _function(module: str) -> Callable[..., Tensor | tuple[Tensor, ...]]:
    return importlib.import_module(module).flash_attn_func
