"""Rung 7, `triton-fmha`: fused multi-head attention as used in practice (docs/design/plain-attention-ladder.md).

On Hopper and later, tiles come by the copy engine (TMA), through descriptors made on the host.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from mta_kernels.allocation import empty
from mta_kernels.conv_attention.surroundings import on_device_of
from mta_kernels.conv_attention.triton.forward import value_block
from mta_kernels.conv_attention.triton.launch import call_signature, cdiv, describe_heads, launch, operand
from mta_kernels.conv_attention.triton.prepare import describable, dot_precision
from mta_kernels.gpu_limits import compiled_capability, shared_memory_limit
from mta_ladder import triton_pointer


@triton.jit
def _attention_fmha_kernel(
    q_desc, k_desc, v_desc, out_ptr,
    stride_qb, stride_qh, stride_qn, stride_kb, stride_kh, stride_kn, stride_vb, stride_vh, stride_vn,
    scale, heads, kv_heads, query_rows, key_rows,
    HOST_DESCRIPTORS: tl.constexpr, CAUSAL: tl.constexpr, HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr,
    ALIGNMENT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One program: BLOCK_M queries of one head. q `[B, Hq, M, HEAD_DIM]`, k `[B, Hkv, N, HEAD_DIM]` and
    v `[B, Hkv, N, VALUE_DIM]` are descriptors, or pointers where a GPU has no copy engine; out `[B, Hq, M, VALUE_DIM]`
    is contiguous. `scale` is in units of log2, and positive.
    """
    if not HOST_DESCRIPTORS:
        # The products prove to the compiler that rows begin at multiples of 16 bytes, so it loads 16 bytes at once.
        q_desc = describe_heads(q_desc, stride_qb * ALIGNMENT, stride_qh * ALIGNMENT, stride_qn * ALIGNMENT,
                                heads, query_rows, HEAD_DIM, BLOCK_M, BLOCK_D, ALIGNMENT)  # fmt: skip
        k_desc = describe_heads(k_desc, stride_kb * ALIGNMENT, stride_kh * ALIGNMENT, stride_kn * ALIGNMENT,
                                kv_heads, key_rows, HEAD_DIM, BLOCK_N, BLOCK_D, ALIGNMENT)  # fmt: skip
        v_desc = describe_heads(v_desc, stride_vb * ALIGNMENT, stride_vh * ALIGNMENT, stride_vn * ALIGNMENT,
                                kv_heads, key_rows, VALUE_DIM, BLOCK_N, BLOCK_V, ALIGNMENT)  # fmt: skip

    query_blocks = tl.cdiv(query_rows, BLOCK_M)
    batch_head = tl.program_id(0) // query_blocks
    # Causal blocks near the end have the most keys: start with them.
    first_query = (query_blocks - 1 - tl.program_id(0) % query_blocks) * BLOCK_M
    batch = batch_head // heads
    head = batch_head % heads
    kv_head = head // (heads // kv_heads)
    query = first_query + tl.arange(0, BLOCK_M)
    position = query + (key_rows - query_rows)  # the last key that a causal query sees

    if CAUSAL:
        first_position = first_query + (key_rows - query_rows)
        all_see_end = (first_position + 1) // BLOCK_N * BLOCK_N
        end = tl.minimum(first_position + BLOCK_M, key_rows)
    else:
        all_see_end = key_rows // BLOCK_N * BLOCK_N
        end = key_rows

    q = q_desc.load([batch, head, first_query, 0]).reshape(BLOCK_M, BLOCK_D)
    accumulator = tl.zeros([BLOCK_M, BLOCK_V], tl.float32)
    running_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    running_sum = tl.zeros([BLOCK_M], tl.float32)
    for first_key in tl.range(0, all_see_end, BLOCK_N):
        scores = _score_tile(q, k_desc, batch, kv_head, first_key, BLOCK_N, BLOCK_D, PRECISION)
        v = v_desc.load([batch, kv_head, first_key, 0]).reshape(BLOCK_N, BLOCK_V)
        accumulator, running_max, running_sum = _attend(
            accumulator, running_max, running_sum, scores, v, scale, PRECISION
        )
    for first_key in tl.range(all_see_end, end, BLOCK_N):
        scores = _score_tile(q, k_desc, batch, kv_head, first_key, BLOCK_N, BLOCK_D, PRECISION)
        key = first_key + tl.arange(0, BLOCK_N)
        seen = key[None, :] <= position[:, None] if CAUSAL else (key < key_rows)[None, :]
        scores = tl.where(seen, scores, float("-inf"))
        v = v_desc.load([batch, kv_head, first_key, 0]).reshape(BLOCK_N, BLOCK_V)
        accumulator, running_max, running_sum = _attend(
            accumulator, running_max, running_sum, scores, v, scale, PRECISION
        )

    out = (accumulator / running_sum[:, None]).to(out_ptr.dtype.element_ty)
    dim = tl.arange(0, BLOCK_V)
    out_row = batch_head.to(tl.int64) * query_rows + query
    out_ptrs = out_ptr + out_row[:, None] * VALUE_DIM + dim[None, :]
    tl.store(out_ptrs, out, mask=(query < query_rows)[:, None] & (dim < VALUE_DIM)[None, :])


@triton.jit
def _score_tile(
    q, k_desc, batch, kv_head, first_key, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, PRECISION: tl.constexpr
):
    """Unscaled scores `[BLOCK_M, BLOCK_N]`."""
    k = k_desc.load([batch, kv_head, first_key, 0]).reshape(BLOCK_N, BLOCK_D)
    return tl.dot(q, k.T, input_precision=PRECISION)


@triton.jit
def _attend(accumulator, running_max, running_sum, scores, v, scale, PRECISION: tl.constexpr):
    """Online softmax (arXiv 2205.14135): take in one tile of unscaled scores and its values."""
    # Finite from the first tile on, whose first key every query sees.
    new_max = tl.maximum(running_max, tl.max(scores, 1) * scale)
    p = tl.exp2(scores * scale - new_max[:, None])  # [BLOCK_M, BLOCK_N]
    rescale = tl.exp2(running_max - new_max)
    running_sum = running_sum * rescale + tl.sum(p, 1)
    accumulator = tl.dot(p.to(v.dtype), v, accumulator * rescale[:, None], input_precision=PRECISION)
    return accumulator, new_max, running_sum


@dataclass(frozen=True)
class Tiles:
    """Tile sizes: queries and keys of a tile, warps of a program, pipeline stages of key and value tiles."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


def attention(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float) -> Tensor:
    """Attention of `q [B, Hq, M, D]`, `k [B, Hkv, N, D]`, `v [B, Hkv, N, Dv]`: `[B, Hq, M, Dv]` in q's dtype.

    Causal: the queries are the last M of N positions. Strides may be any; inputs whose head dims are not contiguous or
    whose rows do not start at multiples of 16 bytes are copied. float32 is multiplied as float32.
    """
    block_d, block_v = (value_block(x) for x in (q, v))
    chosen = tiles(
        max(block_d, block_v), q.element_size(), compiled_capability(q.device), shared_memory_limit(q.device)
    )
    return attention_with(chosen, q, k, v, causal=causal, scale=scale)


def attention_with(chosen: Tiles, q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float) -> Tensor:
    """`attention` with tiles of the given sizes."""
    if scale <= 0:  # the kernel scales after it has taken the maximum
        q, scale = q * scale, 1.0
    batch, heads, query_rows, head_dim = q.shape
    kv_heads, key_rows, value_dim = v.shape[1:]
    out = empty(batch, heads, query_rows, value_dim, dtype=q.dtype, device=q.device)
    block_d, block_v = (value_block(x) for x in (q, v))
    host_descriptors, alignment = compiled_capability(q.device)[0] >= 9, 16 // q.element_size()
    with on_device_of(q):
        q, k, v = describable(q), describable(k), describable(v)
        launch(
            _attention_fmha_kernel, cdiv(query_rows, chosen.block_m) * batch * heads,
            call_signature(q, k, v, out),
            operand(q, [1, 1, chosen.block_m, block_d], host_descriptors),
            operand(k, [1, 1, chosen.block_n, block_d], host_descriptors),
            operand(v, [1, 1, chosen.block_n, block_v], host_descriptors),
            out, *(stride // alignment for x in (q, k, v) for stride in x.stride()[:3]),
            scale / math.log(2), heads, kv_heads, query_rows, key_rows,
            HOST_DESCRIPTORS=host_descriptors, CAUSAL=causal, HEAD_DIM=head_dim, VALUE_DIM=value_dim,
            BLOCK_M=chosen.block_m, BLOCK_N=chosen.block_n, BLOCK_D=block_d, BLOCK_V=block_v,
            ALIGNMENT=alignment, PRECISION=dot_precision(q.dtype),
            num_warps=chosen.num_warps, num_stages=chosen.num_stages,
        )  # fmt: skip
    return out


def tiles(columns: int, element_size: int, compute_capability: tuple[int, int], shared_memory: int) -> Tiles:
    """Sizes for tiles of so many columns on a GPU of this capability with so many bytes of shared memory a program.

    They fit there and spill no registers, except float32 with 128 columns or more.
    """
    if element_size == 4:
        return Tiles(32, 32, num_warps=8, num_stages=2 if columns <= 128 else 1)
    if compute_capability[0] == 9 and columns <= 128:  # one warpgroup a program, the fastest of ten sizes on an H200
        return Tiles(64, 128, num_warps=4, num_stages=2) if columns <= 64 else Tiles(64, 64, num_warps=4, num_stages=3)
    if compute_capability[0] in (9, 10):  # wgmma, tcgen05: both operands of a product are read from shared memory
        return Tiles(128, 128 if columns <= 128 else 64, num_warps=8, num_stages=2)
    if columns <= 128:
        return Tiles(128, 64, num_warps=8, num_stages=3)
    large = shared_memory >= 112 * 1024  # sm_80; sm_86, sm_89 and sm_120 have 99 KiB
    return Tiles(64 if large else 32, 64 if large else 32, num_warps=8, num_stages=2)


unsupported = triton_pointer.unsupported  # takes the same
