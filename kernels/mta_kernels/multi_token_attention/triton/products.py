"""Products of queries, keys and values with a chunk of stored scores, one launch for all heads.

With `causal`, tiles above the diagonal are neither computed nor read. On Hopper the copy engine moves the tiles.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from mta_kernels.allocation import empty
from mta_kernels.call_memory import keep
from mta_kernels.conv_attention.triton.direct_launch import has_hooks
from mta_kernels.conv_attention.triton.launch import (
    call_signature,
    cdiv,
    describe_heads,
    describe_rows,
    launch,
    next_power_of_2,
    operand,
)
from mta_kernels.conv_attention.triton.prepare import dot_precision
from mta_kernels.gpu_limits import compiled_capability, shared_memory_limit
from mta_kernels.multi_token_attention.triton.chunks import BLOCK, Chunk, seen_keys, stored_end, stored_from

# Rows, keys (or columns) and depth of a tile, warps and stages, by the largest head dim that uses them: the fastest
# when measured on an H200. Rows and keys divide BLOCK.
SCORES = {
    64: {"rows": 64, "keys": 128, "key_tiles": 8, "num_warps": 4, "stages": 3},
    256: {"rows": 128, "keys": 64, "key_tiles": 16, "num_warps": 8, "stages": 4},
}
ROW_PRODUCT = {
    64: {"rows": 64, "depth": 128, "num_warps": 4, "stages": 3},
    256: {"rows": 128, "depth": 64, "num_warps": 8, "stages": 6},
}
TRANSPOSED = {
    64: {"keys": 128, "depth": 64, "num_warps": 4, "stages": 4},
    256: {"keys": 128, "depth": 64, "num_warps": 8, "stages": 4},
}
RESERVED = 2048  # bytes of shared memory for what is not a tile
MAX_PREPARED = 4096
_prepared: dict[Hashable, Callable[[], None]] = {}
NOT_SPECIALIZED = ["rows", "first_position", "first_row", "query_rows", "key_rows"]


@triton.jit(do_not_specialize=NOT_SPECIALIZED)
def _score_product_kernel(
    left_desc, right_desc, out_desc, documents_ptr,
    stride_lb, stride_lh, stride_ln, stride_rb, stride_rh, stride_rn, stride_oh, stride_on,
    heads, group, head_dim, rows, pitch, first_position, first_row, query_rows, key_rows, factor,
    HOST_DESCRIPTORS: tl.constexpr, CAUSAL: tl.constexpr, DOCUMENTS: tl.constexpr,
    CONVOLVED: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    KEY_TILES: tl.constexpr, STAGES: tl.constexpr, ALIGNMENT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """`out[r, j] = factor * left[first_row + r] . right[j]` of one head, BLOCK_M rows and KEY_TILES tiles of keys.

    left `[B, H, M, D]`, right `[B, H / group, N, D]`, out `[B*H, rows, pitch]`. With CONVOLVED, out is zero where a key
    is not seen; else undefined there.
    """
    key_groups = tl.cdiv(pitch, BLOCK_N * KEY_TILES)
    row_tiles = tl.cdiv(rows, BLOCK_M)
    key_group = tl.program_id(0) % key_groups
    first = tl.program_id(0) // key_groups % row_tiles * BLOCK_M
    batch_head = tl.program_id(0) // (key_groups * row_tiles)
    batch, head = batch_head // heads, batch_head % heads
    if not HOST_DESCRIPTORS:
        left_desc = describe_heads(left_desc, stride_lb, stride_lh, stride_ln, heads, query_rows, head_dim,
                                   BLOCK_M, BLOCK_D, ALIGNMENT)  # fmt: skip
        right_desc = describe_heads(right_desc, stride_rb, stride_rh, stride_rn, heads // group, key_rows, head_dim,
                                    BLOCK_N, BLOCK_D, ALIGNMENT)  # fmt: skip
        out_desc = describe_rows(out_desc, stride_oh, stride_on, rows, pitch, BLOCK_M, BLOCK_N, ALIGNMENT)
    last = tl.minimum(first + BLOCK_M, rows) - 1
    start = stored_from(first, first_position, documents_ptr, DOCUMENTS, CONVOLVED)
    start = tl.maximum(start, key_group * (BLOCK_N * KEY_TILES))
    end = tl.minimum(
        stored_end(last, first_position, pitch, CAUSAL, CONVOLVED), (key_group + 1) * (BLOCK_N * KEY_TILES)
    )
    if start < end:
        left = left_desc.load([batch, head, first_row + first, 0]).reshape(BLOCK_M, BLOCK_D)
        row = first + tl.arange(0, BLOCK_M)
        for key in tl.range(start, end, BLOCK_N, num_stages=STAGES):
            right = right_desc.load([batch, head // group, key, 0]).reshape(BLOCK_N, BLOCK_D)
            x = tl.dot(left, right.T, input_precision=PRECISION) * factor
            if CONVOLVED and (CAUSAL or DOCUMENTS):  # noqa: SIM102  # the first is known to the compiler
                if DOCUMENTS or (key + BLOCK_N > first_position + first):
                    seen_from, seen_to = seen_keys(
                        row, first_position, first_row, query_rows, key_rows, documents_ptr, CAUSAL, DOCUMENTS
                    )  # fmt: skip
                    keys = key + tl.arange(0, BLOCK_N)
                    seen = (keys[None, :] >= seen_from[:, None]) & (keys[None, :] < seen_to[:, None])
                    x = tl.where(seen, x, 0.0)
            out_desc.store([batch_head, first, key], x.to(out_desc.dtype).reshape(1, BLOCK_M, BLOCK_N))


@triton.jit
def unscaled(total, loss_scale_ptr, batch, position, inside, DOCUMENTS: tl.constexpr):
    """Divide rows of gradients, each at a `position`, by the loss scale of their document, or of the sequence."""
    if DOCUMENTS:
        return total * (1.0 / tl.load(loss_scale_ptr + position, mask=inside, other=1.0))[:, None]
    return total * (1.0 / tl.load(loss_scale_ptr + batch))


@triton.jit(do_not_specialize=[*NOT_SPECIALIZED, "left_rows"])
def _row_product_kernel(
    left_desc, right_desc, out_ptr, loss_scale_ptr, documents_ptr,
    stride_lh, stride_ln, stride_rb, stride_rh, stride_rn, stride_ob, stride_oh, stride_on,
    heads, group, head_dim, left_rows, rows, pitch, first_position, first_row, query_rows, key_rows, factor,
    HOST_DESCRIPTORS: tl.constexpr, SCALED: tl.constexpr, CAUSAL: tl.constexpr, DOCUMENTS: tl.constexpr,
    CONVOLVED: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr, ALIGNMENT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """`out[first_row + r] = factor * sum_j left[r, j] * right[j]` of one head, for BLOCK_M of the owned rows.

    left `[B*H, rows, pitch]`, the owned rows alone, right `[B, H / group, N, D]`, out `[B, H, M, D]`.
    """
    row_tiles = tl.cdiv(rows, BLOCK_M)
    # The longest rows come first.
    first = (row_tiles - 1 - tl.program_id(0) % row_tiles) * BLOCK_M
    batch_head = tl.program_id(0) // row_tiles
    batch, head = batch_head // heads, batch_head % heads
    if not HOST_DESCRIPTORS:
        left_desc = describe_rows(left_desc, stride_lh, stride_ln, rows, pitch, BLOCK_M, BLOCK_K, ALIGNMENT)
        right_desc = describe_heads(right_desc, stride_rb, stride_rh, stride_rn, heads // group, key_rows, head_dim,
                                    BLOCK_K, BLOCK_D, ALIGNMENT)  # fmt: skip
    start = stored_from(first, first_position, documents_ptr, DOCUMENTS, CONVOLVED)
    end = pitch
    if CAUSAL:
        end = tl.minimum(pitch, first_position + first + BLOCK_M)
    total = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    for key in tl.range(start, end, BLOCK_K, num_stages=STAGES):
        left = left_desc.load([batch_head, first, key]).reshape(BLOCK_M, BLOCK_K)
        right = right_desc.load([batch, head // group, key, 0]).reshape(BLOCK_K, BLOCK_D)
        total = tl.dot(left, right, total, input_precision=PRECISION)
    row = first + tl.arange(0, BLOCK_M)
    dim = tl.arange(0, BLOCK_D)
    if SCALED:
        total = unscaled(total, loss_scale_ptr, batch, first_position + row, row < rows, DOCUMENTS)
    out_ptr += batch.to(tl.int64) * stride_ob + head.to(tl.int64) * stride_oh
    out_ptr += (first_row + row).to(tl.int64)[:, None] * stride_on + dim[None, :]
    inside = (row < rows)[:, None] & (dim < head_dim)[None, :]
    tl.store(out_ptr, (total * factor).to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=[*NOT_SPECIALIZED, "left_rows", "keys", "summed_keys"])
def _transposed_product_kernel(
    left_desc, right_desc, sums_ptr, out_ptr, loss_scale_ptr, documents_ptr,
    stride_lh, stride_ln, stride_rb, stride_rh, stride_rn,
    heads, group, head_dim, left_rows, rows, pitch, first_position, first_row, query_rows, key_rows, keys, summed_keys,
    factor,
    HOST_DESCRIPTORS: tl.constexpr, SCALED: tl.constexpr, CAUSAL: tl.constexpr, DOCUMENTS: tl.constexpr,
    CONVOLVED: tl.constexpr, LAST: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr, ALIGNMENT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """`out[j] = sums[j] + factor * sum_r left[r, j] * right[first_row + r]`, over a KV head's heads, for BLOCK_N keys.

    left `[B*H, rows, pitch]`, the owned rows alone, right `[B, H, M, D]`, sums and out `[B, H / group, N, D]`. Sums are
    undefined for keys from `summed_keys` on. Without LAST, out is the sums.
    """
    key_tiles = tl.cdiv(keys, BLOCK_N)
    first = tl.program_id(0) % key_tiles * BLOCK_N
    kv_heads = heads // group
    batch_head = tl.program_id(0) // key_tiles
    batch, kv_head = batch_head // kv_heads, batch_head % kv_heads
    if not HOST_DESCRIPTORS:
        left_desc = describe_rows(left_desc, stride_lh, stride_ln, rows, pitch, BLOCK_K, BLOCK_N, ALIGNMENT)
        right_desc = describe_heads(right_desc, stride_rb, stride_rh, stride_rn, heads, query_rows, head_dim,
                                    BLOCK_K, BLOCK_D, ALIGNMENT)  # fmt: skip
    start, end = 0, rows
    if CAUSAL:
        start = tl.maximum(first - first_position, 0) // BLOCK * BLOCK
    if DOCUMENTS and not CONVOLVED:
        # The last row that may see the tile's last key, rounded up to whole blocks of rows.
        last_key = tl.minimum(first + BLOCK_N, key_rows) - 1
        seen_to = tl.load(documents_ptr + key_rows + last_key) - first_position
        end = tl.minimum(rows, tl.maximum(seen_to + (BLOCK - 1), 0) // BLOCK * BLOCK)
        if not CAUSAL:
            start = tl.maximum(tl.load(documents_ptr + first) - first_position, 0) // BLOCK * BLOCK
    total = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    steps = tl.maximum(tl.cdiv(end - start, BLOCK_K), 0)
    # The pipeliner divides before the loop: if by zero, LLVM would assume that there are steps, and copy a tile anyway.
    divisor = tl.maximum(steps, 1)
    for step in tl.range(0, steps * group, num_stages=STAGES):
        head = kv_head * group + step // divisor
        row = start + step % divisor * BLOCK_K
        left = left_desc.load([batch * heads + head, row, first]).reshape(BLOCK_K, BLOCK_N)
        right = right_desc.load([batch, head, first_row + row, 0]).reshape(BLOCK_K, BLOCK_D)
        total = tl.dot(left.T, right, total, input_precision=PRECISION)
    if SCALED:
        position = first + tl.arange(0, BLOCK_N)
        total = unscaled(total, loss_scale_ptr, batch, position, position < keys, DOCUMENTS)
    if LAST or (steps > 0) | (first + BLOCK_N > summed_keys):
        key = tl.arange(0, BLOCK_N)
        dim = tl.arange(0, BLOCK_D)
        inside = (first + key < keys)[:, None] & (dim < head_dim)[None, :]
        summed = inside & (first + key < summed_keys)[:, None]
        tile = (batch_head.to(tl.int64) * key_rows + first) * head_dim
        place = key[:, None] * head_dim + dim[None, :]
        total *= factor
        total += tl.load(sums_ptr + tile + place, mask=summed, other=0.0).to(tl.float32)
        tl.store(out_ptr + tile + place, total.to(out_ptr.dtype.element_ty), mask=inside)


def launched_again(
    what: str, chunk: Chunk, factor: float, loss_scale: Tensor | None, *tensors: Tensor
) -> tuple[Hashable, bool]:
    """The key of a product, and whether an earlier launch with this key was repeated, in microseconds.

    The chunk and its signature define the tensors' shapes, except the number of sequences.
    """
    key = (
        what, chunk.signature, chunk.rows, chunk.above, factor, tensors[0].shape[0],
        None if loss_scale is None else loss_scale.data_ptr(),
        None if chunk.documents is None else chunk.documents.data_ptr(), *[(x.data_ptr(), x.stride()) for x in tensors],
    )  # fmt: skip
    found = _prepared.get(key)
    if found is None or has_hooks():
        return key, False
    found()
    return key, True


def launch_as(key: Hashable, kernel: Any, programs: int, signature: Hashable, *args: Any, **options: Any) -> None:
    """`launch`, prepared so that `launched_again` repeats it for this key."""
    replay = launch(kernel, programs, signature, *args, **options)
    if replay is not None:
        keep(_prepared, key, replay.prepared(args), MAX_PREPARED)


def rows_of(x: Tensor) -> Tensor:
    """`x [B, H, N, D]` as the kernels take it: the copy engine needs rows that begin at multiples of 16 bytes."""
    unit = 16 // x.element_size()
    strides = x.stride()
    aligned = strides[3] == 1 and x.data_ptr() % 16 == 0 and all(step > 0 and step % unit == 0 for step in strides[:3])
    if aligned:
        return x
    batch, heads, rows, head_dim = x.shape
    copy = empty(batch, heads, rows, cdiv(head_dim, unit) * unit, dtype=x.dtype, device=x.device)[..., :head_dim]
    return copy.copy_(x)


def score_product(left: Tensor, right: Tensor, out: Tensor, chunk: Chunk, factor: float) -> None:
    """`out[r, j] = factor * left[r] . right[j]` of a chunk: out is `[B, H, rows, pitch]`.

    left `[B, H, M, D]` and right `[B, Hkv, N, D]` are as `rows_of` returns them.
    """
    key, done = launched_again("score", chunk, factor, None, left, right, out)
    if done:
        return
    batch, heads, _, head_dim = left.shape
    block_d = next_power_of_2(max(16, head_dim))
    block_m, block_n, options = score_tile(left, block_d)
    key_tiles = config_of(SCORES, left, block_d)["key_tiles"]
    host_descriptors = compiled_capability(left.device)[0] >= 9
    scores = out.flatten(0, 1)
    programs = cdiv(chunk.pitch, block_n * key_tiles) * cdiv(chunk.rows, block_m) * batch * heads
    launch_as(
        key, _score_product_kernel, programs, (chunk.signature, call_signature(left, right, out)),
        operand(left, [1, 1, block_m, block_d], host_descriptors),
        operand(right, [1, 1, block_n, block_d], host_descriptors),
        operand(scores, [1, block_m, block_n], host_descriptors),
        left if chunk.documents is None else chunk.documents, *left.stride()[:3], *right.stride()[:3],
        *scores.stride()[:2], heads, heads // right.shape[1], head_dim, chunk.rows, chunk.pitch, *numbers(chunk, 0),
        factor, HOST_DESCRIPTORS=host_descriptors, **constants(chunk), BLOCK_M=block_m, BLOCK_N=block_n,
        BLOCK_D=block_d, KEY_TILES=key_tiles, **options,
    )  # fmt: skip


def row_product(
    scores: Tensor, right: Tensor, out: Tensor, chunk: Chunk, factor: float = 1.0, loss_scale: Tensor | None = None
) -> None:
    """`out[r] = factor / loss_scale * sum_j scores[r, j] * right[j]` for the owned rows of a chunk.

    scores `[B, H, rows, pitch]`, right `[B, Hkv, N, D]` as from `rows_of`, out `[B, H, M, D]` contiguous, of all
    queries, loss_scale as from `gradient_scale`.
    """
    key, done = launched_again("row", chunk, factor, loss_scale, scores, right, out)
    if done:
        return
    batch, heads, _, head_dim = out.shape
    block_d = next_power_of_2(max(16, head_dim))
    left = scores[:, :, chunk.own_rows].flatten(0, 1)
    block_m, block_k, options = tile_of_product(ROW_PRODUCT, "rows", left, block_d)
    host_descriptors = compiled_capability(left.device)[0] >= 9
    launch_as(
        key, _row_product_kernel, cdiv(chunk.owned, block_m) * batch * heads,
        (chunk.signature, call_signature(scores, right, out, loss_scale)),
        operand(left, [1, block_m, block_k], host_descriptors),
        operand(right, [1, 1, block_k, block_d], host_descriptors), out, *pointers(chunk, loss_scale, left),
        *left.stride()[:2], *right.stride()[:3], *out.stride()[:3],
        heads, heads // right.shape[1], head_dim, chunk.rows, chunk.owned, chunk.pitch, *numbers(chunk, chunk.above),
        factor, HOST_DESCRIPTORS=host_descriptors, SCALED=loss_scale is not None, **constants(chunk), BLOCK_M=block_m,
        BLOCK_D=block_d, BLOCK_K=block_k, **options,
    )  # fmt: skip


def add_transposed_product(
    scores: Tensor, right: Tensor, sums: Tensor, out: Tensor, chunk: Chunk, factor: float = 1.0,
    loss_scale: Tensor | None = None, *, summed_keys: int = 0,
) -> None:  # fmt: skip
    """`out[j] = sums[j] + factor / loss_scale * sum_r scores[r, j] * right[r]`, over owned rows and a KV head's heads.

    scores `[B, H, rows, pitch]`, right `[B, H, M, D]` as from `rows_of`. `sums [B, Hkv, N, D]` contiguous float32 are
    of earlier chunks, for the first `summed_keys` keys; out is sums, or, for the last chunk, like sums in any dtype.
    """
    key, done = launched_again("transposed", chunk, factor, loss_scale, scores, right, sums, out)
    if done:
        return
    batch, kv_heads, _, head_dim = out.shape
    heads = right.shape[1]
    block_d = next_power_of_2(max(16, head_dim))
    left = scores[:, :, chunk.own_rows].flatten(0, 1)
    block_n, block_k, options = tile_of_product(TRANSPOSED, "keys", left, block_d)
    host_descriptors = compiled_capability(left.device)[0] >= 9
    launch_as(
        key, _transposed_product_kernel, cdiv(chunk.keys, block_n) * batch * kv_heads,
        (chunk.signature, call_signature(scores, right, sums, out, loss_scale)),
        operand(left, [1, block_k, block_n], host_descriptors),
        operand(right, [1, 1, block_k, block_d], host_descriptors), sums, out, *pointers(chunk, loss_scale, left),
        *left.stride()[:2], *right.stride()[:3], heads, heads // kv_heads, head_dim, chunk.rows, chunk.owned,
        chunk.pitch, *numbers(chunk, chunk.above), chunk.keys, summed_keys, factor,
        HOST_DESCRIPTORS=host_descriptors, SCALED=loss_scale is not None, **constants(chunk), LAST=out is not sums,
        BLOCK_N=block_n, BLOCK_D=block_d, BLOCK_K=block_k, **options,
    )  # fmt: skip


def score_tile(left: Tensor, block_d: int) -> tuple[int, int, dict[str, Any]]:
    """Rows and keys of a tile of scores, from the table or as they fit, and the other launch options."""
    size, limit = left.element_size(), shared_memory_limit(left.device) - RESERVED
    config = config_of(SCORES, left, block_d)
    rows, keys, stages, warps = (config[name] for name in ("rows", "keys", "stages", "num_warps"))
    if size == 4:  # on CUDA cores
        rows, keys, stages, warps = 64, 32, 2, 4
    for smaller in ((rows, keys, 2), (rows, 64, 2), (64, 64, 2), (64, 32, 2), (32, 32, 1)):
        if (rows * block_d + stages * keys * block_d + rows * keys) * size <= limit:
            break
        rows, keys, stages = smaller
    warps = warps if (rows, keys) == (config["rows"], config["keys"]) else 4
    return rows, keys, _options(left, stages, warps)


def config_of(configs: dict[int, dict[str, int]], left: Tensor, block_d: int) -> dict[str, int]:
    """The configuration of a head dim; before Hopper the largest head dim's, whose many warps have enough registers."""
    return configs[64 if block_d <= 64 and compiled_capability(left.device)[0] >= 9 else 256]


def tile_of_product(
    configs: dict[int, dict[str, int]], side: str, left: Tensor, block_d: int
) -> tuple[int, int, dict[str, Any]]:
    """Rows or keys of a tile, its depth, and the other launch options of a kernel that sums a product."""
    config = config_of(configs, left, block_d)
    size, depth, stages, warps = (config[name] for name in (side, "depth", "stages", "num_warps"))
    if left.element_size() == 4:  # on CUDA cores
        size, depth, stages, warps = 64, 32, 2, 4
    elif block_d > 128:
        size, stages, warps = 64, 2, 8
    limit = shared_memory_limit(left.device) - RESERVED
    while stages > 2 and stages * depth * (size + block_d) * left.element_size() > limit:
        stages -= 1
    return size, depth, _options(left, stages, warps)


def _options(left: Tensor, stages: int, warps: int) -> dict[str, Any]:
    return {
        "STAGES": stages, "ALIGNMENT": 16 // left.element_size(), "PRECISION": dot_precision(left.dtype),
        "num_warps": warps,
    }  # fmt: skip


def pointers(chunk: Chunk, loss_scale: Tensor | None, other: Tensor) -> list[Tensor]:
    """The loss scale and the documents, or another tensor as a placeholder."""
    return [other if x is None else x for x in (loss_scale, chunk.documents)]


def numbers(chunk: Chunk, above: int) -> tuple[int, int, int, int]:
    """The place of a chunk's rows, from row `above` on, as the kernels take it."""
    return chunk.first_position + above, chunk.first_row + above, chunk.query_rows, chunk.key_rows


def constants(chunk: Chunk) -> dict[str, bool]:
    """The constants of a chunk that all kernels take."""
    return {"CAUSAL": chunk.causal, "DOCUMENTS": chunk.documents is not None, "CONVOLVED": chunk.convolved}
