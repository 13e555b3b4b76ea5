"""Calls that differ from an earlier one in addresses and values alone go straight to the Hopper kernels.

The checks, the choice of a backend and PyTorch's dispatcher take longer than a short sequence takes on the GPU, and
for an equal call they have nothing new to say. The operator runs wherever somebody would see that it did not:
compilers, tracers, transforms, modes, tensor subclasses, and the profiler, whose records name it.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from mta_kernels.conv_attention.hopper.forward import MAX_REMEMBERED, Launches

try:  # who watches is not asked through PyTorch's public interface
    from torch._C import (
        _are_functorch_transforms_active,
        _dispatch_isTensorSubclassLike,
        _get_tracing_state,
        _is_torch_function_mode_enabled,
    )
    from torch._C._autograd import _profiler_enabled
except ImportError:  # in a PyTorch to come: then every call takes the operator
    CAN_ASK = False
else:
    CAN_ASK = True

PLAIN = (Tensor, nn.Parameter)
_launches: dict[tuple, Launches] = {}


def likeness(
    q: Tensor, k: Tensor, v: Tensor, weight: Tensor, causal: bool, scale: float | None, pad_key: str, backend: str
) -> tuple | None:
    """What equal calls have in common; None for one that the operator must run, or that the checks must see."""
    if (
        not CAN_ASK
        or torch.compiler.is_compiling()
        or _profiler_enabled()
        or _is_torch_function_mode_enabled()
        or _are_functorch_transforms_active()
        or _get_tracing_state()
        or not (_is_plain(q) and _is_plain(k) and _is_plain(v) and _is_plain(weight))
        or not (type(causal) is bool and type(pad_key) is str and type(backend) is str)
        or not (scale is None or type(scale) is float)
    ):
        return None
    return (
        q.shape, k.shape, v.shape, weight.shape, q.stride(), k.stride(), v.stride(), weight.stride(), q.dtype, k.dtype,
        v.dtype, weight.dtype, q.device, k.device, v.device, weight.device, causal, scale, pad_key, backend,
    )  # fmt: skip


def _is_plain(x: Tensor) -> bool:
    """Whether x is numbers in memory, and no dispatch mode is on."""
    return type(x) in PLAIN and not _dispatch_isTensorSubclassLike(x) and not x.is_neg() and not x._is_zerotensor()


def remembered(like: tuple) -> Launches | None:
    """The launches of a call that was like this."""
    return _launches.get(like)


def remember(like: tuple, launches: Launches) -> None:
    """For calls like one that passed all checks."""
    if len(_launches) >= MAX_REMEMBERED:
        _launches.clear()
    _launches[like] = launches
