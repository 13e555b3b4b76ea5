"""The definition through torch.compile, for the shapes of one case at a time; it compiles when first called."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from mtabench.implementations import Closure, Implementation, Style
from mtabench.implementations._calls import lengths_of, mta_by, weight_of
from mtabench.problem.case import Case

if TYPE_CHECKING:
    from mtabench.problem.inputs import Inputs


def build(case: Case, inputs: Inputs) -> Closure:
    """The reference, compiled for the shapes of `case` alone."""
    function = compiled(case)
    q, k, v, weight = inputs.q, inputs.k, inputs.v, weight_of(inputs)
    options = case.operation.options
    if case.pass_ == "decode":
        options = {"lengths": lengths_of(inputs), **case.operation.decode_options}
    return lambda: function(q, k, v, weight, **options)


def build_mta(case: Case, inputs: Inputs) -> Closure:
    """The reference of all steps, compiled for the shapes of `case` alone."""
    return mta_by(compiled(case), case, inputs)


def why_not(case: Case) -> str | None:
    """Why torch.compile has nothing to compile with, or None."""
    from mta_kernels import torch_compile

    return torch_compile.missing(case.device)


@functools.lru_cache(maxsize=64)
def compiled(case: Case) -> Callable[..., Any]:
    """A compiled function of this case alone, shared by copies of its inputs."""
    from mta_kernels import torch_compile
    from mta_kernels.conv_attention import conv_attention_decode_reference, conv_attention_reference
    from mta_kernels.multi_token_attention import (
        multi_token_attention_decode_reference,
        multi_token_attention_reference,
    )

    of_mta = case.op == "mta"
    if case.pass_ != "decode":
        return torch_compile.compiled_apart(multi_token_attention_reference if of_mta else conv_attention_reference)
    if case.device == "cpu":
        # There a decode step reads the lengths to check them: two graphs instead of one, and a warning about it.
        logging.getLogger("torch._dynamo").setLevel(logging.ERROR)
    reference = multi_token_attention_decode_reference if of_mta else conv_attention_decode_reference
    return torch_compile.compiled_apart(reference, fullgraph=case.device != "cpu")


_compile = partial(
    Implementation, name="compile", passes=("fwd", "bwd", "decode"), devices=("cuda", "cpu"), work="dense",
    summary="torch.compile of the definition", why_not=why_not,
    style=Style("#B8558F", "#E58FC2", "s", "-"), compiles=True, slow_to_compile=True,
)  # fmt: skip

ENTRIES = (
    _compile(order=20, op="conv-attention", build=build),
    _compile(order=80, op="mta", build=build_mta),
)
