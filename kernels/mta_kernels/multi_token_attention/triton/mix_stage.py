"""The one place that chooses whose kernels do the forward where heads are mixed and nothing is convolved.

CUDA's two kernels store exponentials where the stages store scores. They round scores as `score_product` does, from
which the backward makes probabilities again by their logsumexp.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from mta_kernels.multi_token_attention.mix_cuda import keep_logits, mix_unsupported, mix_values
from mta_kernels.multi_token_attention.mix_cuda.values_plan import constants_for as values_constants
from mta_kernels.multi_token_attention.mixers import Mixers
from mta_kernels.multi_token_attention.triton.chunks import Chunk
from mta_kernels.operation import Operation

CUDA_MIX = True  # whether to take CUDA's where they run; measurements turn it off
# Where they were the faster ones when measured (docs/decisions/044): up to this head dim, beyond from so many keys on;
# and where a chunk has tiles for so many blocks.
SMALL_HEAD_DIM, MANY_KEYS, LEAST_BLOCKS = 64, 8192, 64


def takes(operation: Operation, q: Tensor, documents: Tensor | None) -> bool:
    """Whether `run_chunks` may be called, instead of the stages."""
    if not CUDA_MIX or documents is not None or operation.pre_conv is not None or operation.post_conv is not None:
        return False
    return unsupported(q.device, q.dtype, q.shape[1], q.shape[3]) is None


def pays(q: Tensor, plan: list[Chunk], sequences: int) -> bool:
    """Whether it is faster, with chunks of so many `sequences`."""
    heads, head_dim = q.shape[1], q.shape[3]
    if head_dim > SMALL_HEAD_DIM and plan[-1].key_rows < MANY_KEYS:
        return False
    constants = values_constants(heads, head_dim)
    return sequences * -(-plan[0].rows // constants.rows) * constants.cluster >= LEAST_BLOCKS


@functools.lru_cache(256)
def unsupported(device: torch.device, dtype: torch.dtype, heads: int, head_dim: int) -> str | None:
    """`mix_unsupported`, asked once."""
    return mix_unsupported(device, dtype, heads, head_dim)


def run_chunks(
    operation: Operation, q: Tensor, k: Tensor, v: Tensor, mixers: Mixers, plan: list[Chunk], sequences: int, size: int,
    out: Tensor, logsumexp: Tensor,
) -> None:  # fmt: skip
    """Write out `[B, H, M, D]` and logsumexp `[B, H, M]`, a chunk of `sequences` sequences at a time.

    q, k and v are of `rows_of`; `size` numbers hold the stored scores of any chunk of `plan`.
    """
    batch, heads = q.shape[:2]
    memory = torch.empty(size, dtype=q.dtype, device=q.device)
    scales = torch.empty(sequences * heads * plan[0].rows, dtype=torch.float32, device=q.device)
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
