"""Top rungs, `flash-attn` and `flash-attn-3`: the packages of FlashAttention's authors, where they are installed."""

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
    if importlib.util.find_spec(found.module) is None:
        return f"{package} is not installed ({found.install})"
    if device.type != "cuda":
        return f"{package} needs a CUDA GPU"
    if dtype not in (torch.float16, torch.bfloat16):
        return f"{package} takes fp16 and bf16 only"
    if head_dim % 8 or head_dim > 256:
        return f"{package} takes head dims that are multiples of 8 up to 256, not {head_dim}"
    first, too_new = found.capabilities
    if not first <= torch.cuda.get_device_capability(device) < too_new:
        return f"{package} needs {found.gpus}"
    try:
        _function(found.module)
    except (ImportError, AttributeError, OSError) as error:  # compiled for another PyTorch, most often
        return f"{package} is installed and does not import: {' '.join(str(error).split())}"
    return None


@functools.cache
def _function(module: str) -> Callable[..., Tensor | tuple[Tensor, ...]]:
    return importlib.import_module(module).flash_attn_func
