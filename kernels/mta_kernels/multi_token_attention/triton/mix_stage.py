"""The forward where heads are mixed and nothing is convolved, by two kernels in CUDA C++.

They store exponentials where the stages store scores. They round scores as `score_product` does, from which the
backward makes probabilities again by their logsumexp.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mta_kernels.allocation import empty
from mta_kernels.multi_token_attention.mix_cuda import keep_logits, mix_values
from mta_kernels.multi_token_attention.mixers import Mixers
from mta_kernels.multi_token_attention.triton.chunks import Chunk
from mta_kernels.operation import Operation


def run_chunks(
    operation: Operation, q: Tensor, k: Tensor, v: Tensor, mixers: Mixers, plan: list[Chunk], sequences: int, size: int,
    out: Tensor, logsumexp: Tensor,
) -> None:  # fmt: skip
    """Write out `[B, H, M, D]` and logsumexp `[B, H, M]`, a chunk of `sequences` sequences at a time.

    q, k and v are of `rows_of`; `size` numbers hold the stored scores of any chunk of `plan`.
    """
    batch, heads = q.shape[:2]
    memory = empty(size, dtype=q.dtype, device=q.device)
    scales = empty(sequences * heads * plan[0].rows, dtype=torch.float32, device=q.device)
    for first in range(0, batch, sequences):
        part = slice(first, first + sequences)
        of_q, of_k, of_v = q[part], k[part], v[part]
        for chunk in plan:
            rows = slice(chunk.first_row, chunk.first_row + chunk.rows)
            kept = chunk.buffer(memory, of_q.shape[0], heads)
            scale = scales[: kept.shape[0] * heads * chunk.rows].view(kept.shape[:3])
            keep_logits(
                of_q, of_k, mixers.pre_mix, kept, scale, logsumexp[part, :, rows], scale=operation.scale,
                first_row=chunk.first_row, keys=chunk.keys, causal=chunk.causal,
            )  # fmt: skip
            mix_values(
                kept, scale, mixers.post_mix, of_v, out[part, :, rows], first_position=chunk.first_position,
                keys=chunk.keys, causal=chunk.causal,
            )  # fmt: skip
