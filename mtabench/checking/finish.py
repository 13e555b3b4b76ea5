"""Norm and gate behind an output that is known, by their definition."""

from __future__ import annotations

from torch import Tensor

from mta_kernels.multi_token_attention.arguments import NormGate
from mta_kernels.multi_token_attention.reference import norm_and_gate
from mtabench.problem.case import Case
from mtabench.problem.inputs import Inputs


def finished(case: Case, inputs: Inputs, out: Tensor) -> Tensor:
    """What norm and gate of the case make of `out [B, Hq, M, D]`, in its dtype; the same where it has neither."""
    norm = case.operation.norm
    after = NormGate(depth=norm.depth if norm else None)
    weights = (
        None if x is None else x.to(out.dtype) for x in (inputs.norm_weight, inputs.gate_weight, inputs.gate_bias)
    )
    norm_weight, gate_weight, gate_bias = weights
    return norm_and_gate(out, norm_weight, after.norm_eps, after.factor, gate_weight, gate_bias)
