"""The fused forward for H100 and H200 in Gluon, Triton's lower language: head dim 64 in 16 bits, see `gluon_computes`.

As `forward.py`, but a program has three parts: two warpgroups of 64 queries each, which share the tiles of keys and
values that one more warp copies. So the tensor cores multiply one tile while the softmax of another is computed, and a
tile is copied once for 128 queries.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma, warpgroup_mma_wait
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.extra.cuda import gdc_wait

from mta_kernels.conv_attention.triton.launch import cdiv, dependent_launches, launch
from mta_kernels.conv_attention.triton.prepare import LN_2, Prepared
from mta_kernels.gpu_limits import shared_memory_limit

LOWEST = gl.constexpr(torch.finfo(torch.float32).min)
ROWS = gl.constexpr(64)  # queries of a warpgroup
COLUMNS = gl.constexpr(64)  # keys of a tile
MAX_STAGES = 4
# Registers a thread of the second warpgroup and of the copying warp; the first warpgroup takes what is left.
MULTIPLYING_REGISTERS, COPYING_REGISTERS = gl.constexpr(240), gl.constexpr(24)


@gluon.jit
def _conv_attention_fwd_gluon_kernel(
    q_ptr, k_head_desc, k_tail_desc, v_desc, band_ptr, out_ptr, logsumexp_ptr,
    stride_qh, stride_qn, stride_ob, stride_oh, stride_lb, stride_lh,
    heads, k_group, v_group, query_rows, key_rows, heads_at_once, all_heads,
    CAUSAL: gl.constexpr, BAND: gl.constexpr, BAND_PITCH: gl.constexpr,
    HEAD_DEPTH: gl.constexpr, TAIL_DEPTH: gl.constexpr, HEAD_DIM: gl.constexpr, STAGES: gl.constexpr,
    DEPENDENT_LAUNCH: gl.constexpr,
):  # fmt: skip
    """One program: 128 queries of one head. Arguments as of `_conv_attention_fwd_kernel`.

    The depth is HEAD_DEPTH + TAIL_DEPTH, both powers of two, and the keys come in two slices of so many columns.
    """
    if DEPENDENT_LAUNCH:
        gdc_wait()
    query_blocks = (query_rows + 2 * ROWS - 1) // (2 * ROWS)
    first_head = gl.program_id(0) // (heads_at_once * query_blocks) * heads_at_once
    heads_now = gl.minimum(heads_at_once, all_heads - first_head)
    program = gl.program_id(0) - first_head * query_blocks
    batch_head = first_head + program % heads_now
    first_query = (query_blocks - 1 - program // heads_now) * (2 * ROWS)
    batch = batch_head // heads
    head = batch_head % heads
    end = key_rows
    if CAUSAL:
        end = gl.minimum(first_query + key_rows - query_rows + 2 * ROWS, key_rows)
    tiles = (end + COLUMNS - 1) // COLUMNS

    dtype: gl.constexpr = v_desc.dtype
    k_head = gl.allocate_shared_memory(dtype, [STAGES, 1, COLUMNS, HEAD_DEPTH], k_head_desc.layout)
    k_tail = gl.allocate_shared_memory(dtype, [STAGES, 1, COLUMNS, TAIL_DEPTH], k_tail_desc.layout)
    values = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, COLUMNS, HEAD_DIM], v_desc.layout)
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(k_full.index(stage), count=1)
        mbarrier.init(k_empty.index(stage), count=2)
        mbarrier.init(v_full.index(stage), count=1)
        mbarrier.init(v_empty.index(stage), count=2)
    buffers = (k_head, k_tail, values, k_full, k_empty, v_full, v_empty)

    long_head = batch_head.to(gl.int64)
    pointers = (
        q_ptr + long_head * stride_qh,
        band_ptr + long_head * query_rows * BAND_PITCH,
        out_ptr + batch.to(gl.int64) * stride_ob + head.to(gl.int64) * stride_oh,
        logsumexp_ptr + batch.to(gl.int64) * stride_lb + head * stride_lh,
    )
    gl.warp_specialize(
        [
            (_multiply, (pointers, buffers, first_query, tiles, stride_qn, query_rows, key_rows,
                         CAUSAL, BAND, BAND_PITCH, HEAD_DEPTH, TAIL_DEPTH, HEAD_DIM, STAGES)),
            (_multiply, (pointers, buffers, first_query + ROWS, tiles, stride_qn, query_rows, key_rows,
                         CAUSAL, BAND, BAND_PITCH, HEAD_DEPTH, TAIL_DEPTH, HEAD_DIM, STAGES)),
            (_copy, (k_head_desc, k_tail_desc, v_desc, buffers, batch_head // k_group, batch, head // v_group, tiles,
                     HEAD_DEPTH, STAGES)),
        ],
        [4, 1],
        [MULTIPLYING_REGISTERS, COPYING_REGISTERS],
    )  # fmt: skip


@gluon.jit
def _copy(
    k_head_desc, k_tail_desc, v_desc, buffers, k_row, batch, v_head, tiles,
    HEAD_DEPTH: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """One warp: keys and values of all tiles into shared memory, the last tile first, as soon as there is room."""
    k_head, k_tail, values, k_full, k_empty, v_full, v_empty = buffers
    for i in range(tiles):
        stage = i % STAGES
        phase = i // STAGES & 1
        first_key = (tiles - 1 - i) * COLUMNS
        mbarrier.wait(k_empty.index(stage), phase ^ 1)
        full = k_full.index(stage)
        mbarrier.expect(full, k_head_desc.block_type.nbytes + k_tail_desc.block_type.nbytes)
        tma.async_copy_global_to_shared(k_head_desc, [k_row, first_key, 0], full, k_head.index(stage))
        tma.async_copy_global_to_shared(k_tail_desc, [k_row, first_key, HEAD_DEPTH], full, k_tail.index(stage))
        mbarrier.wait(v_empty.index(stage), phase ^ 1)
        full = v_full.index(stage)
        mbarrier.expect(full, v_desc.block_type.nbytes)
        tma.async_copy_global_to_shared(v_desc, [batch, v_head, first_key, 0], full, values.index(stage))


@gluon.jit
def _multiply(
    pointers, buffers, first, tiles, stride_qn, query_rows, key_rows,
    CAUSAL: gl.constexpr, BAND: gl.constexpr, BAND_PITCH: gl.constexpr,
    HEAD_DEPTH: gl.constexpr, TAIL_DEPTH: gl.constexpr, HEAD_DIM: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """One warpgroup: ROWS queries from `first` on, over the tiles in the order in which they are copied.

    Tile i has the keys from `(tiles - 1 - i) * COLUMNS` on.
    """
    MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, 16])
    MMA_OUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEAD_DIM, 16])
    q_ptr, band_ptr, out_ptr, logsumexp_ptr = pointers
    k_empty, v_empty = buffers[4], buffers[6]
    query = first + gl.arange(0, ROWS, layout=gl.SliceLayout(1, MMA))
    inside = query < query_rows
    q_head = _load_queries(q_ptr, first, query_rows, stride_qn, 0, HEAD_DEPTH, MMA)
    q_tail = _load_queries(q_ptr, first, query_rows, stride_qn, HEAD_DEPTH, TAIL_DEPTH, MMA)

    # The last key that each query sees, the end of those that any sees, and of those that all see without the band.
    position = key_rows - query_rows
    if CAUSAL:
        last_seen = query + position
        end = gl.minimum(first + position + ROWS, key_rows)
        unmasked_end = gl.maximum(first + position - BAND + 1, 0)
    else:
        last_seen = query * 0 + key_rows - 1
        end = key_rows
        unmasked_end = key_rows
    tile = tiles - (end + COLUMNS - 1) // COLUMNS
    unmasked = gl.maximum(tiles - unmasked_end // COLUMNS, tile)  # the first tile that needs no mask
    for skipped in range(0, tile):
        mbarrier.arrive(k_empty.index(skipped % STAGES), count=1)
        mbarrier.arrive(v_empty.index(skipped % STAGES), count=1)

    accumulator = gl.zeros([ROWS, HEAD_DIM], gl.float32, MMA_OUT)
    # Finite: rows that saw no key yet need no case of their own.
    running_max = gl.full([ROWS], LOWEST, gl.float32, gl.SliceLayout(1, MMA))
    running_sum = gl.zeros([ROWS], gl.float32, gl.SliceLayout(1, MMA))
    band_rows = band_ptr + query * BAND_PITCH
    scores = warpgroup_mma_wait(0, deps=[_begin_scores(q_head, q_tail, buffers, tile, STAGES, MMA)])
    mbarrier.arrive(k_empty.index(tile % STAGES), count=1)
    # The tensor cores multiply the keys of tile i while the softmax of the one before it is computed.
    for i in range(tile + 1, gl.minimum(unmasked + 1, tiles)):
        next_scores = _begin_scores(q_head, q_tail, buffers, i, STAGES, MMA)
        scores = _mask(scores, band_rows, inside, last_seen - (tiles - i) * COLUMNS, CAUSAL, BAND, MMA)
        p, rescale, running_max, running_sum = _softmax(running_max, running_sum, scores)
        accumulator = _begin_values(p, rescale, accumulator, buffers, i - 1, HEAD_DIM, STAGES, MMA_OUT)
        scores, accumulator = warpgroup_mma_wait(0, deps=[next_scores, accumulator])
        mbarrier.arrive(k_empty.index(i % STAGES), count=1)
        mbarrier.arrive(v_empty.index((i - 1) % STAGES), count=1)
    for i in range(unmasked + 1, tiles):
        next_scores = _begin_scores(q_head, q_tail, buffers, i, STAGES, MMA)
        p, rescale, running_max, running_sum = _softmax(running_max, running_sum, scores)
        accumulator = _begin_values(p, rescale, accumulator, buffers, i - 1, HEAD_DIM, STAGES, MMA_OUT)
        scores, accumulator = warpgroup_mma_wait(0, deps=[next_scores, accumulator])
        mbarrier.arrive(k_empty.index(i % STAGES), count=1)
        mbarrier.arrive(v_empty.index((i - 1) % STAGES), count=1)
    if unmasked >= tiles:
        scores = _mask(scores, band_rows, inside, last_seen, CAUSAL, BAND, MMA)
    p, rescale, running_max, running_sum = _softmax(running_max, running_sum, scores)
    accumulator = _begin_values(p, rescale, accumulator, buffers, tiles - 1, HEAD_DIM, STAGES, MMA_OUT)
    accumulator = warpgroup_mma_wait(0, deps=[accumulator])

    dim = gl.arange(0, HEAD_DIM, layout=gl.SliceLayout(0, MMA_OUT))
    row = first + gl.arange(0, ROWS, layout=gl.SliceLayout(1, MMA_OUT))
    out = accumulator / gl.convert_layout(running_sum, gl.SliceLayout(1, MMA_OUT))[:, None]
    gl.store(out_ptr + row[:, None] * HEAD_DIM + dim[None, :], out.to(out_ptr.dtype.element_ty),
             mask=(row < query_rows)[:, None])  # fmt: skip
    gl.store(logsumexp_ptr + query, (running_max + gl.log2(running_sum)) * LN_2, mask=inside)


@gluon.jit
def _load_queries(q_ptr, first, query_rows, stride_qn, start, WIDTH: gl.constexpr, MMA: gl.constexpr):
    """A slice of the queries in registers, as a product takes it: `[ROWS, WIDTH]`."""
    layout: gl.constexpr = gl.DotOperandLayout(0, MMA, 2)
    row = first + gl.arange(0, ROWS, layout=gl.SliceLayout(1, layout))
    column = start + gl.arange(0, WIDTH, layout=gl.SliceLayout(0, layout))
    return gl.load(q_ptr + row[:, None] * stride_qn + column[None, :], mask=(row < query_rows)[:, None], other=0.0)


@gluon.jit
def _begin_scores(q_head, q_tail, buffers, tile, STAGES: gl.constexpr, MMA: gl.constexpr):
    """Begin the scores of a tile, in base-2 units: `[ROWS, COLUMNS]`."""
    k_head, k_tail, k_full = buffers[0], buffers[1], buffers[3]
    stage = tile % STAGES
    mbarrier.wait(k_full.index(stage), tile // STAGES & 1)
    scores = gl.zeros([ROWS, COLUMNS], gl.float32, MMA)
    k = k_head.index(stage).reshape([COLUMNS, q_head.shape[1]]).permute((1, 0))
    scores = warpgroup_mma(q_head, k, scores, use_acc=False, is_async=True)
    k = k_tail.index(stage).reshape([COLUMNS, q_tail.shape[1]]).permute((1, 0))
    return warpgroup_mma(q_tail, k, scores, is_async=True)


@gluon.jit
def _begin_values(
    p, rescale, accumulator, buffers, tile, HEAD_DIM: gl.constexpr, STAGES: gl.constexpr, MMA_OUT: gl.constexpr
):  # fmt: skip
    """Begin adding the values of a tile, weighted with p: `[ROWS, HEAD_DIM]`."""
    values, v_full = buffers[2], buffers[5]
    stage = tile % STAGES
    p = gl.convert_layout(p.to(values.dtype), gl.DotOperandLayout(0, MMA_OUT, 2))
    accumulator = accumulator * gl.convert_layout(rescale, gl.SliceLayout(1, MMA_OUT))[:, None]
    mbarrier.wait(v_full.index(stage), tile // STAGES & 1)
    v = values.index(stage).reshape([COLUMNS, HEAD_DIM])
    return warpgroup_mma(p, v, accumulator, is_async=True)


@gluon.jit
def _mask(scores, band_rows, inside, last_column, CAUSAL: gl.constexpr, BAND: gl.constexpr, MMA: gl.constexpr):
    """A tile of scores with those of the band in place, and -inf behind the last column that a query sees."""
    column = gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, MMA))
    if CAUSAL:
        for diagonal in gl.static_range(BAND):
            near = gl.load(band_rows + diagonal, mask=inside, other=0.0)
            scores = gl.where(column[None, :] == (last_column - diagonal)[:, None], near[:, None], scores)
    return gl.where(column[None, :] <= last_column[:, None], scores, float("-inf"))


@gluon.jit
def _softmax(running_max, running_sum, scores):
    """Online softmax (arXiv 2205.14135) of one more tile of base-2 scores: as `_softmax` of `forward.py`."""
    new_max = gl.maximum(running_max, gl.max(scores, 1))
    p = gl.exp2(scores - new_max[:, None])
    rescale = gl.exp2(running_max - new_max)
    return p, rescale, new_max, running_sum * rescale + gl.sum(p, 1)


def launch_gluon(
    prepared: Prepared, out: Tensor, logsumexp: Tensor, causal: bool, heads_at_once: int, signature: Hashable
) -> None:
    """As `launch_forward` of `forward.py`, for what `gluon_computes` there."""
    batch, heads, query_rows, head_dim = out.shape
    queries, keys, values = prepared.queries, prepared.keys, prepared.values
    depth, dependent = queries.shape[2], dependent_launches(values)
    head_depth, tail_depth = slices(depth)
    element = gl.bfloat16 if values.dtype == torch.bfloat16 else gl.float16

    def describe(x: Tensor, *block: int) -> Any:
        layout = gl.NVMMASharedLayout.get_default_for(list(block), element)
        return TensorDescriptor(x, list(x.shape), list(x.stride()), list(block), layout)

    stage_bytes = COLUMNS.value * (depth + head_dim) * values.element_size()
    launch(
        _conv_attention_fwd_gluon_kernel, cdiv(query_rows, 2 * ROWS.value) * batch * heads, signature,
        queries, describe(keys, 1, COLUMNS.value, head_depth), describe(keys, 1, COLUMNS.value, tail_depth),
        describe(values, 1, 1, COLUMNS.value, head_dim), prepared.band, out, logsumexp,
        *queries.stride()[:2], *out.stride()[:2], *logsumexp.stride()[:2],
        heads, batch * heads // keys.shape[0], heads // values.shape[1], query_rows, values.shape[2],
        heads_at_once, batch * heads,
        CAUSAL=causal, BAND=prepared.band_width, BAND_PITCH=prepared.band.shape[-1],
        HEAD_DEPTH=head_depth, TAIL_DEPTH=tail_depth, HEAD_DIM=head_dim,
        STAGES=min(MAX_STAGES, (shared_memory_limit(values.device) - 1024) // stage_bytes),
        DEPENDENT_LAUNCH=dependent, num_warps=4, launch_pdl=dependent,
    )  # fmt: skip


def slices(depth: int) -> tuple[int, int]:
    """The depth in two: the largest power of two below it, and what is left."""
    head = 1 << ((depth - 1).bit_length() - 1)
    return head, depth - head
