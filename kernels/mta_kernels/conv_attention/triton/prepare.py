"""What the fused forward reads, made in Triton: the padded side, the expanded side and the causal band.

The derivation is in the package's README. Scores are kept in base-2 units: `factor = scale * log2(e)`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK_ROWS = 64
# Between natural units and those of base 2.
LOG2_E = tl.constexpr(math.log2(math.e))
LN_2 = tl.constexpr(math.log(2.0))


@dataclass(frozen=True)
class Prepared:
    """The inputs of the fused kernels.

    `queries [B*Hq, N, depth]` and `keys [B*H, N, depth]`, one of them a view of overlapping rows, the other
    with the taps folded in; their products are the convolved scores in base-2 units. `values [B, Hkv, N, D]`.
    `band [B*Hq, N, pitch]` float32, of which the first `band_width` columns count.
    """

    queries: Tensor
    keys: Tensor
    values: Tensor
    band: Tensor
    band_width: int


@triton.jit
def _pad_rows_kernel(
    x_ptr, out_ptr,
    stride_xb, stride_xh, stride_xn, stride_xd,
    heads, rows_in, rows_out, rows_above, head_dim,
    PITCH: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """`out[rows_above + r] = x[r]`, zero elsewhere; x `[B, H, rows_in, D]`, out `[B*H, rows_out, PITCH]`."""
    row_blocks = tl.cdiv(rows_out, BLOCK_ROWS)
    batch_head = (tl.program_id(0) // row_blocks).to(tl.int64)
    row = tl.program_id(0) % row_blocks * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    dim = tl.arange(0, BLOCK_D)
    x_ptr += (batch_head // heads) * stride_xb + (batch_head % heads) * stride_xh
    x = _load_rows(x_ptr, row - rows_above, dim, stride_xn, stride_xd, rows_in, head_dim)  # [BLOCK_ROWS, BLOCK_D]
    out_ptr += (batch_head * rows_out + row[:, None]) * PITCH + dim[None, :]
    tl.store(out_ptr, x, mask=(row < rows_out)[:, None] & (dim < PITCH)[None, :])


@triton.jit
def _expand_kernel(
    x_ptr, weight_ptr, out_ptr,
    stride_xb, stride_xh, stride_xn, stride_xd, stride_wh, stride_wt, stride_ws,
    heads, group, rows, rows_above, head_dim, factor,
    TAPS: tl.constexpr, SUMMED_TAPS: tl.constexpr, PITCH: tl.constexpr, SPLIT_WEIGHT: tl.constexpr,
    BLOCK_TAPS: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_SOURCE: tl.constexpr, BLOCK_D: tl.constexpr,
    REPEAT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """`out[r, t] = factor * sum_s weight[h, t, s] * x[r - rows_above + s]`; out `[B*H, rows, TAPS, PITCH]`.

    On the tensor cores: BLOCK_ROWS rows of every tap at once are a banded matrix `[taps x rows, source rows]`,
    the same for every block of rows, times BLOCK_SOURCE rows of x. SPLIT_WEIGHT keeps float32 weights
    exact enough as the sum of two 16-bit ones.
    """
    row_blocks = tl.cdiv(rows, BLOCK_ROWS * REPEAT)
    batch_head = (tl.program_id(0) // row_blocks).to(tl.int64)
    first_row = tl.program_id(0) % row_blocks * (BLOCK_ROWS * REPEAT)
    head = batch_head % heads
    tap_row = tl.arange(0, BLOCK_TAPS * BLOCK_ROWS)
    tap = tap_row // BLOCK_ROWS
    row = tap_row % BLOCK_ROWS
    source = tl.arange(0, BLOCK_SOURCE)
    dim = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    x_ptr += (batch_head // heads) * stride_xb + (head // group) * stride_xh
    summed = source[None, :] - row[:, None]  # [BLOCK_TAPS * BLOCK_ROWS, BLOCK_SOURCE]
    weight = tl.load(
        weight_ptr + head * stride_wh + tap[:, None] * stride_wt + summed * stride_ws,
        mask=(tap < TAPS)[:, None] & (summed >= 0) & (summed < SUMMED_TAPS),
        other=0.0,
    )
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
    heads, group, seq_len, head_dim, factor,
    WIDTH: tl.constexpr, PITCH: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """`near[x, e] = factor * q[x] . k[x - e]` for `0 <= e < WIDTH`, zero before the first key; `[B*H, N, PITCH]`.

    A program multiplies BLOCK_Q queries with the BLOCK_K keys that end at the last of them, and keeps the
    diagonals next to the main one.
    """
    blocks = tl.cdiv(seq_len, BLOCK_Q)
    batch_head = (tl.program_id(0) // blocks).to(tl.int64)
    head = batch_head % heads
    first = tl.program_id(0) % blocks * BLOCK_Q
    query = first + tl.arange(0, BLOCK_Q)
    key = first + BLOCK_Q - BLOCK_K + tl.arange(0, BLOCK_K)
    q_ptr += (batch_head // heads) * stride_qb + head * stride_qh
    k_ptr += (batch_head // heads) * stride_kb + (head // group) * stride_kh
    scores = tl.zeros([BLOCK_Q, BLOCK_K], tl.float32)
    for start in tl.range(0, head_dim, BLOCK_D):
        dim = start + tl.arange(0, BLOCK_D)
        q = _load_rows(q_ptr, query, dim, stride_qn, stride_qd, seq_len, head_dim)  # [BLOCK_Q, BLOCK_D]
        k = _load_rows(k_ptr, key, dim, stride_kn, stride_kd, seq_len, head_dim)  # [BLOCK_K, BLOCK_D]
        scores = tl.dot(q, k.T, scores, input_precision=PRECISION)
    back = query[:, None] - key[None, :]  # [BLOCK_Q, BLOCK_K]
    near_ptr += (batch_head * seq_len + query[:, None]) * PITCH + back
    tl.store(near_ptr, scores * factor, mask=(back >= 0) & (back < WIDTH) & (query < seq_len)[:, None])


@triton.jit
def _band_kernel(
    near_ptr, weight_ptr, band_ptr,
    stride_wh, stride_wa, stride_wb, heads, seq_len, pad,
    QUERY_TAPS: tl.constexpr, KEY_TAPS: tl.constexpr, WIDTH: tl.constexpr, BAND: tl.constexpr,
    NEAR_PITCH: tl.constexpr, BAND_PITCH: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_DEPTH: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """`band[i, d]`, the convolved score of query i and key `i - d` for `0 <= d < BAND`: `[B*H, N, BAND_PITCH]`.

    `band[i, d] = sum_{a, b} weight[h, a, b] * near[i - (cq-1) + a, d - (cq-1-a) + pad - b]` without the terms that
    look ahead (e < 0): one product of the last `cq` rows of `near`, side by side, with a banded matrix.
    """
    blocks = tl.cdiv(seq_len, BLOCK_Q)
    batch_head = (tl.program_id(0) // blocks).to(tl.int64)
    query = tl.program_id(0) % blocks * BLOCK_Q + tl.arange(0, BLOCK_Q)
    diagonal = tl.arange(0, BAND_PITCH)
    near_ptr += batch_head * seq_len * NEAR_PITCH
    weight_ptr += (batch_head % heads) * stride_wh
    band = tl.zeros([BLOCK_Q, BAND_PITCH], tl.float32)
    for start in tl.range(0, QUERY_TAPS * NEAR_PITCH, BLOCK_DEPTH):
        tap = (start + tl.arange(0, BLOCK_DEPTH)) // NEAR_PITCH
        back = (start + tl.arange(0, BLOCK_DEPTH)) % NEAR_PITCH
        row = query[:, None] - (QUERY_TAPS - 1) + tap[None, :]  # [BLOCK_Q, BLOCK_DEPTH]
        # Keys before the first one were never written: they count as zero.
        known = (row < seq_len) & (back[None, :] <= row) & (back < WIDTH)[None, :] & (tap < QUERY_TAPS)[None, :]
        near = tl.load(near_ptr + row.to(tl.int64) * NEAR_PITCH + back[None, :], mask=known, other=0.0)
        key_tap = diagonal[None, :] - (QUERY_TAPS - 1 - tap[:, None]) + pad - back[:, None]
        weight = tl.load(
            weight_ptr + tap[:, None] * stride_wa + key_tap * stride_wb,
            mask=(key_tap >= 0) & (key_tap < KEY_TAPS) & (tap < QUERY_TAPS)[:, None],
            other=0.0,
        )  # [BLOCK_DEPTH, BAND_PITCH]
        band = tl.dot(near, weight.to(tl.float32), band, input_precision=PRECISION)
    band_ptr += (batch_head * seq_len + query[:, None]) * BAND_PITCH + diagonal[None, :]
    tl.store(band_ptr, band, mask=(query < seq_len)[:, None] & (diagonal < BAND)[None, :])


@triton.jit
def _load_rows(x_ptr, row, dim, stride_n, stride_d, rows, dims):
    """`x[row, dim]`, zero outside: `[len(row), len(dim)]`."""
    inside = ((row >= 0) & (row < rows))[:, None] & (dim < dims)[None, :]
    return tl.load(
        x_ptr + row[:, None].to(tl.int64) * stride_n + dim[None, :].to(tl.int64) * stride_d,
        mask=inside,
        other=0.0,
    )


def prepare(q: Tensor, k: Tensor, v: Tensor, weight: Tensor, *, causal: bool, scale: float, pad: int) -> Prepared:
    """Make the inputs of the fused kernels from those of `conv_attention`; `pad` as `key_padding` gives it."""
    query_taps, key_taps = weight.shape[1:]
    factor = scale * LOG2_E.value
    if query_taps <= key_taps:
        queries = overlapping_rows(q, query_taps, above=query_taps - 1)
        keys = expand(k, weight, factor, above=pad)
    else:
        queries = expand(q, weight.transpose(1, 2), factor, above=query_taps - 1)
        keys = overlapping_rows(k, key_taps, above=pad)
    width = (query_taps - 1) + (key_taps - 1 - pad) if causal else 0
    band = causal_band(q, k, weight, factor, pad, width) if width else queries.new_zeros(1, dtype=torch.float32)
    return Prepared(queries, keys, describable(v), band, width)


def overlapping_rows(x: Tensor, taps: int, above: int) -> Tensor:
    """A view `[B*H, N, taps * pitch]` whose row i is `x[i - above], .., x[i - above + taps - 1]` side by side.

    Backed by one padded copy of `x [B, H, N, D]`: consecutive rows overlap.
    """
    batch, heads, rows, head_dim = x.shape
    pitch = row_pitch(x)
    padded_rows = rows + taps - 1
    out = torch.empty(batch * heads, padded_rows, pitch, dtype=x.dtype, device=x.device)
    _pad_rows_kernel[(triton.cdiv(padded_rows, BLOCK_ROWS) * batch * heads,)](
        x, out, *x.stride(), heads, rows, padded_rows, above, head_dim,
        PITCH=pitch, BLOCK_ROWS=BLOCK_ROWS, BLOCK_D=triton.next_power_of_2(pitch),
    )  # fmt: skip
    return out.as_strided((batch * heads, rows, taps * pitch), (padded_rows * pitch, pitch, 1))


def expand(x: Tensor, weight: Tensor, factor: float, above: int) -> Tensor:
    """`[B*Hq, N, taps * pitch]`: `out[i, t] = factor * sum_s weight[h, t, s] * x[i - above + s]`.

    `x [B, H, N, D]`, where H divides Hq, and `weight [Hq, taps, summed taps]` of any strides.
    """
    batch, x_heads, rows, head_dim = x.shape
    heads, taps, summed_taps = weight.shape
    pitch = row_pitch(x)
    block_d = min(128, max(16, triton.next_power_of_2(pitch)))
    block_taps = max(4, triton.next_power_of_2(taps))  # 64 rows at least: a whole tensor core instruction
    repeat = 4
    out = torch.empty(batch * heads, rows, taps * pitch, dtype=x.dtype, device=x.device)
    _expand_kernel[(triton.cdiv(rows, 16 * repeat) * batch * heads, triton.cdiv(pitch, block_d))](
        x, weight, out, *x.stride(), *weight.stride(),
        heads, heads // x_heads, rows, above, head_dim, factor,
        TAPS=taps, SUMMED_TAPS=summed_taps, PITCH=pitch, SPLIT_WEIGHT=weight.dtype != x.dtype,
        BLOCK_TAPS=block_taps, BLOCK_ROWS=16, BLOCK_SOURCE=triton.next_power_of_2(16 + summed_taps - 1),
        BLOCK_D=block_d, REPEAT=repeat, PRECISION=dot_precision(x.dtype), num_warps=8 if block_d == 128 else 4,
    )  # fmt: skip
    return out


def causal_band(q: Tensor, k: Tensor, weight: Tensor, factor: float, pad: int, width: int) -> Tensor:
    """`[B*Hq, N, pitch]` float32: column d of row i is the convolved score of key `i - d`, for `d < width`.

    These are the scores with taps that reach past the query's row: they are summed without those taps, exactly.
    """
    batch, heads, seq_len, head_dim = q.shape
    query_taps, key_taps = weight.shape[1:]
    near_width = query_taps + key_taps - 2  # the farthest key that a score in the band reaches back to
    near_pitch, band_pitch = (max(16, triton.next_power_of_2(w)) for w in (near_width, width))
    grid = (triton.cdiv(seq_len, BLOCK_ROWS) * batch * heads,)
    near = torch.empty(batch * heads, seq_len, near_pitch, dtype=torch.float32, device=q.device)
    group = heads // k.shape[1]
    precision = dot_precision(q.dtype)
    block_q, block_k = (16, 32) if near_width <= 17 else (64, 128)  # the keys reach back near_width - 1
    _near_scores_kernel[(triton.cdiv(seq_len, block_q) * batch * heads,)](
        q, k, near, *q.stride(), *k.stride(), heads, group, seq_len, head_dim, factor,
        WIDTH=near_width, PITCH=near_pitch,
        BLOCK_D=32 if q.element_size() == 4 else 64, BLOCK_Q=block_q, BLOCK_K=block_k,
        PRECISION=precision, num_warps=2 if block_q == 16 else 4,
    )  # fmt: skip
    band = torch.empty(batch * heads, seq_len, band_pitch, dtype=torch.float32, device=q.device)
    _band_kernel[grid](
        near, weight, band, *weight.stride(), heads, seq_len, pad,
        QUERY_TAPS=query_taps, KEY_TAPS=key_taps, WIDTH=near_width, BAND=width,
        NEAR_PITCH=near_pitch, BAND_PITCH=band_pitch, BLOCK_Q=BLOCK_ROWS,
        BLOCK_DEPTH=min(128, triton.next_power_of_2(query_taps * near_pitch)), PRECISION=precision,
    )  # fmt: skip
    return band


def describable(x: Tensor) -> Tensor:
    """`x [B, H, N, D]` itself if a tensor descriptor can describe it, else a padded copy."""
    aligned = all(stride * x.element_size() % 16 == 0 for stride in x.stride()[:3])
    if x.stride(3) == 1 and aligned and x.data_ptr() % 16 == 0 and 0 not in x.stride():
        return x
    return overlapping_rows(x, 1, above=0).unflatten(0, x.shape[:2])[..., : x.shape[3]]


def row_pitch(x: Tensor) -> int:
    """Elements from one row to the next in a prepared copy: head_dim, rounded up to 16 bytes."""
    unit = 16 // x.element_size()
    return (x.shape[3] + unit - 1) // unit * unit


def dot_precision(dtype: torch.dtype) -> str:
    """How the tensor cores multiply float32 numbers: exactly for float32 inputs, else a single TF32 product."""
    return "ieee" if dtype == torch.float32 else "tf32"
