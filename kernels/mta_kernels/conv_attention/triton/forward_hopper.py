"""The fused forward for Hopper in Gluon: two warpgroups share the tiles that a third one's warp has copied."""

from __future__ import annotations

import torch
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.extra.cuda import gdc_wait

from mta_kernels.conv_attention.triton.launch import cdiv, launch

LOWEST = gl.constexpr(torch.finfo(torch.float32).min)
LN_2 = gl.constexpr(0.6931471805599453)
ROWS = gl.constexpr(64)  # queries of a warpgroup
COLUMNS = gl.constexpr(64)  # keys of a tile


@gluon.jit
def _load_queries(q_ptr, first_row, rows, stride_n, start, WIDTH: gl.constexpr, layout: gl.constexpr):
    row = first_row + gl.arange(0, ROWS, layout=gl.SliceLayout(1, layout))
    column = start + gl.arange(0, WIDTH, layout=gl.SliceLayout(0, layout))
    return gl.load(q_ptr + row[:, None] * stride_n + column[None, :], mask=(row < rows)[:, None], other=0.0)


@gluon.jit
def _softmax(running_max, running_sum, scores):
    new_max = gl.maximum(running_max, gl.max(scores, 1))
    p = gl.exp2(scores - new_max[:, None])
    rescale = gl.exp2(running_max - new_max)
    return p, rescale, new_max, running_sum * rescale + gl.sum(p, 1)


@gluon.jit
def _scores(q_head, q_tail, k_head, k_tail, index, MMA: gl.constexpr, WIDTH: gl.constexpr, TAIL: gl.constexpr):
    """Begin the scores of a tile: two asynchronous products."""
    scores = gl.zeros([ROWS, COLUMNS], gl.float32, MMA)
    k = k_head.index(index).reshape([COLUMNS, WIDTH]).permute((1, 0))
    scores = warpgroup_mma(q_head, k, scores, use_acc=False, is_async=True)
    k = k_tail.index(index).reshape([COLUMNS, TAIL]).permute((1, 0))
    return warpgroup_mma(q_tail, k, scores, is_async=True)


@gluon.jit
def _mask(scores, band_rows, inside, last_column, BAND: gl.constexpr, MMA: gl.constexpr):
    column = gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, MMA))
    for diagonal in gl.static_range(BAND):
        near = gl.load(band_rows + diagonal, mask=inside, other=0.0)
        scores = gl.where(column[None, :] == (last_column - diagonal)[:, None], near[:, None], scores)
    return gl.where(column[None, :] <= last_column[:, None], scores, float("-inf"))


@gluon.jit
def _add_values(
    p, rescale, accumulator, v_buffers, v_full, i, HEAD_DIM: gl.constexpr, STAGES: gl.constexpr, MMA_OUT: gl.constexpr
):  # fmt: skip
    """Begin adding the values of tile i, weighted with p."""
    p = gl.convert_layout(p.to(v_buffers.dtype), gl.DotOperandLayout(0, MMA_OUT, 2))
    accumulator = accumulator * gl.convert_layout(rescale, gl.SliceLayout(1, MMA_OUT))[:, None]
    mbarrier.wait(v_full.index(i % STAGES), i // STAGES & 1)
    v = v_buffers.index(i % STAGES).reshape([COLUMNS, HEAD_DIM])
    return warpgroup_mma(p, v, accumulator, is_async=True)


@gluon.jit
def _multiply(
    q_ptr, band_ptr, out_ptr, logsumexp_ptr, k_head, k_tail, v_buffers, k_full, k_empty, v_full, v_empty,
    batch_head, first_query, tiles, stride_qh, stride_qn, out_offset, logsumexp_offset, query_rows, key_rows,
    PART: gl.constexpr, BAND: gl.constexpr, BAND_PITCH: gl.constexpr, HEAD: gl.constexpr, TAIL: gl.constexpr,
    HEAD_DIM: gl.constexpr, STAGES: gl.constexpr, OVERLAP: gl.constexpr,
):  # fmt: skip
    """One warpgroup: 64 queries of the program's 128, over key tiles from the diagonal back to the first."""
    MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, 16])
    MMA_OUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEAD_DIM, 16])
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, MMA, 2)
    OPERAND_OUT: gl.constexpr = gl.DotOperandLayout(0, MMA_OUT, 2)
    first = first_query + PART * ROWS
    query = first + gl.arange(0, ROWS, layout=gl.SliceLayout(1, MMA))
    inside = query < query_rows
    q_ptr += batch_head.to(gl.int64) * stride_qh
    q_head = _load_queries(q_ptr, first, query_rows, stride_qn, 0, HEAD, OPERAND)
    q_tail = _load_queries(q_ptr, first, query_rows, stride_qn, HEAD, TAIL, OPERAND)
    position = key_rows - query_rows
    # Tiles are numbered as they are copied, from the last; keys of tile i begin at (tiles - 1 - i) * COLUMNS.
    own_end = gl.minimum(first + position + ROWS, key_rows)
    tile = tiles - (own_end + COLUMNS - 1) // COLUMNS
    unmasked = tiles - gl.maximum(first + position - BAND + 1, 0) // COLUMNS  # the first tile that needs no mask
    for skipped in range(0, tile):
        mbarrier.arrive(k_empty.index(skipped % STAGES), count=1)
        mbarrier.arrive(v_empty.index(skipped % STAGES), count=1)
    accumulator = gl.zeros([ROWS, HEAD_DIM], gl.float32, MMA_OUT)
    running_max = gl.full([ROWS], LOWEST, gl.float32, gl.SliceLayout(1, MMA))
    running_sum = gl.zeros([ROWS], gl.float32, gl.SliceLayout(1, MMA))
    band_rows = band_ptr + (batch_head.to(gl.int64) * query_rows + query) * BAND_PITCH
    column = gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, MMA))
    if OVERLAP:
        stage = tile % STAGES
        mbarrier.wait(k_full.index(stage), tile // STAGES & 1)
        token = _scores(q_head, q_tail, k_head, k_tail, stage, MMA, HEAD, TAIL)
        scores = warpgroup_mma_wait(0, deps=[token])
        mbarrier.arrive(k_empty.index(stage), count=1)
        # The tensor cores multiply the next tile's keys while the softmax of this one is computed.
        for i in range(tile + 1, gl.minimum(unmasked + 1, tiles)):
            mbarrier.wait(k_full.index(i % STAGES), i // STAGES & 1)
            token = _scores(q_head, q_tail, k_head, k_tail, i % STAGES, MMA, HEAD, TAIL)
            scores = _mask(scores, band_rows, inside, query + position - (tiles - i) * COLUMNS, BAND, MMA)
            p, rescale, running_max, running_sum = _softmax(running_max, running_sum, scores)
            out_token = _add_values(p, rescale, accumulator, v_buffers, v_full, i - 1, HEAD_DIM, STAGES, MMA_OUT)
            scores, accumulator = warpgroup_mma_wait(0, deps=[token, out_token])
            mbarrier.arrive(k_empty.index(i % STAGES), count=1)
            mbarrier.arrive(v_empty.index((i - 1) % STAGES), count=1)
        for i in range(unmasked + 1, tiles):
            mbarrier.wait(k_full.index(i % STAGES), i // STAGES & 1)
            token = _scores(q_head, q_tail, k_head, k_tail, i % STAGES, MMA, HEAD, TAIL)
            p, rescale, running_max, running_sum = _softmax(running_max, running_sum, scores)
            out_token = _add_values(p, rescale, accumulator, v_buffers, v_full, i - 1, HEAD_DIM, STAGES, MMA_OUT)
            scores, accumulator = warpgroup_mma_wait(0, deps=[token, out_token])
            mbarrier.arrive(k_empty.index(i % STAGES), count=1)
            mbarrier.arrive(v_empty.index((i - 1) % STAGES), count=1)
        if unmasked >= tiles:
            scores = _mask(scores, band_rows, inside, query + position, BAND, MMA)
        p, rescale, running_max, running_sum = _softmax(running_max, running_sum, scores)
        out_token = _add_values(p, rescale, accumulator, v_buffers, v_full, tiles - 1, HEAD_DIM, STAGES, MMA_OUT)
        accumulator = warpgroup_mma_wait(0, deps=[out_token])
    else:
        for i in range(tile, unmasked):
            stage = i % STAGES
            phase = i // STAGES & 1
            mbarrier.wait(k_full.index(stage), phase)
            token = _scores(q_head, q_tail, k_head, k_tail, stage, MMA, HEAD, TAIL)
            last_column = query + position - (tiles - 1 - i) * COLUMNS
            scores = warpgroup_mma_wait(0, deps=[token])
            mbarrier.arrive(k_empty.index(stage), count=1)
            for diagonal in gl.static_range(BAND):
                near = gl.load(band_rows + diagonal, mask=inside, other=0.0)
                scores = gl.where(column[None, :] == (last_column - diagonal)[:, None], near[:, None], scores)
            scores = gl.where(column[None, :] <= last_column[:, None], scores, float("-inf"))
            p, rescale, running_max, running_sum = _softmax(running_max, running_sum, scores)
            accumulator = accumulator * gl.convert_layout(rescale, gl.SliceLayout(1, MMA_OUT))[:, None]
            mbarrier.wait(v_full.index(stage), phase)
            v = v_buffers.index(stage).reshape([COLUMNS, HEAD_DIM])
            p = gl.convert_layout(p.to(q_head.dtype), OPERAND_OUT)
            token = warpgroup_mma(p, v, accumulator, is_async=True)
            accumulator = warpgroup_mma_wait(0, deps=[token])
            mbarrier.arrive(v_empty.index(stage), count=1)
        if unmasked < tiles:
            stage = unmasked % STAGES
            mbarrier.wait(k_full.index(stage), unmasked // STAGES & 1)
            token = _scores(q_head, q_tail, k_head, k_tail, stage, MMA, HEAD, TAIL)
            scores = warpgroup_mma_wait(0, deps=[token])
            mbarrier.arrive(k_empty.index(stage), count=1)
            for i in range(unmasked + 1, tiles):
                # The tensor cores multiply the next tile's keys while the softmax of this one is computed.
                stage = i % STAGES
                mbarrier.wait(k_full.index(stage), i // STAGES & 1)
                token = _scores(q_head, q_tail, k_head, k_tail, stage, MMA, HEAD, TAIL)
                p, rescale, running_max, running_sum = _softmax(running_max, running_sum, scores)
                p = gl.convert_layout(p.to(q_head.dtype), OPERAND_OUT)
                accumulator = accumulator * gl.convert_layout(rescale, gl.SliceLayout(1, MMA_OUT))[:, None]
                before = (i - 1) % STAGES
                mbarrier.wait(v_full.index(before), (i - 1) // STAGES & 1)
                v = v_buffers.index(before).reshape([COLUMNS, HEAD_DIM])
                out_token = warpgroup_mma(p, v, accumulator, is_async=True)
                scores, accumulator = warpgroup_mma_wait(0, deps=[token, out_token])
                mbarrier.arrive(k_empty.index(stage), count=1)
                mbarrier.arrive(v_empty.index(before), count=1)
            p, rescale, running_max, running_sum = _softmax(running_max, running_sum, scores)
            p = gl.convert_layout(p.to(q_head.dtype), OPERAND_OUT)
            accumulator = accumulator * gl.convert_layout(rescale, gl.SliceLayout(1, MMA_OUT))[:, None]
            last = tiles - 1
            mbarrier.wait(v_full.index(last % STAGES), last // STAGES & 1)
            v = v_buffers.index(last % STAGES).reshape([COLUMNS, HEAD_DIM])
            token = warpgroup_mma(p, v, accumulator, is_async=True)
            accumulator = warpgroup_mma_wait(0, deps=[token])
    dim = gl.arange(0, HEAD_DIM, layout=gl.SliceLayout(0, MMA_OUT))
    row = first + gl.arange(0, ROWS, layout=gl.SliceLayout(1, MMA_OUT))
    out = accumulator / gl.convert_layout(running_sum, gl.SliceLayout(1, MMA_OUT))[:, None]
    gl.store(out_ptr + out_offset + row[:, None] * HEAD_DIM + dim[None, :], out.to(out_ptr.dtype.element_ty),
             mask=(row < query_rows)[:, None])  # fmt: skip
    gl.store(logsumexp_ptr + logsumexp_offset + query, (running_max + gl.log2(running_sum)) * LN_2, mask=inside)


@gluon.jit
def _copy(
    k_head_desc, k_tail_desc, v_desc, k_head, k_tail, v_buffers, k_full, k_empty, v_full, v_empty,
    k_row, batch, v_head, tiles, HEAD: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """One warp: keys and values of all tiles, the last one first."""
    for i in range(tiles):
        stage = i % STAGES
        phase = i // STAGES & 1
        first_key = (tiles - 1 - i) * COLUMNS
        mbarrier.wait(k_empty.index(stage), phase ^ 1)
        full = k_full.index(stage)
        mbarrier.expect(full, k_head_desc.block_type.nbytes + k_tail_desc.block_type.nbytes)
        tma.async_copy_global_to_shared(k_head_desc, [k_row, first_key, 0], full, k_head.index(stage))
        tma.async_copy_global_to_shared(k_tail_desc, [k_row, first_key, HEAD], full, k_tail.index(stage))
        mbarrier.wait(v_empty.index(stage), phase ^ 1)
        full = v_full.index(stage)
        mbarrier.expect(full, v_desc.block_type.nbytes)
        tma.async_copy_global_to_shared(v_desc, [batch, v_head, first_key, 0], full, v_buffers.index(stage))


@gluon.jit
def _forward_hopper_kernel(
    q_ptr, k_head_desc, k_tail_desc, v_desc, band_ptr, out_ptr, logsumexp_ptr,
    stride_qh, stride_qn, stride_ob, stride_oh, stride_lb, stride_lh,
    heads, k_group, v_group, query_rows, key_rows, heads_at_once, all_heads,
    BAND: gl.constexpr, BAND_PITCH: gl.constexpr, HEAD: gl.constexpr, TAIL: gl.constexpr, HEAD_DIM: gl.constexpr,
    PARTS: gl.constexpr, STAGES: gl.constexpr, OVERLAP: gl.constexpr, REGISTERS: gl.constexpr, DEPENDENT_LAUNCH: gl.constexpr,
):  # fmt: skip
    if DEPENDENT_LAUNCH:
        gdc_wait()
    BLOCK: gl.constexpr = PARTS * ROWS
    query_blocks = (query_rows + BLOCK - 1) // BLOCK
    first_head = gl.program_id(0) // (heads_at_once * query_blocks) * heads_at_once
    heads_now = gl.minimum(heads_at_once, all_heads - first_head)
    program = gl.program_id(0) - first_head * query_blocks
    batch_head = first_head + program % heads_now
    first_query = (query_blocks - 1 - program // heads_now) * BLOCK
    batch = batch_head // heads
    head = batch_head % heads
    end = gl.minimum(first_query + key_rows - query_rows + BLOCK, key_rows)
    tiles = (end + COLUMNS - 1) // COLUMNS
    out_offset = batch.to(gl.int64) * stride_ob + head.to(gl.int64) * stride_oh
    logsumexp_offset = batch.to(gl.int64) * stride_lb + head * stride_lh

    dtype: gl.constexpr = v_desc.dtype
    k_head = gl.allocate_shared_memory(dtype, [STAGES, 1, COLUMNS, HEAD], k_head_desc.layout)
    k_tail = gl.allocate_shared_memory(dtype, [STAGES, 1, COLUMNS, TAIL], k_tail_desc.layout)
    v_buffers = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, COLUMNS, HEAD_DIM], v_desc.layout)
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(k_full.index(i), count=1)
        mbarrier.init(k_empty.index(i), count=PARTS)
        mbarrier.init(v_full.index(i), count=1)
        mbarrier.init(v_empty.index(i), count=PARTS)

    if PARTS == 2:
        gl.warp_specialize(
            [
                (_multiply, (q_ptr, band_ptr, out_ptr, logsumexp_ptr, k_head, k_tail, v_buffers, k_full, k_empty, v_full,
                             v_empty, batch_head, first_query, tiles, stride_qh, stride_qn, out_offset,
                             logsumexp_offset, query_rows, key_rows, 0, BAND, BAND_PITCH, HEAD, TAIL, HEAD_DIM, STAGES, OVERLAP)),
                (_multiply, (q_ptr, band_ptr, out_ptr, logsumexp_ptr, k_head, k_tail, v_buffers, k_full, k_empty, v_full,
                             v_empty, batch_head, first_query, tiles, stride_qh, stride_qn, out_offset,
                             logsumexp_offset, query_rows, key_rows, 1, BAND, BAND_PITCH, HEAD, TAIL, HEAD_DIM, STAGES, OVERLAP)),
                (_copy, (k_head_desc, k_tail_desc, v_desc, k_head, k_tail, v_buffers, k_full, k_empty, v_full, v_empty,
                         batch_head // k_group, batch, head // v_group, tiles, HEAD, STAGES)),
            ],
            [4, 1],
            [REGISTERS, 24],
        )  # fmt: skip
    else:
        gl.warp_specialize([(_multiply, (q_ptr, band_ptr, out_ptr, logsumexp_ptr, k_head, k_tail, v_buffers, k_full, k_empty, v_full,
                             v_empty, batch_head, first_query, tiles, stride_qh, stride_qn, out_offset,
                             logsumexp_offset, query_rows, key_rows, 0, BAND, BAND_PITCH, HEAD, TAIL, HEAD_DIM, STAGES, OVERLAP)), (_copy, (k_head_desc, k_tail_desc, v_desc, k_head, k_tail, v_buffers, k_full, k_empty, v_full, v_empty,
                         batch_head // k_group, batch, head // v_group, tiles, HEAD, STAGES))], [1], [24])  # fmt: skip


PARTS = 2
STAGES = 4
OVERLAP = True
REGISTERS = 240


def launch_hopper(prepared, out, logsumexp, heads_at_once, dependent, signature) -> None:
    """Run the kernel on prepared inputs: causal, without spans, three slices of 128 columns, head dim 64."""
    batch, heads, query_rows, head_dim = out.shape
    queries, keys, values = prepared.queries, prepared.keys, prepared.values
    dtype = gl.bfloat16 if values.dtype == torch.bfloat16 else gl.float16

    def describe(x, block):
        return TensorDescriptor(x, list(x.shape), list(x.stride()), block, gl.NVMMASharedLayout.get_default_for(block, dtype))

    launch(
        _forward_hopper_kernel, cdiv(query_rows, 64 * PARTS) * batch * heads, signature,
        queries, describe(keys, [1, 64, 256]), describe(keys, [1, 64, 128]), describe(values, [1, 1, 64, head_dim]),
        prepared.band, out, logsumexp, *queries.stride()[:2], *out.stride()[:2], *logsumexp.stride()[:2],
        heads, batch * heads // keys.shape[0], heads // values.shape[1], query_rows, values.shape[2],
        heads_at_once, batch * heads,
        BAND=prepared.band_width, BAND_PITCH=prepared.band.shape[-1], HEAD=256, TAIL=128, HEAD_DIM=head_dim,
        PARTS=PARTS, STAGES=STAGES, OVERLAP=OVERLAP, REGISTERS=REGISTERS, DEPENDENT_LAUNCH=dependent, num_warps=4, launch_pdl=dependent,
        **({"maxnreg": 128} if PARTS == 1 else {}),
    )  # fmt: skip
