"""Rung 6, `triton-descriptor`: the same kernel, with tiles described once and advanced in a loop.

On GPUs before Hopper the compiler turns descriptors into the pointers of rung 5. Layouts are head-major, and K is
stored transposed, `[D, N]`, as the product reads it.
"""

from __future__ import annotations

import contextvars

import torch
import triton
import triton.language as tl
from torch import Tensor

from mta_kernels.allocation import empty
from mta_kernels.conv_attention.surroundings import on_device_of
from mta_kernels.conv_attention.triton.forward import value_block
from mta_kernels.conv_attention.triton.prepare import dot_precision, row_pitch
from mta_kernels.planned import launch_triton
from mta_ladder import triton_pointer
from mta_ladder.triton_pointer import tiles


@triton.jit
def _attention_descriptor_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, scale, group, query_rows, key_rows, q_pitch, k_pitch, v_pitch, out_pitch,
    CAUSAL: tl.constexpr, HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr,
    ALIGNMENT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """q `[B*Hq, M, HEAD_DIM]`, k `[B*Hkv, HEAD_DIM, N]` and v `[B*Hkv, N, VALUE_DIM]` give out `[B*Hq, M, VALUE_DIM]`.

    A pitch is the distance from row to row, in units of 16 bytes (ALIGNMENT elements). So the compiler can prove from
    the product that rows are aligned, as the copy engine needs.
    """
    head = tl.program_id(1).to(tl.int64)
    kv_head = head // group
    q_pitch *= ALIGNMENT
    k_pitch *= ALIGNMENT
    v_pitch *= ALIGNMENT
    out_pitch *= ALIGNMENT
    q_desc = tl.make_tensor_descriptor(
        q_ptr + head * query_rows * q_pitch,
        shape=[query_rows, HEAD_DIM], strides=[q_pitch, 1], block_shape=[BLOCK_M, BLOCK_D],
    )  # fmt: skip
    k_desc = tl.make_tensor_descriptor(
        k_ptr + kv_head * HEAD_DIM * k_pitch,
        shape=[HEAD_DIM, key_rows], strides=[k_pitch, 1], block_shape=[BLOCK_D, BLOCK_N],
    )  # fmt: skip
    v_desc = tl.make_tensor_descriptor(
        v_ptr + kv_head * key_rows * v_pitch,
        shape=[key_rows, VALUE_DIM], strides=[v_pitch, 1], block_shape=[BLOCK_N, BLOCK_V],
    )  # fmt: skip
    out_desc = tl.make_tensor_descriptor(
        out_ptr + head * query_rows * out_pitch,
        shape=[query_rows, VALUE_DIM], strides=[out_pitch, 1], block_shape=[BLOCK_M, BLOCK_V],
    )  # fmt: skip

    first_query = tl.program_id(0) * BLOCK_M
    query = first_query + tl.arange(0, BLOCK_M)
    q = q_desc.load([first_query, 0])
    accumulator = tl.zeros([BLOCK_M, BLOCK_V], tl.float32)
    running_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    running_sum = tl.zeros([BLOCK_M], tl.float32)

    for first_key in tl.range(0, key_rows, BLOCK_N):
        scores = tl.dot(q, k_desc.load([0, first_key]), input_precision=PRECISION) * scale  # [BLOCK_M, BLOCK_N]
        # Masked before the maximum is taken. A key past the end has a score of zero: where all true scores are far
        # below, it would win the maximum, and every exponential would underflow.
        key = first_key + tl.arange(0, BLOCK_N)
        seen = (key < key_rows)[None, :]
        if CAUSAL:
            seen = seen & (key[None, :] <= query[:, None] + (key_rows - query_rows))
        scores = tl.where(seen, scores, float("-inf"))

        new_max = tl.maximum(running_max, tl.max(scores, 1))
        rescale = tl.exp(running_max - new_max)
        p = tl.exp(scores - new_max[:, None])
        running_sum = running_sum * rescale + tl.sum(p, 1)
        v = v_desc.load([first_key, 0])  # [BLOCK_N, BLOCK_V]
        accumulator = tl.dot(p.to(v.dtype), v, accumulator * rescale[:, None], input_precision=PRECISION)
        running_max = new_max

    out_desc.store([first_query, 0], (accumulator / running_sum[:, None]).to(out_ptr.dtype.element_ty))


def attention(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float) -> Tensor:
    """Attention of `q [B, Hq, M, D]`, `k [B, Hkv, N, D]`, `v [B, Hkv, N, Dv]`: `[B, Hq, M, Dv]` in q's dtype.

    Causal: the queries are the last M of N positions. K is copied unless it is a view of transposed memory
    `[B, Hkv, D, N]`; q and v are copied unless they are contiguous; rows that are no multiple of 16 bytes are padded.
    float32 is multiplied as float32.
    """
    batch, heads, query_rows, head_dim = q.shape
    kv_heads, key_rows, value_dim = v.shape[1:]
    queries, keys, values = head_major(q), head_major(k.transpose(2, 3)), head_major(v)
    out = empty(batch, heads, query_rows, row_pitch(v), dtype=q.dtype, device=q.device)
    block_d, block_v = (value_block(x) for x in (q, v))
    block_m, block_n, num_warps = tiles(max(block_d, block_v), q.element_size())

    def launch() -> None:
        # A descriptor made in the kernel needs memory: Triton calls its allocator. The setting lasts for this context
        # alone; a global one would replace the caller's.
        triton.set_allocator(lambda size, alignment, stream: empty(size, dtype=torch.int8, device=q.device))
        launch_triton(
            _attention_descriptor_kernel, (triton.cdiv(query_rows, block_m), batch * heads),
            queries, keys, values, out, scale, heads // kv_heads, query_rows, key_rows,
            *(x.shape[3] * q.element_size() // 16 for x in (queries, keys, values, out)),
            CAUSAL=causal, HEAD_DIM=head_dim, VALUE_DIM=value_dim,
            BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_D=block_d, BLOCK_V=block_v,
            ALIGNMENT=16 // q.element_size(), PRECISION=dot_precision(q.dtype), num_warps=num_warps, num_stages=2,
        )  # fmt: skip

    with on_device_of(q):
        contextvars.copy_context().run(launch)
    return out[..., :value_dim]


def head_major(x: Tensor) -> Tensor:
    """`x [B, H, rows, columns]`, contiguous, columns padded to a multiple of 16 bytes: itself or a copy."""
    pitch = row_pitch(x)
    if x.is_contiguous() and pitch == x.shape[3] and x.data_ptr() % 16 == 0:
        return x
    copy = empty(*x.shape[:3], pitch, dtype=x.dtype, device=x.device)
    copy[..., : x.shape[3]] = x
    return copy


unsupported = triton_pointer.unsupported  # takes the same
