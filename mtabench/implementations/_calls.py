"""What several implementations share: calls of the kernels' public functions, and the reasons why they cannot be."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from mtabench.implementations import Closure
from mtabench.problem.case import Case

if TYPE_CHECKING:
    from torch import Tensor

    from mtabench.problem.inputs import Inputs


def conv_attention_by(backend: str, case: Case, inputs: Inputs) -> Closure:
    """Conv attention, or a decode step of it, by a backend of the kernels."""
    from mta_kernels.conv_attention import conv_attention, conv_attention_decode

    inputs = inputs.given_to(case)
    q, k, v, weight, options = inputs.q, inputs.k, inputs.v, weight_of(inputs), options_of(case, inputs)
    function = conv_attention_decode if case.pass_ == "decode" else conv_attention
    return lambda: function(q, k, v, weight, backend=backend, **options)


def backend_why_not(backend: str, case: Case) -> str | None:
    """Why a backend of the kernels cannot run this case, or None."""
    from mta_kernels.conv_attention import unsupported

    pass_ = case.pass_
    return unsupported(backend, **typical_conv_call(case), backward=pass_ == "bwd", decode=pass_ == "decode")


def mta_by(function: Callable[..., Tensor], case: Case, inputs: Inputs, **more: Any) -> Closure:
    """The whole multi-token attention by one of its public functions, in decode by one that takes a step."""
    options, inputs = case.operation.options, inputs.given_to(case)
    if case.pass_ == "decode":
        options = {"state": inputs.state, **_cache_of(inputs), **case.operation.decode_options}
    return mta_call(function, inputs, inputs.q, **options, **more)


def mta_by_backend(backend: str, case: Case, inputs: Inputs) -> Closure:
    """The same by a backend of the kernels."""
    from mta_kernels.multi_token_attention import multi_token_attention, multi_token_attention_decode

    function = multi_token_attention_decode if case.pass_ == "decode" else multi_token_attention
    return mta_by(function, case, inputs, backend=backend)


def mta_call(function: Callable[..., Tensor], inputs: Inputs, q: Tensor, **options: Any) -> Closure:
    """A call of such a function on these inputs and other queries."""
    k, v = inputs.k, inputs.v
    mixers = {"pre_conv" if name == "weight" else name: x for name, x in inputs.mixers.items()}
    return lambda: function(q, k, v, **mixers, **options)


def mta_why_not(backend: str, case: Case) -> str | None:
    """Why a backend of the whole multi-token attention cannot run this case, or None."""
    from mta_kernels.multi_token_attention import BACKENDS, unsupported

    if backend not in BACKENDS:
        return f"the whole multi-token attention has no backend {backend!r}, only {', '.join(BACKENDS)}"
    return unsupported(
        backend, operation=case.operation, **typical_call(case), heads=case.heads, backward=case.pass_ == "bwd",
        decode=case.pass_ == "decode",
    )  # fmt: skip


def attention_by_rung(case: Case, inputs: Inputs) -> Closure:
    """Plain attention by the rung of the ladder that the implementation is named after."""
    from mta_ladder import attention

    q, k, v, options = inputs.q, inputs.k, inputs.v, case.operation.options
    return lambda: attention(q, k, v, rung=case.impl, **options)


def rung_why_not(case: Case) -> str | None:
    """Why this rung of the ladder cannot run this case, or None."""
    from mta_ladder import rung_unsupported

    return rung_unsupported(case.impl, **typical_call(case))


def typical_call(case: Case) -> dict[str, Any]:
    """What the kernels' `unsupported` functions take by keyword for a case, without taps."""
    from mtabench.problem.inputs import DTYPES

    return {"device": case.device, "dtype": DTYPES[case.dtype], "head_dim": case.head_dim}


def typical_conv_call(case: Case) -> dict[str, Any]:
    """The same with the taps."""
    return {**typical_call(case), "query_taps": case.conv.query_taps, "key_taps": case.conv.key_taps}


def triton_untimed(case: Case) -> str | None:
    """Why kernels in Triton have no time here, or None."""
    if case.device != "cuda":
        return "Triton's interpreter is for checking, not for timing; `mtabench verify` runs it"
    if os.environ.get("TRITON_INTERPRET") == "1":
        return "TRITON_INTERPRET=1 is set, and the interpreter is for checking, not for timing"
    return None


def weight_of(inputs: Inputs) -> Tensor:
    """The weight of the convolution; raises ValueError for inputs of plain attention."""
    if inputs.weight is None:
        raise ValueError("conv attention needs a convolution weight, and these inputs have none")
    return inputs.weight


def options_of(case: Case, inputs: Inputs) -> dict[str, Any]:
    """What the kernels' public functions take by keyword for a case, the backend aside."""
    if case.pass_ != "decode":
        return case.operation.options
    splits = "auto" if case.splits is None else case.splits
    return {"splits": splits, **_cache_of(inputs), **case.operation.decode_options}


def _cache_of(inputs: Inputs) -> dict[str, Any]:
    """The arguments of a decode step about its caches: lengths, and where keys are if the caches are pages."""
    table = {} if inputs.block_table is None else {"block_table": inputs.block_table}
    return {"lengths": lengths_of(inputs), **table}


def lengths_of(inputs: Inputs) -> Tensor:
    """The lengths of a decode step; raises ValueError for inputs of another pass."""
    if inputs.lengths is None:
        raise ValueError("a decode step needs lengths, and these inputs have none")
    return inputs.lengths
