"""What the registry's rows name: closures that compute a case's output, and the reasons why they cannot."""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Callable

import torch
from torch import Tensor

from mta_kernels import attention as plain
from mta_kernels import torch_compile
from mta_kernels.conv_attention import (
    conv_attention,
    conv_attention_decode,
    conv_attention_decode_reference,
    conv_attention_reference,
    unsupported,
)
from mtabench.problem.case import Case
from mtabench.problem.inputs import DTYPES, Inputs

Closure = Callable[[], Tensor]


def eager(case: Case, inputs: Inputs) -> Closure:
    """The reference, operation by operation."""
    q, k, v, weight = inputs.q, inputs.k, inputs.v, _weight(inputs)
    if case.pass_ == "decode":
        lengths = _lengths(inputs)
        return lambda: conv_attention_decode(
            q, k, v, weight, lengths=lengths, **case.operation.decode_options, backend="reference"
        )
    return lambda: conv_attention(q, k, v, weight, **case.operation.options, backend="reference")


def compiled(case: Case, inputs: Inputs) -> Closure:
    """The reference through torch.compile, for the shapes of `case` alone; compiles when first called."""
    function = _compiled(case)
    q, k, v, weight = inputs.q, inputs.k, inputs.v, _weight(inputs)
    if case.pass_ == "decode":
        lengths = _lengths(inputs)
        return lambda: function(q, k, v, weight, lengths=lengths, **case.operation.decode_options)
    return lambda: function(q, k, v, weight, **case.operation.options)


def triton(case: Case, inputs: Inputs) -> Closure:
    """The fused Triton kernels."""
    q, k, v, weight = inputs.q, inputs.k, inputs.v, _weight(inputs)
    if case.pass_ == "decode":
        lengths, splits = _lengths(inputs), "auto" if case.splits is None else case.splits
        return lambda: conv_attention_decode(
            q, k, v, weight, lengths=lengths, **case.operation.decode_options, backend="triton", splits=splits
        )
    return lambda: conv_attention(q, k, v, weight, **case.operation.options, backend="triton")


def hopper(case: Case, inputs: Inputs) -> Closure:
    """The CUDA kernels for Hopper GPUs."""
    q, k, v, weight = inputs.q, inputs.k, inputs.v, _weight(inputs)
    return lambda: conv_attention(q, k, v, weight, **case.operation.options, backend="hopper")


def cuda(case: Case, inputs: Inputs) -> Closure:
    """The CUDA decode."""
    q, k, v, weight, lengths = inputs.q, inputs.k, inputs.v, _weight(inputs), _lengths(inputs)
    splits = "auto" if case.splits is None else case.splits
    return lambda: conv_attention_decode(
        q, k, v, weight, lengths=lengths, **case.operation.decode_options, backend="cuda", splits=splits
    )


def cuda_conv(case: Case, inputs: Inputs) -> Closure:
    """The published approach to conv attention, in CUDA."""
    from mta_kernels.conv_attention import cuda_conv

    q, k, v, weight = inputs.q, inputs.k, inputs.v, _weight(inputs)
    if case.pass_ == "decode":
        lengths, splits = _lengths(inputs), "auto" if case.splits is None else case.splits
        return lambda: cuda_conv.conv_attention_decode(
            q, k, v, weight, lengths=lengths, **case.operation.decode_options, splits=splits
        )
    return lambda: cuda_conv.conv_attention(q, k, v, weight, **case.operation.options)


def rung(case: Case, inputs: Inputs) -> Closure:
    """Plain attention by the rung of the ladder that the implementation is named after."""
    q, k, v = inputs.q, inputs.k, inputs.v
    return lambda: plain.attention(q, k, v, **case.operation.options, rung=case.impl)


def triton_splits_used(case: Case) -> int:
    """The programs that share the keys of a KV head in this decode step."""
    from mta_kernels.conv_attention.triton.decode import auto_tiles
    from mta_kernels.conv_attention.triton.decode_plan import bulk_pays
    from mta_kernels.gpu_limits import capability

    if isinstance(case.splits, int):
        return case.splits
    dtype, device, group = DTYPES[case.dtype], torch.device(case.device), case.heads // case.kv_heads
    taps = case.conv.taps
    bulk = bulk_pays(case.head_dim, group, dtype.itemsize, capability(device))
    return auto_tiles(dtype, case.head_dim, taps, case.seq, group, case.batch * case.kv_heads, device, bulk)[0]


def cuda_splits_used(case: Case) -> int:
    """The programs that share the keys of a KV head in this decode step, rounded up."""
    from mta_kernels.conv_attention.cuda_decode.decode import choose_splits

    if isinstance(case.splits, int):
        return case.splits
    return choose_splits(
        case.batch, case.heads, case.kv_heads, case.seq, DTYPES[case.dtype], case.head_dim,
        case.conv.taps, torch.device(case.device),
    )  # fmt: skip


def cuda_conv_splits_used(case: Case) -> int:
    """The blocks that share the keys of a query head in this decode step."""
    from mta_kernels.conv_attention.cuda_conv import choose_splits

    if isinstance(case.splits, int):
        return case.splits
    return choose_splits(case.batch, case.heads, case.seq, torch.device(case.device))


def sdpa(case: Case, inputs: Inputs) -> Closure:
    """Plain attention by the SDPA backend that the implementation is named after; decode: the newest query."""
    backend, options = _sdpa_backend(case), case.operation.options
    if case.pass_ == "decode":
        options["causal"] = False  # the newest query sees every key
    q, k, v = inputs.q[:, :, -1:] if case.pass_ == "decode" else inputs.q, inputs.k, inputs.v
    return lambda: plain.attention_sdpa(q, k, v, backend=backend, **options)


def never_unsupported(case: Case) -> str | None:
    """None: eager PyTorch runs everywhere."""
    return None


def compile_unsupported(case: Case) -> str | None:
    """Why torch.compile has nothing to compile with, or None."""
    return torch_compile.missing(case.device)


def triton_unsupported(case: Case) -> str | None:
    """Why the Triton kernels cannot be timed, or None."""
    return _untimed(case) or _backend_unsupported("triton", case)


def triton_interpreted_unsupported(case: Case) -> str | None:
    """Why Triton's interpreter cannot check them, or None."""
    return _backend_unsupported("triton", case)


def hopper_unsupported(case: Case) -> str | None:
    """Why the Hopper kernels cannot run this case, or None."""
    return _backend_unsupported("hopper", case)


def cuda_unsupported(case: Case) -> str | None:
    """Why the CUDA decode cannot run this case, or None."""
    return _backend_unsupported("cuda", case)


def cuda_conv_unsupported(case: Case) -> str | None:
    """Why the published approach cannot run this case, or None."""
    from mta_kernels.conv_attention import cuda_conv

    return cuda_conv.unsupported(
        device=torch.device(case.device),
        dtype=DTYPES[case.dtype],
        head_dim=case.head_dim,
        query_taps=case.conv.query_taps,
        key_taps=case.conv.key_taps,
    )


def rung_unsupported(case: Case) -> str | None:
    """Why this rung of the ladder cannot run this case, or None."""
    return plain.rung_unsupported(case.impl, device=case.device, dtype=DTYPES[case.dtype], head_dim=case.head_dim)


def triton_rung_unsupported(case: Case) -> str | None:
    """Why a rung in Triton cannot be timed, or None."""
    return _untimed(case) or rung_unsupported(case)


def flex_unsupported(case: Case) -> str | None:
    """Why FlexAttention cannot run this case, or None."""
    if case.pass_ == "bwd" and case.device == "cpu":
        return "FlexAttention has no backward on a CPU"
    return rung_unsupported(case)


def sdpa_unsupported(case: Case) -> str | None:
    """Why PyTorch has no such SDPA kernel for this case, or None."""
    return plain.sdpa_unsupported(
        device=torch.device(case.device),
        dtype=DTYPES[case.dtype],
        head_dim=case.head_dim,
        backend=_sdpa_backend(case),
        keys=case.seq,
    )


def _untimed(case: Case) -> str | None:
    """Why kernels in Triton have no time here, or None."""
    if case.device != "cuda":
        return "Triton's interpreter is for checking, not for timing; `mtabench verify` runs it"
    if os.environ.get("TRITON_INTERPRET") == "1":
        return "TRITON_INTERPRET=1 is set, and the interpreter is for checking, not for timing"
    return None


def _backend_unsupported(backend: str, case: Case) -> str | None:
    return unsupported(
        backend,
        device=case.device,
        dtype=DTYPES[case.dtype],
        head_dim=case.head_dim,
        query_taps=case.conv.query_taps,
        key_taps=case.conv.key_taps,
        backward=case.pass_ == "bwd",
    )


@functools.lru_cache(maxsize=64)
def _compiled(case: Case) -> Callable[..., Tensor]:
    """A compiled function of this case alone, shared by copies of its inputs."""
    if case.pass_ != "decode":
        return torch_compile.compiled_apart(conv_attention_reference)
    if case.device == "cpu":
        # There a decode step reads the lengths to check them: two graphs instead of one, and a warning about it.
        logging.getLogger("torch._dynamo").setLevel(logging.ERROR)
    return torch_compile.compiled_apart(conv_attention_decode_reference, fullgraph=case.device != "cpu")


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
