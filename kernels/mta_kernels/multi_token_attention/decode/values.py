"""The kernels of a decode step that read V, a share of one KV head's keys a program, and add the shares up."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from mta_kernels.conv_attention.triton.decode_shares import _cache_rows, _load_rows
from mta_kernels.multi_token_attention.decode.keys import _share


@triton.jit
def _mta_decode_values_kernel(
    v_ptr, mixed_ptr, lengths_ptr, table_ptr, partial_ptr,
    stride_vb, stride_vh, stride_vn, stride_vd, stride_l, stride_tb, stride_tp, stride_cb, stride_ch, kv_heads, splits,
    GROUP: tl.constexpr, ROWS: tl.constexpr, HEAD_DIM: tl.constexpr, PAGE_SIZE: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr, DEPENDENT_LAUNCH: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Partial outputs of a share of the keys, whose sum over shares is the output: partial `[B, splits, H, D]`.

    mixed `[B, H, keys]` holds what the values are multiplied with.
    """
    if DEPENDENT_LAUNCH:
        gdc_launch_dependents()
    sequence = tl.program_id(0) // splits
    split = tl.program_id(0) % splits
    batch = sequence // kv_heads
    kv_head = sequence % kv_heads
    length = tl.load(lengths_ptr + batch.to(tl.int64) * stride_l).to(tl.int32)
    start, stop = _share(length, split, splits)
    if PAGE_SIZE > 0:
        table_ptr += batch.to(tl.int64) * stride_tb
    else:
        v_ptr += batch.to(tl.int64) * stride_vb
    v_ptr += kv_head.to(tl.int64) * stride_vh
    dim = tl.arange(0, BLOCK_D)
    if DEPENDENT_LAUNCH:
        gdc_wait()

    row = tl.arange(0, ROWS)
    head = kv_head * GROUP + row
    column = tl.arange(0, BLOCK_N)
    mixed_ptr += batch.to(tl.int64) * stride_cb + head[:, None].to(tl.int64) * stride_ch
    accumulator = tl.zeros([ROWS, BLOCK_D], tl.float32)
    for first in tl.range(start, stop, BLOCK_N):
        key = first + column
        inside = key < stop
        groups = (first // 8 + column // 8) * 8  # of keys that one load is for
        mixed = tl.load(mixed_ptr + key[None, :], mask=(row < GROUP)[:, None] & (groups < stop)[None, :], other=0.0)
        rows = _cache_rows(table_ptr, key, inside, stride_vb, stride_vn, stride_tp, PAGE_SIZE)
        v = _load_rows(v_ptr, rows, dim, inside, stride_vd, HEAD_DIM)
        accumulator = tl.dot(mixed, v, accumulator, input_precision=PRECISION)
    place = (batch * splits + split).to(tl.int64) * (kv_heads * GROUP) + head
    there = (row < GROUP)[:, None] & (dim < HEAD_DIM)[None, :]
    tl.store(partial_ptr + place[:, None] * HEAD_DIM + dim[None, :], accumulator, mask=there)


@triton.jit
def _mta_decode_merge_kernel(
    partial_ptr, out_ptr, splits, HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    CHUNK: tl.constexpr, DEPENDENT_LAUNCH: tl.constexpr,
):  # fmt: skip
    """out `[B, H, D]`: the sum of the shares' partial outputs, in their order."""
    if DEPENDENT_LAUNCH:
        gdc_wait()
    DIM_BLOCKS: tl.constexpr = (HEAD_DIM + BLOCK_D - 1) // BLOCK_D
    batch_head = (tl.program_id(0) // DIM_BLOCKS).to(tl.int64)
    dim = tl.program_id(0) % DIM_BLOCKS * BLOCK_D + tl.arange(0, BLOCK_D)
    first_row = batch_head // HEADS * splits * HEADS + batch_head % HEADS
    out = tl.zeros([CHUNK, BLOCK_D], tl.float32)
    for first in tl.range(0, splits, CHUNK):
        share = first + tl.arange(0, CHUNK)
        out += tl.load(
            partial_ptr + (first_row + share[:, None] * HEADS) * HEAD_DIM + dim[None, :],
            mask=(share < splits)[:, None] & (dim < HEAD_DIM)[None, :],
            other=0.0,
        )
    merged = tl.sum(out, 0).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + batch_head * HEAD_DIM + dim, merged, mask=dim < HEAD_DIM)
