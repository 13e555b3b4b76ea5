"""Documents packed into a row of tokens, in the form that the kernels read."""

from __future__ import annotations

import torch
from torch import Tensor


def document_bounds(cu_seqlens: Tensor, tokens: int) -> Tensor:
    """`[2, tokens]` int32: the first token of each token's document, and one past its last.

    `cu_seqlens [S + 1]` has the bounds of the documents, which may be empty. Nothing waits for the device.
    """
    bounds = cu_seqlens.contiguous()  # else searchsorted copies it each time, and warns
    token = torch.arange(tokens, dtype=bounds.dtype, device=bounds.device)
    document = torch.searchsorted(bounds, token, right=True) - 1
    return torch.stack([bounds[document], bounds[document + 1]]).int()
