"""The gradients of a chunk of scores: the probabilities first, then `dC = P * (dP - delta)` together with dV."""

from __future__ import annotations

import functools
from collections.abc import Hashable
from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from mta_kernels.conv_attention.packing import rows_that_see
from mta_kernels.conv_attention.triton.forward import value_block
from mta_kernels.conv_attention.triton.forward_kernel import _score_tile, key_range
from mta_kernels.conv_attention.triton.launch import cdiv, describe_heads, describe_rows, launch, operand
from mta_kernels.conv_attention.triton.prepare import LOG2_E, Prepared, dot_precision
from mta_kernels.gpu_limits import compiled_capability

# Chunks are written and read in blocks of ALIGNED rows and keys: only blocks in which some query sees a key.
ALIGNED = 128


@dataclass(frozen=True)
class BackwardChunk:
    """Query rows `first_row` to before `first_row + rows`, and what limits the keys that they see.

    `query_rows` and `key_rows` are M and N of the whole; `keys` of the latter take part. `spans [2, N]` as in
    `conv_attention_forward`, `seen_by [2, key blocks]` int32 the rows, multiples of ALIGNED, from and to before
    which a block of ALIGNED keys is seen. `signature` is for `launch`.
    """

    first_row: int
    rows: int
    query_rows: int
    key_rows: int
    keys: int
    causal: bool
    spans: Tensor | None
    seen_by: Tensor | None
    signature: Hashable

    @property
    def numbers(self) -> tuple[int, int, int, int, int]:
        """As the kernels take them."""
        return self.first_row, self.rows, self.keys, self.query_rows, self.key_rows


def chunks(
    query_rows: int, key_rows: int, chunk_rows: int, causal: bool, spans: Tensor | None, signature: Hashable
) -> list[BackwardChunk]:
    """All rows, `chunk_rows` at a time; the kernels of this file take multiples of ALIGNED."""
    seen_by = None if spans is None else rows_that_see(spans, ALIGNED)
    result = []
    for first_row in range(0, query_rows, chunk_rows):
        rows = min(chunk_rows, query_rows - first_row)
        keys = key_rows - query_rows + first_row + rows if causal else key_rows
        result.append(
            BackwardChunk(first_row, rows, query_rows, key_rows, keys, causal, spans, seen_by, (signature, first_row))
        )
    return result


@triton.jit
def _probability(difference):
    """`2 ** difference`, of a score and its row's logsumexp, at most 1: rounding may make it positive for huge ones."""
    return tl.exp2(tl.minimum(difference, 0.0, propagate_nan=tl.PropagateNan.ALL))


@triton.jit
def _probabilities_kernel(
    q_desc, k_desc, p_desc, units_ptr, logsumexp_ptr, spans_ptr,
    stride_qh, stride_qn, stride_kh, stride_kn, stride_ph, stride_pn,
    k_group, first_row, rows, keys, query_rows, key_rows, one,
    HOST_DESCRIPTORS: tl.constexpr, CAUSAL: tl.constexpr, SPANS: tl.constexpr, BAND: tl.constexpr,
    DEPTH: tl.constexpr, ALIGNED: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_DEPTH: tl.constexpr,
    MASKED_STAGES: tl.constexpr, ALIGNMENT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """`p[i, j] = exp(c[i, j] - logsumexp[i])` of BLOCK_M rows of one head, out of the `rows` from `first_row` on.

    q_desc `[B*Hq, M, DEPTH]`, k_desc `[B*H, N, DEPTH]` each shared by `k_group`, p_desc `[B*Hq, rows, keys]`,
    units `[B*Hq]` or None, logsumexp `[B*Hq, M]`. Zero from the first key of the band on, in all blocks of ALIGNED keys
    that a query of the block of ALIGNED rows sees; other keys are not written.
    """
    if not HOST_DESCRIPTORS:
        q_desc = describe_rows(q_desc, stride_qh, stride_qn, query_rows, DEPTH, BLOCK_M, BLOCK_DEPTH, ALIGNMENT)
        k_desc = describe_rows(k_desc, stride_kh, stride_kn, key_rows, DEPTH, BLOCK_N, BLOCK_DEPTH, ALIGNMENT)
        p_desc = describe_rows(p_desc, stride_ph, stride_pn, rows, keys, BLOCK_M, BLOCK_N, ALIGNMENT)

    query_blocks = tl.cdiv(rows, BLOCK_M)
    batch_head = tl.program_id(0) // query_blocks
    # Causal blocks near the end have the most keys: start with them.
    chunk_row = (query_blocks - 1 - tl.program_id(0) % query_blocks) * BLOCK_M
    first_query = first_row + chunk_row
    query = first_query + tl.arange(0, BLOCK_M)
    inside = query < query_rows
    position = query + (key_rows - query_rows)
    k_head = batch_head // k_group
    row = batch_head.to(tl.int64) * query_rows + query
    logsumexp = tl.load(logsumexp_ptr + row, mask=inside, other=0.0) * LOG2_E
    unit = 1.0
    if units_ptr is not None:
        unit = tl.load(units_ptr + batch_head)

    start, unmasked_start, unmasked_end, end = key_range(
        spans_ptr, first_query, query_rows, key_rows, CAUSAL, SPANS, BAND, BLOCK_M, BLOCK_N
    )
    first_key_block, key_block_end = aligned_keys(
        spans_ptr, first_query, query_rows, key_rows, keys, CAUSAL, SPANS, ALIGNED
    )
    if CAUSAL:
        end = tl.minimum(first_query + (key_rows - query_rows) + BLOCK_M - BAND, keys)
    elif not SPANS:
        unmasked_end = keys  # keys after the last one make columns that are not stored
    nothing = tl.zeros([1, BLOCK_M, BLOCK_N], tl.float32).to(p_desc.dtype)
    first_seen = tl.zeros([BLOCK_M], tl.int32)
    if SPANS:
        first_seen = tl.load(spans_ptr + query, mask=inside, other=0)
        for first_key in tl.range(first_key_block, start, BLOCK_N):
            p_desc.store([batch_head, chunk_row, first_key], nothing)
        for first_key in tl.range(start, unmasked_start, BLOCK_N, num_stages=MASKED_STAGES):
            scores = _score_tile(q_desc, k_desc, batch_head, k_head, first_query, first_key, one,
                                 DEPTH, BLOCK_M, BLOCK_N, BLOCK_DEPTH, PRECISION)  # fmt: skip
            seen = (first_key + tl.arange(0, BLOCK_N))[None, :] >= first_seen[:, None]
            p = tl.where(seen, _probability(scores * unit - logsumexp[:, None]), 0.0)
            p_desc.store([batch_head, chunk_row, first_key], p.to(p_desc.dtype).reshape(1, BLOCK_M, BLOCK_N))
    # Flattened with the loop over slices, so that the copies run ahead over the end of a key block.
    for first_key in tl.range(unmasked_start, unmasked_end, BLOCK_N, flatten=True):
        scores = _score_tile(q_desc, k_desc, batch_head, k_head, first_query, first_key, one,
                             DEPTH, BLOCK_M, BLOCK_N, BLOCK_DEPTH, PRECISION)  # fmt: skip
        p = _probability(scores * unit - logsumexp[:, None])
        p_desc.store([batch_head, chunk_row, first_key], p.to(p_desc.dtype).reshape(1, BLOCK_M, BLOCK_N))
    if CAUSAL or SPANS:
        masked_start = tl.maximum(unmasked_start, unmasked_end)
        for first_key in tl.range(masked_start, end, BLOCK_N, num_stages=MASKED_STAGES):
            scores = _score_tile(q_desc, k_desc, batch_head, k_head, first_query, first_key, one,
                                 DEPTH, BLOCK_M, BLOCK_N, BLOCK_DEPTH, PRECISION)  # fmt: skip
            key = first_key + tl.arange(0, BLOCK_N)
            if CAUSAL:
                seen = position[:, None] - key[None, :] >= BAND  # [BLOCK_M, BLOCK_N]
            else:
                seen_end = tl.load(spans_ptr + key_rows + query, mask=inside, other=0)
                seen = key[None, :] < seen_end[:, None]
            if SPANS:
                seen = seen & (key[None, :] >= first_seen[:, None])
            p = tl.where(seen, _probability(scores * unit - logsumexp[:, None]), 0.0)
            p_desc.store([batch_head, chunk_row, first_key], p.to(p_desc.dtype).reshape(1, BLOCK_M, BLOCK_N))
        written = masked_start + tl.cdiv(tl.maximum(end - masked_start, 0), BLOCK_N) * BLOCK_N
        for first_key in tl.range(written, key_block_end, BLOCK_N):
            p_desc.store([batch_head, chunk_row, first_key], nothing)


@triton.jit
def loss_scale_of(loss_scale_ptr, batch_head, row, rows, SPANS: tl.constexpr):
    """A head's number of loss_scale `[B*Hq]`, or with SPANS, of `[Hq, rows]`, each row's for its document `[.., 1]`."""
    if SPANS:
        scale = tl.load(loss_scale_ptr + batch_head.to(tl.int64) * rows + row, mask=row < rows, other=1.0)[:, None]
    else:
        scale = tl.load(loss_scale_ptr + batch_head)
    return scale


@triton.jit
def _value_gradients_kernel(
    p_desc, dc_desc, v_desc, grad_desc, out_ptr, delta_ptr, loss_scale_ptr, seen_by_ptr,
    stride_ph, stride_pn, stride_vb, stride_vh, stride_vn, stride_gh, stride_gn,
    heads, v_group, first_row, rows, keys, query_rows, key_rows, written, head_dim,
    HOST_DESCRIPTORS: tl.constexpr, CAUSAL: tl.constexpr, SPANS: tl.constexpr, GRAD_PITCH: tl.constexpr,
    ALIGNED: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    ALIGNMENT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """`dc[i, j] = p[i, j] * (grad[i] . v[j] - delta[i])` and `out[j] += sum_i p[i, j] * grad[i]`, for BLOCK_N keys.

    p and dc `[B*Hq, rows, keys]`, of equal strides, hold the rows from `first_row` on; v `[B, Hkv, N, D]`, grad
    `[B*Hq, M, GRAD_PITCH]` and delta `[B*Hq, M]`, both multiplied by `loss_scale_of` rows; out `[B*Hq, N, D]`
    float32, of which the first `written` rows hold a sum already. dc is written where p is.
    """
    if not HOST_DESCRIPTORS:
        p_desc = describe_rows(p_desc, stride_ph, stride_pn, rows, keys, BLOCK_M, BLOCK_N, ALIGNMENT)
        dc_desc = describe_rows(dc_desc, stride_ph, stride_pn, rows, keys, BLOCK_M, BLOCK_N, ALIGNMENT)
        v_desc = describe_heads(v_desc, stride_vb, stride_vh, stride_vn, heads // v_group, key_rows, head_dim,
                                BLOCK_N, BLOCK_D, ALIGNMENT)  # fmt: skip
        grad_desc = describe_rows(grad_desc, stride_gh, stride_gn, query_rows, GRAD_PITCH, BLOCK_M, BLOCK_D, ALIGNMENT)
    key_blocks = tl.cdiv(keys, BLOCK_N)
    first_key = tl.program_id(0) % key_blocks * BLOCK_N
    batch_head = tl.program_id(0) // key_blocks
    v = v_desc.load([batch_head // heads, batch_head % heads // v_group, first_key, 0]).reshape(BLOCK_N, BLOCK_D)
    total = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    start, end = aligned_rows(seen_by_ptr, first_key, first_row, rows, query_rows, key_rows, CAUSAL, SPANS, ALIGNED)
    delta_ptr += batch_head.to(tl.int64) * query_rows + first_row
    for row in tl.range(start, end, BLOCK_M):
        p = p_desc.load([batch_head, row, first_key]).reshape(BLOCK_M, BLOCK_N)
        grad = grad_desc.load([batch_head, first_row + row, 0]).reshape(BLOCK_M, BLOCK_D)
        chunk_row = row + tl.arange(0, BLOCK_M)
        delta = tl.load(delta_ptr + chunk_row, mask=chunk_row < rows, other=0.0)
        dp = tl.dot(grad, v.T, input_precision=PRECISION)
        dc = p.to(tl.float32) * (dp - delta[:, None])  # [BLOCK_M, BLOCK_N]
        if SPANS:  # dp with another document's values may be infinite
            dc = tl.where(p == 0.0, 0.0, dc)
        dc_desc.store([batch_head, row, first_key], dc.to(p.dtype).reshape(1, BLOCK_M, BLOCK_N))
        total = tl.dot(p.T, grad, total, input_precision=PRECISION)
    key = first_key + tl.arange(0, BLOCK_N)
    total /= loss_scale_of(loss_scale_ptr, batch_head, key, key_rows, SPANS)
    dim = tl.arange(0, BLOCK_D)
    inside = (key < keys)[:, None] & (dim < head_dim)[None, :]
    out_ptr += (batch_head.to(tl.int64) * key_rows + key[:, None]) * head_dim + dim[None, :]
    total += tl.load(out_ptr, mask=inside & (key < written)[:, None], other=0.0)
    tl.store(out_ptr, total, mask=inside)


@triton.jit
def aligned_keys(
    spans_ptr, row, query_rows, key_rows, keys, CAUSAL: tl.constexpr, SPANS: tl.constexpr, ALIGNED: tl.constexpr
):
    """Keys, in blocks of ALIGNED, that a query of the block of ALIGNED rows around `row` sees: first, end."""
    first_row = row // ALIGNED * ALIGNED
    first = 0
    end = keys
    if CAUSAL:
        end = tl.minimum(tl.cdiv(first_row + ALIGNED + (key_rows - query_rows), ALIGNED) * ALIGNED, keys)
    if SPANS:
        first = tl.load(spans_ptr + first_row) // ALIGNED * ALIGNED
        if not CAUSAL:
            last_row = tl.minimum(first_row + ALIGNED, query_rows) - 1
            end = tl.minimum(tl.cdiv(tl.load(spans_ptr + key_rows + last_row), ALIGNED) * ALIGNED, keys)
    return first, end


@triton.jit
def aligned_rows(
    seen_by_ptr, key, first_row, rows, query_rows, key_rows,
    CAUSAL: tl.constexpr, SPANS: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """Rows of a chunk, in blocks of ALIGNED, that see a key of the block of ALIGNED keys around `key`: first, end.

    The same pairs of blocks as by `aligned_keys`. A causal block of rows sees the keys at its own positions, even if
    all its rows are the gap behind a document, whose span ends before these keys.
    """
    key_block = key // ALIGNED
    start = 0
    end = rows
    if CAUSAL:
        start = tl.maximum(key_block * ALIGNED - (key_rows - query_rows) - first_row, 0) // ALIGNED * ALIGNED
    elif SPANS:
        start = tl.maximum(tl.load(seen_by_ptr + key_block) - first_row, 0)
    if SPANS:
        end = tl.minimum(end, tl.load(seen_by_ptr + tl.cdiv(key_rows, ALIGNED) + key_block) - first_row)
    return start, end


@dataclass(frozen=True)
class ProbabilitiesConfig:
    """Tile sizes of the probabilities, as in `ForwardConfig`; block_m and block_n divide ALIGNED."""

    block_m: int
    block_n: int
    block_depth: int
    num_warps: int
    num_stages: int
    masked_stages: int

    def shared_memory(self, element_size: int) -> int:
        """Bytes of shared memory that a program needs, rounded up a little."""
        stages = max(self.num_stages, self.masked_stages)
        tiles = stages * (self.block_m + self.block_n) * self.block_depth
        return (tiles + self.block_m * self.block_n) * element_size + 1024


@dataclass(frozen=True)
class ValueGradientsConfig:
    """Tile sizes of the values' gradients: `block_m` rows at a time for `block_n` keys; both divide ALIGNED."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int

    def shared_memory(self, block_d: int, element_size: int) -> int:
        """Bytes of shared memory that a program needs, rounded up a little."""
        tiles = self.num_stages * self.block_m * (self.block_n + block_d)
        return (tiles + self.block_n * block_d + self.block_m * self.block_n) * element_size + 1024


def launch_probabilities(
    prepared: Prepared, logsumexp: Tensor, p: Tensor, chunk: BackwardChunk, config: ProbabilitiesConfig
) -> None:
    """Fill `p [B*Hq, rows, keys]`."""
    queries, keys = prepared.queries, prepared.keys
    host_descriptors = compiled_capability(p.device)[0] >= 9
    launch(
        _probabilities_kernel, cdiv(chunk.rows, config.block_m) * p.shape[0], chunk.signature,
        operand(queries, [1, config.block_m, config.block_depth], host_descriptors),
        operand(keys, [1, config.block_n, config.block_depth], host_descriptors),
        operand(p, [1, config.block_m, config.block_n], host_descriptors), prepared.units, logsumexp,
        chunk.spans,
        *queries.stride()[:2], *keys.stride()[:2], *p.stride()[:2],
        queries.shape[0] // keys.shape[0], *chunk.numbers, 1.0,
        HOST_DESCRIPTORS=host_descriptors, CAUSAL=chunk.causal, SPANS=chunk.spans is not None,
        BAND=prepared.band_width, DEPTH=queries.shape[2], ALIGNED=ALIGNED,
        BLOCK_M=config.block_m, BLOCK_N=config.block_n, BLOCK_DEPTH=config.block_depth,
        MASKED_STAGES=config.masked_stages, ALIGNMENT=16 // p.element_size(), PRECISION=dot_precision(p.dtype),
        num_warps=config.num_warps, num_stages=config.num_stages,
    )  # fmt: skip


def launch_value_gradients(
    p: Tensor, dc: Tensor, values: Tensor, grad_rows: Tensor, delta: Tensor, loss_scale: Tensor, dv: Tensor,
    chunk: BackwardChunk, config: ValueGradientsConfig,
) -> None:  # fmt: skip
    """Fill `dc [B*Hq, rows, keys]`, and add to `dv [B*Hq, N, D]` float32 what the rows of the chunk contribute."""
    block_d = value_block(values)
    host_descriptors = compiled_capability(p.device)[0] >= 9
    heads = p.shape[0] // values.shape[0]
    launch(
        _value_gradients_kernel, cdiv(chunk.keys, config.block_n) * p.shape[0], chunk.signature,
        *(operand(x, [1, config.block_m, config.block_n], host_descriptors) for x in (p, dc)),
        operand(values, [1, 1, config.block_n, block_d], host_descriptors),
        operand(grad_rows, [1, config.block_m, block_d], host_descriptors),
        dv, delta, loss_scale, chunk.seen_by,
        *p.stride()[:2], *values.stride()[:3], *grad_rows.stride()[:2],
        heads, heads // values.shape[1], *chunk.numbers, summed_keys(chunk), values.shape[3],
        HOST_DESCRIPTORS=host_descriptors, CAUSAL=chunk.causal, SPANS=chunk.spans is not None,
        GRAD_PITCH=grad_rows.shape[2], ALIGNED=ALIGNED,
        BLOCK_M=config.block_m, BLOCK_N=config.block_n, BLOCK_D=block_d,
        ALIGNMENT=16 // p.element_size(), PRECISION=dot_precision(p.dtype),
        num_warps=config.num_warps, num_stages=config.num_stages,
    )  # fmt: skip


def summed_keys(chunk: BackwardChunk) -> int:
    """For how many of the keys earlier chunks have written sums."""
    if chunk.first_row == 0:
        return 0
    return chunk.key_rows - chunk.query_rows + chunk.first_row if chunk.causal else chunk.key_rows


@functools.cache
def probabilities_config(
    *, element_size: int, compute_capability: tuple[int, int], shared_memory: int
) -> ProbabilitiesConfig:
    """Tile sizes for a GPU of this capability that fit in `shared_memory` bytes a program."""
    if element_size == 4:
        return ProbabilitiesConfig(64, 32, 32, 4, 2, 2)
    if compute_capability[0] >= 9:
        # A fifth stage fits beside the one program that an SM holds: on an H200 it saves 1 to 8 %.
        wide = ProbabilitiesConfig(128, 128, 64, 8, 5 if compute_capability[0] == 9 else 4, 2)
        if wide.shared_memory(element_size) <= shared_memory:
            return wide
    return ProbabilitiesConfig(128, 64, 64, 8, 3, 2)


@functools.cache
def value_gradients_config(*, block_d: int, element_size: int, shared_memory: int) -> ValueGradientsConfig:
    """Tile sizes for values of up to `block_d` columns that fit in `shared_memory` bytes."""
    configs = [ValueGradientsConfig(32, 32, 4, 2), ValueGradientsConfig(32, 32, 4, 1)]
    if element_size == 2:
        shapes = ((64, 64, 4, 3), (64, 128, 8, 3), (128, 64, 8, 2), (64, 64, 4, 2), (64, 64, 4, 1), (32, 64, 4, 1))
        configs = [ValueGradientsConfig(*shape) for shape in shapes]
        if block_d <= 64:
            configs[:2] = configs[1::-1]
        elif block_d > 128:
            configs.insert(0, ValueGradientsConfig(64, 64, 8, 2))
    return next(x for x in configs if x.shared_memory(block_d, element_size) <= shared_memory)
