"""Gradients of some heads at a time, by the kernels of any backend."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from mta_kernels.allocation import empty
from mta_kernels.backend import Gradients
from mta_kernels.conv_attention.arguments import head_parts


def gradients_by_chunks(
    backward: Callable[..., Gradients], q: Tensor, k: Tensor, v: Tensor, weight: Tensor, out: Tensor, logsumexp: Tensor,
    grad_out: Tensor, *, head_chunk: int, **options: Any,
) -> Gradients:  # fmt: skip
    """Gradients in q, k, v and weight by `backward(tensors, **options)`, of `head_chunk` query heads a call, 0 for all.

    `backward` receives a contiguous logsumexp and returns gradients in float32 or in the dtypes of their tensors. The
    results have the dtypes of their tensors.
    """
    parts = head_parts(q.shape[1], k.shape[1], head_chunk)
    if len(parts) == 1:
        dq, dk, dv, dweight = backward(q, k, v, weight, out, logsumexp.contiguous(), grad_out, **options)
    else:
        dq = empty(q.shape, dtype=q.dtype, device=q.device)
        # Query heads of one KV head may be in several parts.
        dk, dv = (torch.zeros(x.shape, dtype=torch.float32, device=q.device) for x in (k, v))
        dweight = empty(weight.shape, dtype=torch.float32, device=q.device)
        for part, kv_part in parts:
            dq[:, part], dk_part, dv_part, dweight[part] = backward(
                q[:, part], k[:, kv_part], v[:, kv_part], weight[part],
                out[:, part], logsumexp[:, part].contiguous(), grad_out[:, part], **options,
            )  # fmt: skip
            dk[:, kv_part] += dk_part
            dv[:, kv_part] += dv_part
    gradients = zip((dq, dk, dv, dweight), (q, k, v, weight), strict=True)
    dq, dk, dv, dweight = (grad.to(x.dtype) for grad, x in gradients)
    return dq, dk, dv, dweight
