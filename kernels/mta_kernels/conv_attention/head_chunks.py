"""Gradients of some heads at a time, by the kernels of any backend."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from mta_kernels.allocation import empty
from mta_kernels.backend import Gradients
from mta_kernels.conv_attention.arguments import head_parts
from mta_kernels.conv_attention.surroundings import on_device_of, without_autocast
from mta_kernels.operation import Operation


def gradients_by_chunks(
    backward: Callable[..., Gradients], operation: Operation, q: Tensor, k: Tensor, v: Tensor, weight: Tensor,
    out: Tensor, logsumexp: Tensor, grad_out: Tensor, *, head_chunk: int = 0, spans: Tensor | None = None,
) -> Gradients:  # fmt: skip
    """Gradients of a forward in q, k, v and weight, in their shapes and dtypes.

    Takes the arguments of the forward, its results `out [B, Hq, M, D]` and `logsumexp [B, Hq, M]`, and the gradient
    `grad_out [B, Hq, M, D]`. Tensors have any strides. Calls `backward(operation, *tensors, spans)` for `head_chunk`
    query heads at a time, all if 0. It receives a contiguous logsumexp and returns gradients in float32 or in the
    dtypes of their tensors, the same from run to run.
    """
    parts = head_parts(q.shape[1], k.shape[1], head_chunk)
    with on_device_of(q), without_autocast(q):
        if len(parts) == 1:
            found = backward(operation, q, k, v, weight, out, logsumexp.contiguous(), grad_out, spans)
            dq, dk, dv, dweight = found
        else:
            dq = empty(q.shape, dtype=q.dtype, device=q.device)
            # Query heads of one KV head may be in several parts.
            dk, dv = (torch.zeros(x.shape, dtype=torch.float32, device=q.device) for x in (k, v))
            dweight = empty(weight.shape, dtype=torch.float32, device=q.device)
            for part, kv_part in parts:
                dq[:, part], dk_part, dv_part, dweight[part] = backward(
                    operation, q[:, part], k[:, kv_part], v[:, kv_part], weight[part],
                    out[:, part], logsumexp[:, part].contiguous(), grad_out[:, part], spans,
                )  # fmt: skip
                dk[:, kv_part] += dk_part
                dv[:, kv_part] += dv_part
        gradients = zip((dq, dk, dv, dweight), (q, k, v, weight), strict=True)
        dq, dk, dv, dweight = (grad.to(x.dtype) for grad, x in gradients)
        return dq, dk, dv, dweight
