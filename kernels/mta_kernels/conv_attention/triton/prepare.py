"""What the fused kernels read, made in Triton: the padded side, the expanded side and the causal band.

The derivation is in the package's README. Scores are kept in base-2 units: `factor = scale * log2(e)`.
"""

from __future__ import annotations

import math
from collections.abc import Hashable
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from mta_kernels.allocation import empty
from mta_kernels.conv_attention.triton.launch import call_signature, cdiv, dependent_launches, launch, next_power_of_2
from mta_kernels.operation import Operation

# Natural units times this are base-2 units.
LOG2_E = tl.constexpr(math.log2(math.e))
LN_2 = tl.constexpr(math.log(2.0))


@dataclass(frozen=True)
class Prepared:
    """The inputs of the fused kernels, for queries that are the last M of N positions.

    `queries [B*Hq, M, depth]` and `keys [B*H, N, depth]`, one of them a view of overlapping rows, the other
    with the taps folded in; their products are the convolved scores in base-2 units. In fp16 that needs a factor,
    `units [B*Hq]` float32, powers of two. `values [B, Hkv, N, D]`.
    `band [B*Hq, M, pitch]` float32, of which the first `band_width` columns count.
    """

    queries: Tensor
    keys: Tensor
    units: Tensor | None
    values: Tensor
    band: Tensor
    band_width: int


@triton.jit
def _prepare_kernel(
    q_ptr, k_ptr, weight_ptr, expanded_ptr, units_ptr, padded_ptr,
    stride_qb, stride_qh, stride_qn, stride_qd, stride_kb, stride_kh, stride_kn, stride_kd,
    stride_wh, stride_wa, stride_wb,
    heads, group, query_rows, key_rows, head_dim, pad, factor, expand_programs,
    QUERY_TAPS: tl.constexpr, KEY_TAPS: tl.constexpr, KEYS_EXPANDED: tl.constexpr,
    PITCH: tl.constexpr, SPLIT_WEIGHT: tl.constexpr,
    BLOCK_TAPS: tl.constexpr, BLOCK_SOURCE: tl.constexpr, BLOCK_D: tl.constexpr, REPEAT: tl.constexpr,
    BLOCK_PAD: tl.constexpr, BLOCK_PITCH: tl.constexpr, PRECISION: tl.constexpr, DEPENDENT_LAUNCH: tl.constexpr,
):  # fmt: skip
    """One program: a block of the expanded side or of the padded side, in this order.

    q `[B, Hq, M, D]`, k `[B, Hkv, N, D]`, weight `[Hq, cq, ck]`; expanded `[B*Hq, N or M, taps, PITCH]`, its units
    `[B*Hq]` or None, padded `[B*H, M + cq - 1 or N + ck - 1, PITCH]`.
    """
    if DEPENDENT_LAUNCH:
        gdc_launch_dependents()
        gdc_wait()  # what is written may lie where `near` was
    program = tl.program_id(0)
    if program < expand_programs:
        if KEYS_EXPANDED:
            _expand(k_ptr, weight_ptr, expanded_ptr, units_ptr, stride_kb, stride_kh, stride_kn, stride_kd,
                    stride_wh, stride_wa, stride_wb, program, heads, group, key_rows, pad, head_dim, factor,
                    QUERY_TAPS, KEY_TAPS, PITCH, SPLIT_WEIGHT, BLOCK_TAPS, BLOCK_SOURCE, BLOCK_D, REPEAT,
                    PRECISION)  # fmt: skip
        else:
            _expand(q_ptr, weight_ptr, expanded_ptr, units_ptr, stride_qb, stride_qh, stride_qn, stride_qd,
                    stride_wh, stride_wb, stride_wa, program, heads, 1, query_rows, QUERY_TAPS - 1, head_dim, factor,
                    KEY_TAPS, QUERY_TAPS, PITCH, SPLIT_WEIGHT, BLOCK_TAPS, BLOCK_SOURCE, BLOCK_D, REPEAT,
                    PRECISION)  # fmt: skip
    else:
        program -= expand_programs
        if KEYS_EXPANDED:
            _pad_rows(q_ptr, padded_ptr, stride_qb, stride_qh, stride_qn, stride_qd, program, heads, query_rows,
                      query_rows + QUERY_TAPS - 1, QUERY_TAPS - 1, head_dim, PITCH, BLOCK_PAD, BLOCK_PITCH)  # fmt: skip
        else:
            _pad_rows(k_ptr, padded_ptr, stride_kb, stride_kh, stride_kn, stride_kd, program, heads // group,
                      key_rows, key_rows + KEY_TAPS - 1, pad, head_dim, PITCH, BLOCK_PAD, BLOCK_PITCH)  # fmt: skip


@triton.jit
def _pad_rows_kernel(
    x_ptr, out_ptr, stride_xb, stride_xh, stride_xn, stride_xd, heads, rows_in, rows_out, rows_above, head_dim,
    PITCH: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """`_pad_rows` alone."""
    _pad_rows(x_ptr, out_ptr, stride_xb, stride_xh, stride_xn, stride_xd, tl.program_id(0), heads, rows_in, rows_out,
              rows_above, head_dim, PITCH, BLOCK_ROWS, BLOCK_D)  # fmt: skip


@triton.jit
def _pad_rows(
    x_ptr, out_ptr, stride_xb, stride_xh, stride_xn, stride_xd, program, heads, rows_in, rows_out, rows_above, head_dim,
    PITCH: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """`out[rows_above + r] = x[r]`, zero elsewhere; x `[B, H, rows_in, D]`, out `[B*H, rows_out, PITCH]`."""
    row_blocks = tl.cdiv(rows_out, BLOCK_ROWS)
    batch_head = (program // row_blocks).to(tl.int64)
    row = program % row_blocks * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    dim = tl.arange(0, BLOCK_D)
    x_ptr += (batch_head // heads) * stride_xb + (batch_head % heads) * stride_xh
    x = _load_rows(x_ptr, row - rows_above, dim, stride_xn, stride_xd, rows_in, head_dim)  # [BLOCK_ROWS, BLOCK_D]
    out_ptr += (batch_head * rows_out + row[:, None]) * PITCH + dim[None, :]
    tl.store(out_ptr, x, mask=(row < rows_out)[:, None] & (dim < PITCH)[None, :])


@triton.jit
def fold_unit(taps, factor):
    """A power of two: `factor` times numbers times taps, added up and divided by it, are no larger than the numbers.

    `taps` is the sum of the taps' magnitudes, or the largest of several such sums. The numbers themselves do not
    matter, so that a later token or another document changes no bit.
    """
    bound = tl.maximum(taps, 2.0**-40) * tl.abs(factor)
    return power_of_two_above(tl.minimum(tl.maximum(bound, 2.0**-100), 2.0**120))


@triton.jit
def power_of_two_above(x):
    """The least one above x, a normal number of float32 above 0."""
    return ((x.to(tl.int32, bitcast=True) & 0x7F800000) + (1 << 23)).to(tl.float32, bitcast=True)


@triton.jit
def scale_taps(weight, taps, factor):
    """The weight in float32 with a power of two of `factor`: its 16-bit parts are in the range of their dtype."""
    unit = power_of_two_above(tl.maximum(taps, 2.0**-40)) * 2.0**-14
    return weight.to(tl.float32) * (1.0 / unit), factor * unit


@triton.jit
def _expand(
    x_ptr, weight_ptr, out_ptr, units_ptr,
    stride_xb, stride_xh, stride_xn, stride_xd, stride_wh, stride_wt, stride_ws,
    program, heads, group, rows, rows_above, head_dim, factor,
    TAPS: tl.constexpr, SUMMED_TAPS: tl.constexpr, PITCH: tl.constexpr, SPLIT_WEIGHT: tl.constexpr,
    BLOCK_TAPS: tl.constexpr, BLOCK_SOURCE: tl.constexpr, BLOCK_D: tl.constexpr, REPEAT: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """`out[r, t] = factor * sum_s weight[h, t, s] * x[r - rows_above + s]`; out `[B*Hq, rows, TAPS, PITCH]`.

    With units, out is divided by its head's, `fold_unit`.
    On the tensor cores: 16 rows of every tap at once are a banded matrix `[taps x rows, source rows]` times
    BLOCK_SOURCE rows of x. The matrix is the same for every block of rows. SPLIT_WEIGHT keeps float32 weights exact
    enough as the sum of two 16-bit ones.
    """
    BLOCK_ROWS: tl.constexpr = 16
    column_blocks = tl.cdiv(PITCH, BLOCK_D)
    row_blocks = tl.cdiv(rows, BLOCK_ROWS * REPEAT)
    dim = program % column_blocks * BLOCK_D + tl.arange(0, BLOCK_D)
    first_row = program // column_blocks % row_blocks * (BLOCK_ROWS * REPEAT)
    batch_head = (program // column_blocks // row_blocks).to(tl.int64)
    head = batch_head % heads
    tap_row = tl.arange(0, BLOCK_TAPS * BLOCK_ROWS)
    tap = tap_row // BLOCK_ROWS
    row = tap_row % BLOCK_ROWS
    source = tl.arange(0, BLOCK_SOURCE)
    x_ptr += (batch_head // heads) * stride_xb + (head // group) * stride_xh
    summed = source[None, :] - row[:, None]  # [BLOCK_TAPS * BLOCK_ROWS, BLOCK_SOURCE]
    weight = tl.load(
        weight_ptr + head * stride_wh + tap[:, None].to(tl.int64) * stride_wt + summed.to(tl.int64) * stride_ws,
        mask=(tap < TAPS)[:, None] & (summed >= 0) & (summed < SUMMED_TAPS),
        other=0.0,
    )
    if units_ptr is not None:
        taps = tl.max(tl.sum(tl.abs(weight.to(tl.float32)), 1), 0)
        unit = fold_unit(taps, factor)
        tl.store(units_ptr + batch_head, unit, mask=program % (column_blocks * row_blocks) == 0)
        factor /= unit
        if SPLIT_WEIGHT:
            weight, factor = scale_taps(weight, taps, factor)
    coarse = weight.to(x_ptr.dtype.element_ty)
    fine = (weight - coarse.to(weight.dtype)).to(x_ptr.dtype.element_ty)
    for block in tl.range(REPEAT):
        start = first_row + block * BLOCK_ROWS
        x = _load_rows(x_ptr, start - rows_above + source, dim, stride_xn, stride_xd, rows, head_dim)
        out = tl.dot(coarse, x, input_precision=PRECISION)  # [BLOCK_TAPS * BLOCK_ROWS, BLOCK_D]
        if SPLIT_WEIGHT:
            out = tl.dot(fine, x, out, input_precision=PRECISION)
        inside = ((tap < TAPS) & (start + row < rows))[:, None] & (dim < PITCH)[None, :]
        out_row = (batch_head * rows + start + row) * TAPS + tap
        tl.store(
            out_ptr + out_row[:, None] * PITCH + dim[None, :],
            (out * factor).to(out_ptr.dtype.element_ty),
            mask=inside,
        )


@triton.jit
def _near_scores_kernel(
    q_ptr, k_ptr, near_ptr,
    stride_qb, stride_qh, stride_qn, stride_qd, stride_kb, stride_kh, stride_kn, stride_kd,
    heads, group, query_rows, key_rows, head_dim, factor,
    WIDTH: tl.constexpr, PITCH: tl.constexpr, DEPENDENT_LAUNCH: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """`near[x, e] = factor * q[x] . k[x - e]` for `0 <= e < WIDTH`, zero before the first key: `[B*Hq, M, PITCH]`.

    x on the right is a position. A program multiplies BLOCK_Q queries with the BLOCK_K keys that end at the last of
    them, and keeps the diagonals next to the main one. Columns from WIDTH on are zero, up to the last of these.
    """
    if DEPENDENT_LAUNCH:
        gdc_launch_dependents()
    blocks = tl.cdiv(query_rows, BLOCK_Q)
    batch_head = (tl.program_id(0) // blocks).to(tl.int64)
    head = batch_head % heads
    query = tl.program_id(0) % blocks * BLOCK_Q + tl.arange(0, BLOCK_Q)
    first = tl.program_id(0) % blocks * BLOCK_Q + (key_rows - query_rows)
    key = first + BLOCK_Q - BLOCK_K + tl.arange(0, BLOCK_K)
    q_ptr += (batch_head // heads) * stride_qb + head * stride_qh
    k_ptr += (batch_head // heads) * stride_kb + (head // group) * stride_kh
    scores = tl.zeros([BLOCK_Q, BLOCK_K], tl.float32)
    for start in tl.range(0, head_dim, BLOCK_D):
        dim = start + tl.arange(0, BLOCK_D)
        q = _load_rows(q_ptr, query, dim, stride_qn, stride_qd, query_rows, head_dim)  # [BLOCK_Q, BLOCK_D]
        k = _load_rows(k_ptr, key, dim, stride_kn, stride_kd, key_rows, head_dim)  # [BLOCK_K, BLOCK_D]
        scores = tl.dot(q, k.T, scores, input_precision=PRECISION)
    back = (first + tl.arange(0, BLOCK_Q))[:, None] - key[None, :]  # [BLOCK_Q, BLOCK_K]
    near_ptr += (batch_head * query_rows + query[:, None]) * PITCH + back
    scores = tl.where((back < WIDTH) & (key >= 0)[None, :], scores * factor, 0.0)
    tl.store(near_ptr, scores, mask=(back >= 0) & (back < PITCH) & (query < query_rows)[:, None])


@triton.jit
def _band_kernel(
    near_ptr, weight_ptr, band_ptr,
    stride_wh, stride_wa, stride_wb, heads, query_rows, pad,
    QUERY_TAPS: tl.constexpr, KEY_TAPS: tl.constexpr, NEAR_PITCH: tl.constexpr, BAND_PITCH: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_DEPTH: tl.constexpr, PRECISION: tl.constexpr, DEPENDENT_LAUNCH: tl.constexpr,
):  # fmt: skip
    """`band[i, d]`, the convolved score of the query at position i and key `i - d`; columns past the band hold no more.

    `band[i, d] = sum_{a, b} weight[h, a, b] * near[i - (cq-1) + a, d - (cq-1-a) + pad - b]` without the terms that
    look ahead (e < 0): one product of the last `cq` rows of `near`, side by side, with a banded matrix.
    near `[B*Hq, M, NEAR_PITCH]` has whole rows, so that they are loaded at once; out `[B*Hq, M, BAND_PITCH]`.
    """
    if DEPENDENT_LAUNCH:
        gdc_launch_dependents()
        gdc_wait()
    blocks = tl.cdiv(query_rows, BLOCK_Q)
    batch_head = (tl.program_id(0) // blocks).to(tl.int64)
    query = tl.program_id(0) % blocks * BLOCK_Q + tl.arange(0, BLOCK_Q)
    diagonal = tl.arange(0, BAND_PITCH)
    near_ptr += batch_head * query_rows * NEAR_PITCH
    weight_ptr += (batch_head % heads) * stride_wh
    band = tl.zeros([BLOCK_Q, BAND_PITCH], tl.float32)
    for start in tl.range(0, QUERY_TAPS * NEAR_PITCH, BLOCK_DEPTH):
        tap = (start + tl.arange(0, BLOCK_DEPTH)) // NEAR_PITCH
        back = (start + tl.arange(0, BLOCK_DEPTH)) % NEAR_PITCH
        row = query[:, None] - (QUERY_TAPS - 1) + tap[None, :]  # [BLOCK_Q, BLOCK_DEPTH]
        known = (row >= 0) & (row < query_rows) & (tap < QUERY_TAPS)[None, :]
        near = tl.load(near_ptr + row.to(tl.int64) * NEAR_PITCH + back[None, :], mask=known, other=0.0)
        key_tap = diagonal[None, :] - (QUERY_TAPS - 1 - tap[:, None]) + pad - back[:, None]
        weight = tl.load(
            weight_ptr + tap[:, None].to(tl.int64) * stride_wa + key_tap.to(tl.int64) * stride_wb,
            mask=(key_tap >= 0) & (key_tap < KEY_TAPS) & (tap < QUERY_TAPS)[:, None],
            other=0.0,
        )  # [BLOCK_DEPTH, BAND_PITCH]
        band = tl.dot(near, weight.to(tl.float32), band, input_precision=PRECISION)
    band_ptr += (batch_head * query_rows + query[:, None]) * BAND_PITCH + diagonal[None, :]
    tl.store(band_ptr, band, mask=(query < query_rows)[:, None])


@triton.jit
def _load_rows(x_ptr, row, dim, stride_n, stride_d, rows, dims):
    """`x[row, dim]`, zero outside: `[len(row), len(dim)]`."""
    inside = ((row >= 0) & (row < rows))[:, None] & (dim < dims)[None, :]
    return tl.load(
        x_ptr + row[:, None].to(tl.int64) * stride_n + dim[None, :].to(tl.int64) * stride_d,
        mask=inside,
        other=0.0,
    )


def prepare(operation: Operation, q: Tensor, k: Tensor, v: Tensor, weight: Tensor, *, signature: Hashable) -> Prepared:
    """Make the inputs of the fused kernels from the inputs of `conv_attention`.

    The queries `q [B, Hq, M, D]` are the last M of the N positions of `k, v [B, Hkv, N, D]`.
    """
    batch, heads, query_rows, head_dim = q.shape
    kv_heads, key_rows = k.shape[1:3]
    query_taps, key_taps, pad = operation.conv.query_taps, operation.conv.key_taps, operation.conv.pad
    keys_expanded = query_taps <= key_taps
    factor, pitch = operation.scale * LOG2_E.value, row_pitch(q)
    padded_heads, padded_rows, expanded_rows = (
        (heads, query_rows + query_taps - 1, key_rows)
        if keys_expanded
        else (kv_heads, key_rows + key_taps - 1, query_rows)
    )
    taps = min(query_taps, key_taps)
    width = operation.band
    band = causal_band(q, k, weight, factor, pad, width, signature)  # first: its scratch is free again for the rest
    padded = empty(batch * padded_heads, padded_rows, pitch, dtype=q.dtype, device=q.device)
    overlapping = padded.as_strided(
        (batch * padded_heads, padded_rows - taps + 1, taps * pitch), (padded_rows * pitch, pitch, 1)
    )
    expanded = empty(batch * heads, expanded_rows, taps * pitch, dtype=q.dtype, device=q.device)
    units = empty(batch * heads, dtype=torch.float32, device=q.device) if q.dtype == torch.float16 else None

    dependent = dependent_launches(q)
    block_d = min(64, max(16, next_power_of_2(pitch)))
    repeat, block_pad = 4, 64
    expand_programs = cdiv(expanded_rows, 16 * repeat) * batch * heads * cdiv(pitch, block_d)
    launch(
        _prepare_kernel, expand_programs + cdiv(padded_rows, block_pad) * batch * padded_heads, signature,
        q, k, weight, expanded, units, padded, *q.stride(), *k.stride(), *weight.stride(),
        heads, heads // kv_heads, query_rows, key_rows, head_dim, pad, factor, expand_programs,
        QUERY_TAPS=query_taps, KEY_TAPS=key_taps, KEYS_EXPANDED=keys_expanded,
        PITCH=pitch, SPLIT_WEIGHT=weight.dtype != q.dtype,
        # 64 rows of the banded matrix at least: a whole tensor core instruction.
        BLOCK_TAPS=max(4, next_power_of_2(taps)), BLOCK_SOURCE=next_power_of_2(16 + max(query_taps, key_taps) - 1),
        BLOCK_D=block_d, REPEAT=repeat, BLOCK_PAD=block_pad, BLOCK_PITCH=next_power_of_2(pitch),
        PRECISION=dot_precision(q.dtype), DEPENDENT_LAUNCH=dependent,
        num_warps=4, launch_pdl=dependent and width > 0,
    )  # fmt: skip
    queries, keys = (overlapping, expanded) if keys_expanded else (expanded, overlapping)
    return Prepared(queries, keys, units, describable(v), band, width)


def causal_band(
    q: Tensor, k: Tensor, weight: Tensor, factor: float, pad: int, width: int, signature: Hashable
) -> Tensor:
    """`[B*Hq, M, pitch]` float32: column `d < width` of row i is the convolved score of its position and key `i - d`.

    These are the scores with taps that reach past the query's row: they are summed without those taps, exactly.
    """
    batch, heads, query_rows, head_dim = q.shape
    kv_heads, key_rows = k.shape[1:3]
    query_taps, key_taps = weight.shape[1:]
    near_width = query_taps + key_taps - 2  # the farthest key that a score in the band reaches back to
    near_pitch, band_pitch = (max(16, next_power_of_2(w)) for w in (near_width, width))
    band = empty(batch * heads, query_rows if width else 0, band_pitch, dtype=torch.float32, device=q.device)
    if not width:
        return band
    near = empty(batch * heads, query_rows, near_pitch, dtype=torch.float32, device=q.device)
    precision = dot_precision(q.dtype)
    dependent = dependent_launches(q)
    block_q = 16 if near_pitch == 16 else 64  # twice as many keys reach back far enough for whole rows
    launch(
        _near_scores_kernel, cdiv(query_rows, block_q) * batch * heads, signature,
        q, k, near, *q.stride(), *k.stride(),
        heads, heads // kv_heads, query_rows, key_rows, head_dim, factor,
        WIDTH=near_width, PITCH=near_pitch, DEPENDENT_LAUNCH=dependent,
        BLOCK_D=32 if q.element_size() == 4 else 64, BLOCK_Q=block_q, BLOCK_K=2 * block_q,
        PRECISION=precision, num_warps=2 if block_q == 16 else 4,
    )  # fmt: skip
    launch(
        _band_kernel, cdiv(query_rows, 64) * batch * heads, signature,
        near, weight, band, *weight.stride(), heads, query_rows, pad,
        QUERY_TAPS=query_taps, KEY_TAPS=key_taps, NEAR_PITCH=near_pitch, BAND_PITCH=band_pitch, BLOCK_Q=64,
        BLOCK_DEPTH=min(128, next_power_of_2(query_taps * near_pitch)), PRECISION=precision,
        DEPENDENT_LAUNCH=dependent, launch_pdl=dependent,
    )  # fmt: skip
    return band


def describable(x: Tensor) -> Tensor:
    """`x [B, H, N, D]` itself if a tensor descriptor can describe it, else a copy with padded rows."""
    aligned = all(stride * x.element_size() % 16 == 0 for stride in x.stride()[:3])
    if x.stride(3) == 1 and aligned and x.data_ptr() % 16 == 0 and 0 not in x.stride():
        return x
    batch, heads, rows, head_dim = x.shape
    pitch = row_pitch(x)
    out = empty(batch, heads, rows, pitch, dtype=x.dtype, device=x.device)
    launch(
        _pad_rows_kernel, cdiv(rows, 64) * batch * heads, call_signature(x),
        x, out, *x.stride(), heads, rows, rows, 0, head_dim,
        PITCH=pitch, BLOCK_ROWS=64, BLOCK_D=next_power_of_2(pitch),
    )  # fmt: skip
    return out[..., :head_dim]


def row_pitch(x: Tensor) -> int:
    """Elements from one row to the next in a prepared copy: head_dim, rounded up to 16 bytes."""
    unit = 16 // x.element_size()
    return (x.shape[3] + unit - 1) // unit * unit


def dot_precision(dtype: torch.dtype) -> str:
    """How the tensor cores multiply float32 numbers: exactly for float32 inputs, else a single TF32 product."""
    return "ieee" if dtype == torch.float32 else "tf32"
