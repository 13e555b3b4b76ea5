"""Rung 5, `triton-pointer`: one fused Triton kernel that computes every address and every mask itself.

Tokens are rows, as a projection leaves them: q `[M, heads * head_dim]`, one such matrix a sequence of the batch.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from mta_kernels.allocation import empty
from mta_kernels.conv_attention import choice
from mta_kernels.conv_attention.surroundings import on_device_of
from mta_kernels.conv_attention.triton.forward import value_block
from mta_kernels.conv_attention.triton.prepare import dot_precision
from mta_kernels.planned import launch_triton


@triton.jit
def _attention_pointer_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, scale, query_rows, key_rows, kv_heads,
    CAUSAL: tl.constexpr, HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """q `[B, M, heads * HEAD_DIM]`, k `[B, N, kv_heads * HEAD_DIM]`, v `[B, N, kv_heads * VALUE_DIM]`, all contiguous,
    give out `[B, M, heads * VALUE_DIM]`. The grid is (query blocks, heads, B).

    A tile's sides are powers of two: lanes past HEAD_DIM are masked, and add zero to every product.
    """
    head = tl.program_id(1)
    heads = tl.num_programs(1)
    batch = tl.program_id(2).to(tl.int64)  # a batch of long sequences has more than 2^31 numbers
    kv_head = head // (heads // kv_heads)

    query = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    key = tl.arange(0, BLOCK_N)
    dim = tl.arange(0, BLOCK_D)
    value_dim = tl.arange(0, BLOCK_V)

    q_row = (batch * query_rows + query) * (heads * HEAD_DIM)
    k_row = (batch * key_rows + key) * (kv_heads * HEAD_DIM)
    v_row = (batch * key_rows + key) * (kv_heads * VALUE_DIM)
    q_ptrs = q_ptr + q_row[:, None] + head * HEAD_DIM + dim[None, :]  # [BLOCK_M, BLOCK_D]
    k_ptrs = k_ptr + k_row[None, :] + kv_head * HEAD_DIM + dim[:, None]  # [BLOCK_D, BLOCK_N]: transposed as it loads
    v_ptrs = v_ptr + v_row[:, None] + kv_head * VALUE_DIM + value_dim[None, :]  # [BLOCK_N, BLOCK_V]

    q = tl.load(q_ptrs, mask=(query < query_rows)[:, None] & (dim < HEAD_DIM)[None, :], other=0.0)
    accumulator = tl.zeros([BLOCK_M, BLOCK_V], tl.float32)
    running_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    running_sum = tl.zeros([BLOCK_M], tl.float32)

    for first_key in tl.range(0, key_rows, BLOCK_N):
        inside = first_key + key < key_rows
        k = tl.load(k_ptrs, mask=inside[None, :] & (dim < HEAD_DIM)[:, None], other=0.0)
        v = tl.load(v_ptrs, mask=inside[:, None] & (value_dim < VALUE_DIM)[None, :], other=0.0)

        scores = tl.dot(q, k, input_precision=PRECISION) * scale  # [BLOCK_M, BLOCK_N]
        seen = inside[None, :]
        if CAUSAL:
            seen = seen & ((first_key + key)[None, :] <= query[:, None] + (key_rows - query_rows))
        scores = tl.where(seen, scores, float("-inf"))

        # The first key is seen by every query, so that the maximum is finite from the first tile on.
        new_max = tl.maximum(running_max, tl.max(scores, 1))
        rescale = tl.exp(running_max - new_max)
        p = tl.exp(scores - new_max[:, None])
        running_sum = running_sum * rescale + tl.sum(p, 1)
        accumulator = tl.dot(p.to(v.dtype), v, accumulator * rescale[:, None], input_precision=PRECISION)
        running_max = new_max

        k_ptrs += BLOCK_N * kv_heads * HEAD_DIM
        v_ptrs += BLOCK_N * kv_heads * VALUE_DIM

    out = (accumulator / running_sum[:, None]).to(out_ptr.dtype.element_ty)
    out_row = (batch * query_rows + query) * (heads * VALUE_DIM)
    out_ptrs = out_ptr + out_row[:, None] + head * VALUE_DIM + value_dim[None, :]
    tl.store(out_ptrs, out, mask=(query < query_rows)[:, None] & (value_dim < VALUE_DIM)[None, :])


def attention(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float) -> Tensor:
    """Attention of `q [B, Hq, M, D]`, `k [B, Hkv, N, D]`, `v [B, Hkv, N, Dv]`: `[B, Hq, M, Dv]` in q's dtype.

    Causal: the queries are the last M of N positions. The kernel takes the packed layout; what is not a transposed
    view of `[B, N, heads, D]` is copied into it. The output is such a view. float32 is multiplied as float32.
    """
    batch, heads, query_rows, head_dim = q.shape
    kv_heads, key_rows, value_dim = v.shape[1:]
    packed = [x.transpose(1, 2).contiguous() for x in (q, k, v)]
    out = empty(batch, query_rows, heads, value_dim, dtype=q.dtype, device=q.device)
    block_d, block_v = (value_block(x) for x in (q, v))
    block_m, block_n, num_warps = tiles(max(block_d, block_v), q.element_size())
    with on_device_of(q):
        launch_triton(
            _attention_pointer_kernel, (triton.cdiv(query_rows, block_m), heads, batch),
            *packed, out, scale, query_rows, key_rows, kv_heads,
            CAUSAL=causal, HEAD_DIM=head_dim, VALUE_DIM=value_dim,
            BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_D=block_d, BLOCK_V=block_v,
            PRECISION=dot_precision(q.dtype), num_warps=num_warps, num_stages=2,
        )  # fmt: skip
    return out.transpose(1, 2)


def tiles(columns: int, element_size: int) -> tuple[int, int, int]:
    """BLOCK_M, BLOCK_N and warps whose tiles, two each of keys and values, fit in 99 KiB: any GPU from sm_80."""
    if element_size == 4:
        return 32, 32 if columns <= 128 else 16, 8
    return 64, 64 if columns <= 128 else 32, 4


def unsupported(*, device: torch.device, dtype: torch.dtype, head_dim: int) -> str | None:
    """Why this rung cannot run with these here, or None: it takes head dims from 16 to 256."""
    return choice.unsupported("triton", device=device, dtype=dtype, head_dim=head_dim, query_taps=1, key_taps=1)
