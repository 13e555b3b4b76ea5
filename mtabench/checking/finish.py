"""Norm and gate behind an output that is known, by their definition."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mta_kernels.multi_token_attention import multi_token_attention_reference
from mtabench.problem.case import Case
from mtabench.problem.inputs import FINISHERS, Inputs


def finished(case: Case, inputs: Inputs, out: Tensor) -> Tensor:
    """What norm and gate of the case make of `out [B, Hq, M, D]`, in its dtype; the same where it has neither.

    Each row of `out` is the value of a sequence of one token, whose attention is that value.
    """
    after: dict[str, Any] = {name: x.to(out.dtype) for name, x in inputs.mixers.items() if name in FINISHERS}
    if case.operation.norm:
        after["depth"] = case.operation.norm.depth
    values = out.transpose(1, 2).flatten(0, 1)[:, :, None]
    query = torch.zeros_like(values)
    rows = multi_token_attention_reference(query, query, values, **after)
    return rows[:, :, 0].unflatten(0, (out.shape[0], -1)).transpose(1, 2)
