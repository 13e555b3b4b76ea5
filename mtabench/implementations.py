"""What the registry's rows name: closures that compute a case's output, and the reasons why they cannot."""

from __future__ import annotations

import functools
import importlib.util
import logging
import os
import shutil
import sysconfig
import types
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from mta_kernels.attention import attention_sdpa
from mta_kernels.attention import sdpa_unsupported as attention_sdpa_unsupported
from mta_kernels.conv_attention import (
    conv_attention,
    conv_attention_decode,
    conv_attention_decode_reference,
    conv_attention_reference,
    unsupported,
)
from mtabench.case import Case
from mtabench.inputs import DTYPES, Inputs

Closure = Callable[[], Tensor]


def eager(case: Case, inputs: Inputs) -> Closure:
    """The reference, operation by operation."""
    q, k, v, weight = inputs.q, inputs.k, inputs.v, _weight(inputs)
    if case.pass_ == "decode":
        lengths = _lengths(inputs)
        return lambda: conv_attention_decode(q, k, v, weight, lengths=lengths, backend="reference")
    return lambda: conv_attention(q, k, v, weight, causal=case.causal, backend="reference")


def compiled(case: Case, inputs: Inputs) -> Closure:
    """The reference through torch.compile, for the shapes of `case` alone; compiles when first called."""
    function = _compiled(case)
    q, k, v, weight = inputs.q, inputs.k, inputs.v, _weight(inputs)
    if case.pass_ == "decode":
        lengths = _lengths(inputs)
        return lambda: function(q, k, v, weight, lengths=lengths)
    return lambda: function(q, k, v, weight, causal=case.causal)


def triton(case: Case, inputs: Inputs) -> Closure:
    """The fused Triton kernels."""
    q, k, v, weight = inputs.q, inputs.k, inputs.v, _weight(inputs)
    if case.pass_ == "decode":
        lengths, splits = _lengths(inputs), "auto" if case.splits is None else case.splits
        return lambda: conv_attention_decode(q, k, v, weight, lengths=lengths, backend="triton", splits=splits)
    return lambda: conv_attention(q, k, v, weight, causal=case.causal, backend="triton")


def hopper(case: Case, inputs: Inputs) -> Closure:
    """The CUDA kernels for Hopper GPUs."""
    q, k, v, weight = inputs.q, inputs.k, inputs.v, _weight(inputs)
    return lambda: conv_attention(q, k, v, weight, causal=case.causal, backend="hopper")


def triton_splits_used(case: Case) -> int:
    """The programs that share the keys of a head in this decode step."""
    from mta_kernels.conv_attention.triton.decode import choose_splits, sm_count

    if isinstance(case.splits, int):
        return case.splits
    return choose_splits(case.batch, case.kv_heads, case.seq, sm_count(torch.device(case.device)))


def sdpa(case: Case, inputs: Inputs) -> Closure:
    """Plain attention by the SDPA backend that the implementation is named after; decode: the newest query."""
    backend, causal = _sdpa_backend(case), case.causal and case.pass_ != "decode"
    q, k, v = inputs.q[:, :, -1:] if case.pass_ == "decode" else inputs.q, inputs.k, inputs.v
    return lambda: attention_sdpa(q, k, v, backend=backend, causal=causal)


def never_unsupported(case: Case) -> str | None:
    """None: eager PyTorch runs everywhere."""
    return None


def compile_unsupported(case: Case) -> str | None:
    """Why torch.compile has nothing to compile with, or None."""
    if not any(shutil.which(name) for name in (os.environ.get("CXX"), "g++", "clang++") if name):
        return "torch.compile needs a C++ compiler (g++, clang++, or the one that CXX names), and there is none"
    if not Path(sysconfig.get_path("include"), "Python.h").is_file():
        return "torch.compile needs Python.h, which this Python lacks (a package such as python3-dev has it)"
    if case.device == "cuda" and importlib.util.find_spec("triton") is None:
        return "torch.compile needs Triton on a GPU, and it is not installed"
    return None


def triton_unsupported(case: Case) -> str | None:
    """Why the Triton kernels cannot be timed, or None."""
    if case.device != "cuda":
        return "Triton's interpreter is for checking, not for timing; `mtabench verify` runs it"
    if os.environ.get("TRITON_INTERPRET") == "1":
        return "TRITON_INTERPRET=1 is set, and the interpreter is for checking, not for timing"
    return _backend_unsupported("triton", case)


def hopper_unsupported(case: Case) -> str | None:
    """Why the Hopper kernels cannot run this case, or None."""
    return _backend_unsupported("hopper", case)


def sdpa_unsupported(case: Case) -> str | None:
    """Why PyTorch has no such SDPA kernel for this case, or None."""
    return attention_sdpa_unsupported(
        _sdpa_backend(case), device=case.device, dtype=DTYPES[case.dtype], head_dim=case.head_dim, keys=case.seq
    )


def _backend_unsupported(backend: str, case: Case) -> str | None:
    return unsupported(
        backend,
        device=case.device,
        dtype=DTYPES[case.dtype],
        head_dim=case.head_dim,
        query_taps=case.conv_q or 1,
        key_taps=case.conv_k or 1,
    )


@functools.lru_cache(maxsize=64)
def _compiled(case: Case) -> Callable[..., Tensor]:
    """A compiled function of this case alone, shared by copies of its inputs.

    torch.compile gives up on a code object that it has compiled for eight shapes: each case has its own.
    """
    reference = conv_attention_decode_reference if case.pass_ == "decode" else conv_attention_reference
    own = types.FunctionType(reference.__code__.replace(), reference.__globals__, reference.__name__)
    own.__kwdefaults__ = reference.__kwdefaults__
    if case.pass_ == "decode" and case.device == "cpu":
        # There a decode step reads the lengths to check them: two graphs instead of one, and a warning about it.
        logging.getLogger("torch._dynamo").setLevel(logging.ERROR)
        return torch.compile(own, dynamic=False)
    return torch.compile(own, dynamic=False, fullgraph=True)


def _weight(inputs: Inputs) -> Tensor:
    if inputs.weight is None:
        raise ValueError("conv attention needs a convolution weight, and these inputs have none")
    return inputs.weight


def _lengths(inputs: Inputs) -> Tensor:
    if inputs.lengths is None:
        raise ValueError("a decode step needs lengths, and these inputs have none")
    return inputs.lengths


def _sdpa_backend(case: Case) -> str:
    return case.impl.removeprefix("sdpa-")
