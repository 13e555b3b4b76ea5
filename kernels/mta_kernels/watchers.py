"""What would observe that an operator did not run: compilers, tracers, transforms, modes, subclasses, the profiler.

Where nothing observes a call, the operator's kernel is called directly: PyTorch's dispatcher takes the host longer than
a short launch.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

try:  # PyTorch's public interface does not report all of these
    from torch._C import (
        _are_functorch_transforms_active,
        _dispatch_isTensorSubclassLike,
        _get_tracing_state,
        _is_torch_function_mode_enabled,
    )
    from torch._C._autograd import _profiler_enabled
except ImportError:  # a later PyTorch without these: then every call goes through the dispatcher
    CAN_ASK = False
else:
    CAN_ASK = hasattr(forward_ad, "_current_level")

PLAIN = (Tensor, nn.Parameter)


def may_be_dual() -> bool:
    """Whether there may be dual tensors, which look like any other."""
    return not CAN_ASK or forward_ad._current_level >= 0


def is_traced(x: Tensor) -> bool:
    """Whether the profiler or a mode is on, dual tensors may be about, or x is not what it seems."""
    return (
        _profiler_enabled()
        or forward_ad._current_level >= 0  # a dual tensor looks like any other, to guards too
        or _is_torch_function_mode_enabled()
        or _dispatch_isTensorSubclassLike(x)  # so is every tensor while a dispatch mode is on
    )


def can_bypass_dispatcher(*tensors: Tensor) -> bool:
    """Whether nothing observes which operators a call with these tensors runs."""
    return (
        CAN_ASK
        and not torch.compiler.is_compiling()
        and not is_traced(tensors[0])
        and not _are_functorch_transforms_active()
        and not _get_tracing_state()
        and all(map(is_plain, tensors))
    )


def is_plain(x: Tensor) -> bool:
    """Whether x is an ordinary tensor in memory: no subclass, no lazy negation, no zero tensor."""
    is_other = CAN_ASK and _dispatch_isTensorSubclassLike(x)
    return type(x) in PLAIN and not is_other and not x.is_neg() and not x._is_zerotensor()
