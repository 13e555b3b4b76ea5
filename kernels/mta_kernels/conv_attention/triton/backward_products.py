"""Products of the gradients of a chunk of scores with queries, keys and output gradients, summed in registers."""

from __future__ import annotations

from collections.abc import Sequence

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
def _product_kernel(
    left_desc, right_desc, out_ptr, loss_scale_ptr, units_ptr, bounds_ptr,
    stride_lh, stride_ln, stride_rh, stride_rn,
    right_group, first_row, rows, keys, query_rows, key_rows, written, columns, factor,
    HOST_DESCRIPTORS: tl.constexpr, TRANSPOSED: tl.constexpr, CAUSAL: tl.constexpr, SPANS: tl.constexpr,
    ALIGNED: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    ALIGNMENT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """`out[i] = factor * sum_j left[i, j] * right[j]`, for BLOCK_M rows i and BLOCK_N columns; j counts keys.

    left `[B*Hq, rows, keys]`, right `[B*H, N, columns]` each shared by `right_group` heads of left,
    out `[B*Hq, rows, columns]` float32. left has a loss scale and right units, or None. Bounds are the spans.
    With TRANSPOSED `out[j] += factor * sum_i left[i, j] * right[first_row + i]`, for BLOCK_M keys j: right
    `[B*Hq, M, columns]`, out `[B*Hq, N, columns]`, of which the first `written` rows hold a sum already. Bounds are
    `BackwardChunk.seen_by`.
    """
    if not HOST_DESCRIPTORS:
        left_desc = describe_rows(left_desc, stride_lh, stride_ln, rows, keys, BLOCK_K if TRANSPOSED else BLOCK_M,
                                  BLOCK_M if TRANSPOSED else BLOCK_K, ALIGNMENT)  # fmt: skip
        right_desc = describe_rows(right_desc, stride_rh, stride_rn, query_rows if TRANSPOSED else key_rows, columns,
                                   BLOCK_K, BLOCK_N, ALIGNMENT)  # fmt: skip
    out_rows = keys if TRANSPOSED else rows
    column_blocks = tl.cdiv(columns, BLOCK_N)
    row_blocks = tl.cdiv(out_rows, BLOCK_M)
    # Neighbours share the tiles of left, the larger operand.
    first_column = tl.program_id(0) % column_blocks * BLOCK_N
    first = tl.program_id(0) // column_blocks % row_blocks * BLOCK_M
    batch_head = tl.program_id(0) // (column_blocks * row_blocks)
    if TRANSPOSED:
        start, end = aligned_rows(bounds_ptr, first, first_row, rows, query_rows, key_rows, CAUSAL, SPANS, ALIGNED)
    else:
        start, end = aligned_keys(bounds_ptr, first_row + first, query_rows, key_rows, keys, CAUSAL, SPANS, ALIGNED)
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for at in tl.range(start, end, BLOCK_K):
        if TRANSPOSED:
            left = left_desc.load([batch_head, at, first]).reshape(BLOCK_K, BLOCK_M).T
            right = right_desc.load([batch_head, first_row + at, first_column]).reshape(BLOCK_K, BLOCK_N)
        else:
            left = left_desc.load([batch_head, first, at]).reshape(BLOCK_M, BLOCK_K)
            right = right_desc.load([batch_head // right_group, at, first_column]).reshape(BLOCK_K, BLOCK_N)
        total = tl.dot(left, right, total, input_precision=PRECISION)
    row = first + tl.arange(0, BLOCK_M)
    scaled_row = row if TRANSPOSED else first_row + row
    all_rows = key_rows if TRANSPOSED else query_rows
    factor /= loss_scale_of(loss_scale_ptr, batch_head, scaled_row, all_rows, SPANS)
    if units_ptr is not None:
        factor *= tl.load(units_ptr + batch_head)
    total *= factor
    column = first_column + tl.arange(0, BLOCK_N)
    inside = (row < out_rows)[:, None] & (column < columns)[None, :]
    out_ptr += (batch_head.to(tl.int64) * (key_rows if TRANSPOSED else rows) + row[:, None]) * columns + column[None, :]
    if TRANSPOSED:
        total += tl.load(out_ptr, mask=inside & (row < written)[:, None], other=0.0)
    tl.store(out_ptr, total, mask=inside)


def add_transposed_product(
    left: Tensor, right: Tensor, out: Tensor, loss_scale: Tensor, units: Tensor | None, chunk: BackwardChunk, *,
    factor: float,
) -> None:  # fmt: skip
    """`out[j] += factor * units / loss_scale * sum_i left[i, j] * right[first_row + i]`.

    left `[B*Hq, rows, keys]`, right `[B*Hq, M, columns]`, out `[B*Hq, N, columns]` float32, units `[B*Hq]`, ones if
    None, loss_scale as `loss_scale_of` takes it; out counts as zero where no earlier chunk wrote it.
    """
    _launch(left, right, out, (loss_scale, units), chunk, factor=factor, transposed=True)


def row_product(
    left: Tensor, right: Tensor, loss_scale: Tensor, units: Tensor | None, chunk: BackwardChunk, *, factor: float
) -> Tensor:
    """`factor * units / loss_scale * sum_j left[i, j] * right[j]`: `[B*Hq, rows, columns]` float32.

    left `[B*Hq, rows, keys]` starts at query `first_row`; right `[B*H, N, columns]`, where H divides Hq; units
    `[B*Hq]`, ones if None, loss_scale as `loss_scale_of` takes it.
    """
    batch_heads, rows = left.shape[:2]
    out = empty(batch_heads, rows, right.shape[2], dtype=torch.float32, device=left.device)
    _launch(left, right, out, (loss_scale, units), chunk, factor=factor, transposed=False)
    return out


def _launch(
    left: Tensor, right: Tensor, out: Tensor, scales: Sequence[Tensor | None], chunk: BackwardChunk, *, factor: float,
    transposed: bool,
) -> None:  # fmt: skip
    """Launch the product of left as it is or `transposed`."""
    batch_heads, columns = left.shape[0], right.shape[2]
    block_m, block_n, block_k, options = product_blocks(left, columns, transposed=transposed)
    rows, left_block = (chunk.keys, [1, block_k, block_m]) if transposed else (chunk.rows, [1, block_m, block_k])
    host_descriptors = compiled_capability(left.device)[0] >= 9
    launch(
        _product_kernel, cdiv(columns, block_n) * cdiv(rows, block_m) * batch_heads, chunk.signature,
        operand(left, left_block, host_descriptors), operand(right, [1, block_k, block_n], host_descriptors),
        out, *scales, chunk.seen_by if transposed else chunk.spans, *left.stride()[:2], *right.stride()[:2],
        batch_heads // right.shape[0], *chunk.numbers, summed_keys(chunk) if transposed else 0, columns, factor,
        HOST_DESCRIPTORS=host_descriptors, TRANSPOSED=transposed, CAUSAL=chunk.causal, SPANS=chunk.spans is not None,
        ALIGNED=ALIGNED, BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_K=block_k,
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
