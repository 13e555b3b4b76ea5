"""dk and dv: products of what backward.cu left of a chunk of rows, in Triton."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from mta_kernels.conv_attention.triton.backward_scores import ALIGNED, Chunk, summed_keys
from mta_kernels.conv_attention.triton.launch import cdiv, launch, operand

ROW_STEP = 64  # rows of p and ds are read from multiples of it on: backward.cu clears what no tile holds


@triton.jit(do_not_specialize=("first_row", "rows", "keys", "written"))  # one kernel for all chunks
def _add_product_kernel(
    scratch_desc, right_desc, out_ptr, divisor_ptr, seen_by_ptr,
    first_row, rows, keys, query_rows, key_rows, written, columns,
    CAUSAL: tl.constexpr, SPANS: tl.constexpr, ALIGNED: tl.constexpr, SHIFT: tl.constexpr,
    BLOCK_N: tl.constexpr, ROW_STEP: tl.constexpr,
):  # fmt: skip
    """`out[j] += sum_i scratch[i, j] * right[first_row + i] / divisor`, for ALIGNED places of scratch, BLOCK_N columns.

    scratch `[B*Hq, rows, places]` as backward.cu writes it, right `[B*Hq, M, columns]`, divisor `[B*Hq]`,
    out `[B*Hq, N, columns]` float32, of which the first `written` rows hold a sum already.
    """
    column_blocks = tl.cdiv(columns, BLOCK_N)
    place_blocks = tl.cdiv(keys + SHIFT, ALIGNED)
    # Neighbours share the tiles of scratch, the larger operand.
    first_column = tl.program_id(0) % column_blocks * BLOCK_N
    block = tl.program_id(0) // column_blocks % place_blocks
    batch_head = tl.program_id(0) // (column_blocks * place_blocks)
    first_place = block * ALIGNED
    start = 0
    end = rows
    if CAUSAL:
        start = tl.maximum(first_place - SHIFT - (key_rows - query_rows) - first_row, 0) // ROW_STEP * ROW_STEP
    if SPANS:  # its keys are of two blocks of ALIGNED
        last_block = tl.cdiv(key_rows, ALIGNED) - 1
        start = tl.maximum(start, tl.load(seen_by_ptr + tl.maximum(block - 1, 0)) - first_row)
        end = tl.minimum(end, tl.load(seen_by_ptr + last_block + 1 + tl.minimum(block, last_block)) - first_row)
    total = tl.zeros([ALIGNED, BLOCK_N], tl.float32)
    for row in tl.range(start, end, ROW_STEP):
        left = scratch_desc.load([batch_head, row, first_place]).reshape(ROW_STEP, ALIGNED)
        right = right_desc.load([batch_head, first_row + row, first_column]).reshape(ROW_STEP, BLOCK_N)
        total = tl.dot(left.T, right, total)
    total /= tl.load(divisor_ptr + batch_head)
    # A tile of 64 keys lies as threads hold it: place 32 a + 8 b + 2 c + d is key 32 a + 8 c + 2 b + d.
    place = first_place + tl.arange(0, ALIGNED)
    key = place // 32 * 32 + place % 8 // 2 * 8 + place % 32 // 8 * 2 + place % 2 - SHIFT
    column = first_column + tl.arange(0, BLOCK_N)
    inside = ((key >= 0) & (key < keys))[:, None] & (column < columns)[None, :]
    out_ptr += (batch_head.to(tl.int64) * key_rows + key[:, None]) * columns + column[None, :]
    total += tl.load(out_ptr, mask=inside & (key < written)[:, None], other=0.0)
    tl.store(out_ptr, total, mask=inside)


def add_product(scratch: Tensor, right: Tensor, out: Tensor, divisor: Tensor, chunk: Chunk, shift: int) -> None:
    """Add a chunk's sum to `out`: of p times output gradients for dv, of ds times queries for dk.

    scratch `[B*Hq, rows, places]` in 16 bits, where key j has the place of `j + shift` in its tile; right
    `[B*Hq, M, columns]`, out `[B*Hq, N, columns]` float32, divisor `[B*Hq]` float32. What out holds is counted where
    the chunks before this one wrote it.
    """
    columns = out.shape[2]
    block_n, stages = (64, 4) if columns <= 64 else (128, 3)
    launch(
        _add_product_kernel,
        cdiv(columns, block_n) * cdiv(chunk.keys + shift, ALIGNED) * scratch.shape[0], chunk.signature,
        operand(scratch, [1, ROW_STEP, ALIGNED], True), operand(right, [1, ROW_STEP, block_n], True),
        out, divisor, chunk.seen_by,
        chunk.first_row, chunk.rows, chunk.keys, chunk.query_rows, chunk.key_rows, summed_keys(chunk), columns,
        CAUSAL=chunk.causal, SPANS=chunk.spans is not None, ALIGNED=ALIGNED, SHIFT=shift,
        BLOCK_N=block_n, ROW_STEP=ROW_STEP, num_warps=4, num_stages=stages,
    )  # fmt: skip
