"""Products of the gradients of a chunk of scores with queries, keys and output gradients, summed in registers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from mta_kernels.allocation import empty
from mta_kernels.conv_attention.triton.backward_scores import (
    ALIGNED,
    BackwardChunk,
    aligned_keys,
    aligned_rows,
    loss_scale_of,
    summed_keys,
)
from mta_kernels.conv_attention.triton.launch import cdiv, describe_rows, launch, operand
from mta_kernels.conv_attention.triton.prepare import dot_precision
from mta_kernels.gpu_limits import compiled_capability, shared_memory_limit

WIDE_TILE_BYTES = 200 * 1024  # of shared memory for tiles of 256 columns; sm_120 has less


@triton.jit
def _product_factor(factor, loss_scale_ptr, units_ptr, batch_head, row, rows, SPANS: tl.constexpr):
    """The factor of rows of a head's product, whose left side has a loss scale and the right one units or None."""
    factor /= loss_scale_of(loss_scale_ptr, batch_head, row, rows, SPANS)
    if units_ptr is not None:
        factor *= tl.load(units_ptr + batch_head)
    return factor


@triton.jit
def _transposed_product_kernel(
    left_desc, right_desc, out_ptr, loss_scale_ptr, units_ptr, seen_by_ptr,
    stride_lh, stride_ln, stride_rh, stride_rn,
    first_row, rows, keys, query_rows, key_rows, written, columns, factor,
    HOST_DESCRIPTORS: tl.constexpr, CAUSAL: tl.constexpr, SPANS: tl.constexpr, ALIGNED: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, ALIGNMENT: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """`out[j] += factor * sum_i left[i, j] * right[first_row + i]`, for BLOCK_M keys j and BLOCK_N columns.

    left `[B*Hq, rows, keys]`, right `[B*Hq, M, columns]`, out `[B*Hq, N, columns]` float32, of which the first
    `written` rows hold a sum already. `factor` as in `_product_factor`.
    """
    if not HOST_DESCRIPTORS:
        left_desc = describe_rows(left_desc, stride_lh, stride_ln, rows, keys, BLOCK_K, BLOCK_M, ALIGNMENT)
        right_desc = describe_rows(right_desc, stride_rh, stride_rn, query_rows, columns, BLOCK_K, BLOCK_N, ALIGNMENT)
    column_blocks = tl.cdiv(columns, BLOCK_N)
    key_blocks = tl.cdiv(keys, BLOCK_M)
    # Neighbours share the tiles of left, the larger operand.
    first_column = tl.program_id(0) % column_blocks * BLOCK_N
    first_key = tl.program_id(0) // column_blocks % key_blocks * BLOCK_M
    batch_head = tl.program_id(0) // (column_blocks * key_blocks)
    start, end = aligned_rows(seen_by_ptr, first_key, first_row, rows, query_rows, key_rows, CAUSAL, SPANS, ALIGNED)
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for row in tl.range(start, end, BLOCK_K):
        left = left_desc.load([batch_head, row, first_key]).reshape(BLOCK_K, BLOCK_M)
        right = right_desc.load([batch_head, first_row + row, first_column]).reshape(BLOCK_K, BLOCK_N)
        total = tl.dot(left.T, right, total, input_precision=PRECISION)
    key = first_key + tl.arange(0, BLOCK_M)
    total *= _product_factor(factor, loss_scale_ptr, units_ptr, batch_head, key, key_rows, SPANS)
    column = first_column + tl.arange(0, BLOCK_N)
    inside = (key < keys)[:, None] & (column < columns)[None, :]
    out_ptr += (batch_head.to(tl.int64) * key_rows + key[:, None]) * columns + column[None, :]
    total += tl.load(out_ptr, mask=inside & (key < written)[:, None], other=0.0)
    tl.store(out_ptr, total, mask=inside)


@triton.jit
def _row_product_kernel(
    left_desc, right_desc, out_ptr, loss_scale_ptr, units_ptr, spans_ptr,
    stride_lh, stride_ln, stride_rh, stride_rn,
    right_group, first_row, rows, keys, query_rows, key_rows, columns, factor,
    HOST_DESCRIPTORS: tl.constexpr, CAUSAL: tl.constexpr, SPANS: tl.constexpr, ALIGNED: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, ALIGNMENT: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """`out[i] = factor * sum_j left[i, j] * right[j]`, for BLOCK_M rows i and BLOCK_N columns.

    left `[B*Hq, rows, keys]`, right `[B*H, N, columns]` each shared by `right_group` heads of left,
    out `[B*Hq, rows, columns]` float32. `factor` as in `_product_factor`.
    """
    if not HOST_DESCRIPTORS:
        left_desc = describe_rows(left_desc, stride_lh, stride_ln, rows, keys, BLOCK_M, BLOCK_K, ALIGNMENT)
        right_desc = describe_rows(right_desc, stride_rh, stride_rn, key_rows, columns, BLOCK_K, BLOCK_N, ALIGNMENT)
    column_blocks = tl.cdiv(columns, BLOCK_N)
    row_blocks = tl.cdiv(rows, BLOCK_M)
    first_column = tl.program_id(0) % column_blocks * BLOCK_N
    start = tl.program_id(0) // column_blocks % row_blocks * BLOCK_M
    batch_head = tl.program_id(0) // (column_blocks * row_blocks)
    right_head = batch_head // right_group
    first_key, end = aligned_keys(spans_ptr, first_row + start, query_rows, key_rows, keys, CAUSAL, SPANS, ALIGNED)
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for key in tl.range(first_key, end, BLOCK_K):
        left = left_desc.load([batch_head, start, key]).reshape(BLOCK_M, BLOCK_K)
        right = right_desc.load([right_head, key, first_column]).reshape(BLOCK_K, BLOCK_N)
        total = tl.dot(left, right, total, input_precision=PRECISION)
    row = start + tl.arange(0, BLOCK_M)
    total *= _product_factor(factor, loss_scale_ptr, units_ptr, batch_head, first_row + row, query_rows, SPANS)
    column = first_column + tl.arange(0, BLOCK_N)
    out_ptr += (batch_head.to(tl.int64) * rows + row[:, None]) * columns + column[None, :]
    tl.store(out_ptr, total, mask=(row < rows)[:, None] & (column < columns)[None, :])


def add_transposed_product(
    left: Tensor,
    right: Tensor,
    out: Tensor,
    loss_scale: Tensor,
    units: Tensor | None,
    chunk: BackwardChunk,
    *,
    factor: float,
) -> None:
    """`out[j] += factor * units / loss_scale * sum_i left[i, j] * right[first_row + i]`.

    left `[B*Hq, rows, keys]`, right `[B*Hq, M, columns]`, out `[B*Hq, N, columns]` float32, units `[B*Hq]`, ones if
    None, loss_scale as `loss_scale_of` takes it; out counts as zero where no earlier chunk wrote it.
    """
    scales, numbers = (loss_scale, units), (*chunk.numbers, summed_keys(chunk))
    _launch(_transposed_product_kernel, left, right, out, scales, chunk, numbers, factor=factor, transposed=True)


def row_product(
    left: Tensor, right: Tensor, loss_scale: Tensor, units: Tensor | None, chunk: BackwardChunk, *, factor: float
) -> Tensor:
    """`factor * units / loss_scale * sum_j left[i, j] * right[j]`: `[B*Hq, rows, columns]` float32.

    left `[B*Hq, rows, keys]` starts at query `first_row`; right `[B*H, N, columns]`, where H divides Hq; units
    `[B*Hq]`, ones if None, loss_scale as `loss_scale_of` takes it.
    """
    batch_heads, rows = left.shape[:2]
    out = empty(batch_heads, rows, right.shape[2], dtype=torch.float32, device=left.device)
    scales, numbers = (loss_scale, units), (batch_heads // right.shape[0], *chunk.numbers)
    _launch(_row_product_kernel, left, right, out, scales, chunk, numbers, factor=factor, transposed=False)
    return out


def _launch(
    kernel: Any, left: Tensor, right: Tensor, out: Tensor, scales: Sequence[Tensor | None], chunk: BackwardChunk,
    numbers: Sequence[int], *, factor: float, transposed: bool,
) -> None:  # fmt: skip
    """Launch the kernel of a product, of left as it is or `transposed`; `numbers` are the kernel's own ones."""
    batch_heads, columns = left.shape[0], right.shape[2]
    block_m, block_n, block_k, options = product_blocks(left, columns, transposed=transposed)
    rows, left_block = (chunk.keys, [1, block_k, block_m]) if transposed else (chunk.rows, [1, block_m, block_k])
    host_descriptors = compiled_capability(left.device)[0] >= 9
    launch(
        kernel, cdiv(columns, block_n) * cdiv(rows, block_m) * batch_heads, chunk.signature,
        operand(left, left_block, host_descriptors), operand(right, [1, block_k, block_n], host_descriptors),
        out, *scales, chunk.seen_by if transposed else chunk.spans,
        *left.stride()[:2], *right.stride()[:2], *numbers, columns, factor,
        HOST_DESCRIPTORS=host_descriptors, CAUSAL=chunk.causal, SPANS=chunk.spans is not None, ALIGNED=ALIGNED,
        BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_K=block_k,
        ALIGNMENT=16 // left.element_size(), PRECISION=dot_precision(left.dtype), **options,
    )  # fmt: skip


def product_blocks(left: Tensor, columns: int, *, transposed: bool) -> tuple[int, int, int, dict[str, int]]:
    """Rows, columns and depth of a tile of the products, and launch options; chosen on an H200.

    The sides that lie along rows or keys of left divide ALIGNED.
    """
    if left.element_size() == 4:
        return 64, 64, 32, {"num_warps": 4, "num_stages": 2}
    if compiled_capability(left.device)[0] < 9:
        return 128, 64 if columns <= 64 else 128, 64, {"num_warps": 8, "num_stages": 3}
    if transposed:
        return 128, 128, 64, {"num_warps": 4, "num_stages": 3}
    if columns > 512 and shared_memory_limit(left.device) >= WIDE_TILE_BYTES:
        return 128, 256, 64, {"num_warps": 8, "num_stages": 4}
    return 128, 128, 64, {"num_warps": 8, "num_stages": 3}
