"""The inputs of a problem as views of other tensors, for the strided checks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from mtabench.problem.inputs import Inputs


def tokens_first(inputs: Inputs) -> Inputs:
    """The same values, where q, k, v and dout lie as `[B, N, H, D]`, mixers transposed, lengths two apart."""

    def moved(x: Tensor) -> Tensor:
        if x.dim() == 1:
            apart = torch.stack([x.detach(), torch.zeros_like(x)], 1)[:, 0]
            return apart.requires_grad_(x.requires_grad)
        dims = (1, 2) if x.dim() > 2 else (0, 1)
        return x.detach().transpose(*dims).contiguous().transpose(*dims).requires_grad_(x.requires_grad)

    dout, lengths = inputs.dout, inputs.lengths
    leaves: dict[str, Any] = {name: moved(x) for name, x in inputs.differentiable.items()}
    return Inputs(
        **leaves,
        dout=None if dout is None else moved(dout),
        lengths=None if lengths is None else torch.stack([lengths, torch.zeros_like(lengths)], 1)[:, 0],
    ).with_state()


def expanded(inputs: Inputs, with_dout: bool = True) -> Inputs:
    """All KV heads with the keys and values of the first, and all rows with its dout, which lie in memory once.

    Unless `with_dout`, that of each row is in memory of its own.
    """

    def expand(x: Tensor, dim: int) -> Tensor:
        return x.detach().narrow(dim, 0, 1).clone().expand_as(x).requires_grad_(x.requires_grad)

    dout = None if inputs.dout is None else expand(inputs.dout, 2)
    if dout is not None and not with_dout:
        dout = dout.contiguous()
    return replace(inputs, k=expand(inputs.k, 1), v=expand(inputs.v, 1), dout=dout).with_state()
