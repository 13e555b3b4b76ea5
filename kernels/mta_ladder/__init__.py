"""Baselines: plain attention from three loops in C to the fastest kernels known, and its eager definition.

A rung is a module with two functions: `attention(q, k, v, *, causal, scale)`, and `unsupported(*, device, dtype,
head_dim)`, which returns in a clause why it cannot run here. Its first use imports it, with what it needs.
docs/design/plain-attention-ladder.md walks up the ladder. `cuda_conv` is the published approach to conv attention.
"""

from __future__ import annotations

import difflib
import importlib
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from mta_kernels.conv_attention.arguments import check_queries, check_tensors, wants_gradient
from mta_kernels.gpu_limits import absent
from mta_kernels.operation import softmax_scale
from mta_kernels.operator_gradients import check_no_tangents
from mta_ladder.reference import attention_reference
from mta_ladder.sdpa import attention as attention_sdpa
from mta_ladder.sdpa import unsupported as sdpa_unsupported

__all__ = ["RUNGS", "attention", "attention_reference", "attention_sdpa", "rung_unsupported", "sdpa_unsupported"]

# The module of each rung, and the further options of its functions.
_MODULES: dict[str, tuple[str, dict[str, Any]]] = {
    "c-loops": ("c_compiler", {"source": "c_loops.c"}),
    "c-tiled": ("c_compiler", {"source": "c_tiled.c"}),
    "cuda-naive": ("cuda_unfused", {"rung": "cuda-naive"}),
    "cuda-tiled": ("cuda_unfused", {"rung": "cuda-tiled"}),
    "cuda-flash": ("cuda_flash", {}),
    "triton-pointer": ("triton_pointer", {}),
    "triton-descriptor": ("triton_descriptor", {}),
    "triton-fmha": ("triton_fmha", {}),
    "cutile-fmha": ("cutile_fmha", {}),
    "sdpa-flash": ("sdpa", {"backend": "flash"}),
    "sdpa-cudnn": ("sdpa", {"backend": "cudnn"}),
    "flex": ("flex", {}),
    "flash-attn": ("flash_attn", {"package": "flash-attn"}),
    "flash-attn-3": ("flash_attn", {"package": "flash-attn-3"}),
    "flash-attn-4": ("flash_attn", {"package": "flash-attn-4"}),
}
RUNGS = tuple(_MODULES)
ON_CPUS_ALONE = ("c-loops", "c-tiled")
DIFFERENTIABLE = ("sdpa-flash", "sdpa-cudnn", "flex", "flash-attn", "flash-attn-3", "flash-attn-4")

_ready: set[tuple] = set()  # rungs that can run, with what: the check takes longer than a small kernel


def attention(q: Tensor, k: Tensor, v: Tensor, *, causal: bool = True, scale: float | None = None, rung: str) -> Tensor:
    """`softmax(scale * q k^T) v` for `q [B, Hq, M, D]`, `k [B, Hkv, N, D]`, `v [B, Hkv, N, Dv]`: `[B, Hq, M, Dv]`.

    Runs the rung of that name, one of RUNGS, and no other. Query heads are a multiple of key heads, and `M <= N`: with
    `causal`, the queries are the last M of N positions. `scale` is `1 / sqrt(D)` unless given. Only the rungs in
    DIFFERENTIABLE have gradients; the others refuse inputs that require one, and dual tensors.
    Raises ValueError or TypeError, in one sentence, for arguments that do not fit or a rung that cannot run them.
    """
    try:
        module, options = _rung(rung)
    except ModuleNotFoundError as error:
        raise ValueError(f"rung {rung!r} cannot run this: {_missing(error)}") from None
    check_tensors(q, k, v)
    if k.shape[:3] != v.shape[:3]:
        raise ValueError(f"k has shape {tuple(k.shape)} and v {tuple(v.shape)}; batch, heads and rows must be the same")
    check_queries(q, k)
    if rung not in DIFFERENTIABLE:
        if wants_gradient(q, k, v):
            raise ValueError(f"rung {rung!r} has no gradient; call it under torch.no_grad(), or take rung='sdpa-flash'")
        check_no_tangents(f"rung {rung!r}", "attention_reference has them", q, k, v)
    key = rung, q.device, q.dtype, q.shape[3]
    if key not in _ready:
        reason = module.unsupported(device=q.device, dtype=q.dtype, head_dim=q.shape[3], **options)
        if reason is not None:
            raise ValueError(f"rung {rung!r} cannot run this: {reason}")
        _ready.add(key)
    return module.attention(q, k, v, causal=causal, scale=softmax_scale(scale, q.shape[3]), **options)


def rung_unsupported(rung: str, *, device: torch.device | str, dtype: torch.dtype, head_dim: int) -> str | None:
    """Why a rung cannot run with these on this machine, or None; raises ValueError for a rung that does not exist."""
    try:
        module, options = _rung(rung)
    except ModuleNotFoundError as error:
        return _missing(error)
    reason = None if rung in ON_CPUS_ALONE else absent(device)
    return reason or module.unsupported(device=torch.device(device), dtype=dtype, head_dim=head_dim, **options)


def _rung(name: str) -> tuple[ModuleType, dict[str, Any]]:
    """The module of a rung, and the options of its functions."""
    if name not in _MODULES:
        near = difflib.get_close_matches(name, RUNGS, n=3, cutoff=0.4)
        hint = f"did you mean {' or '.join(map(repr, near))}?" if near else f"expected one of {', '.join(RUNGS)}"
        raise ValueError(f"there is no rung {name!r}; {hint}")
    module, options = _MODULES[name]
    return importlib.import_module(f"{__name__}.{module}"), options


def _missing(error: ModuleNotFoundError) -> str:
    """The package that a rung's module could not import, as a reason."""
    return f"{error.name} is not installed (pip install {error.name})"
