"""The backward: the gradients of the scores by chunks of query rows, then plain products with them.

With the prepared `c[i, j] = Q'[i] . K'[j]`, `P = exp(c - logsumexp)`, `dP = dO V^T` and
`delta[i] = dO[i] . out[i]`, the scores have the gradient `dC = P * (dP - delta)`, and `dV = P^T dO`,
`dK' = dC^T Q'`, `dQ' = dC K'`. A chunk of P and dC is stored in the dtype of the inputs, so memory stays
proportional to the sequence; nothing is added atomically, so results are the same from run to run.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from mta_kernels.conv_attention.triton.backward_band import add_band
from mta_kernels.conv_attention.triton.backward_fold import add_expanded, add_overlapping
from mta_kernels.conv_attention.triton.backward_products import (
    ALIGNED,
    add_transposed_product,
    describe_rows,
    operand,
    row_product,
)
from mta_kernels.conv_attention.triton.forward import (
    _score_tile,
    capability,
    shared_memory_limit,
    value_block,
)
from mta_kernels.conv_attention.triton.prepare import (
    LN_2,
    LOG2_E,
    Prepared,
    _load_rows,
    dot_precision,
    prepare,
    row_pitch,
)

# Query rows whose P and dC are kept at a time; a multiple of ALIGNED.
CHUNK_ROWS = 2048
# Largest magnitudes of scaled float16 gradients (of the output, and of one product with a value): sums of 256
# of these stay below the largest float16.
LARGEST_GRADIENT, LARGEST_TERM = 1024.0, 16.0


@triton.jit
def _output_gradient_kernel(
    grad_ptr, out_ptr, loss_scale_ptr, rows_ptr, delta_ptr,
    stride_gb, stride_gh, stride_gn, stride_gd, stride_ob, stride_oh, stride_on, stride_od,
    heads, seq_len, head_dim,
    PITCH: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """`rows[i] = loss_scale * grad[i]`, `[B*H, N, PITCH]` with zeros behind, and `delta[i] = rows[i] . out[i]`."""
    blocks = tl.cdiv(seq_len, BLOCK_ROWS)
    batch_head = (tl.program_id(0) // blocks).to(tl.int64)
    row = tl.program_id(0) % blocks * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    dim = tl.arange(0, BLOCK_D)
    grad_ptr += (batch_head // heads) * stride_gb + (batch_head % heads) * stride_gh
    out_ptr += (batch_head // heads) * stride_ob + (batch_head % heads) * stride_oh
    grad = _load_rows(grad_ptr, row, dim, stride_gn, stride_gd, seq_len, head_dim)  # [BLOCK_ROWS, BLOCK_D]
    out = _load_rows(out_ptr, row, dim, stride_on, stride_od, seq_len, head_dim)  # [BLOCK_ROWS, BLOCK_D]
    grad = grad.to(tl.float32) * tl.load(loss_scale_ptr + batch_head)
    rows = batch_head * seq_len + row
    inside = row < seq_len
    tl.store(delta_ptr + rows, tl.sum(grad * out.to(tl.float32), 1), mask=inside)
    rows_ptr += rows[:, None] * PITCH + dim[None, :]
    tl.store(rows_ptr, grad.to(rows_ptr.dtype.element_ty), mask=inside[:, None] & (dim < PITCH)[None, :])


@triton.jit
def _score_gradients_kernel(
    q_desc, k_desc, v_desc, grad_desc, p_desc, dc_desc,
    logsumexp_ptr, delta_ptr,
    stride_qh, stride_qn, stride_kh, stride_kn, stride_vb, stride_vh, stride_vn, stride_gh, stride_gn,
    stride_ph, stride_pn,
    heads, k_group, v_group, seq_len, first_row, rows, keys, one,
    HOST_DESCRIPTORS: tl.constexpr, CAUSAL: tl.constexpr, BAND: tl.constexpr,
    DEPTH: tl.constexpr, HEAD_DIM: tl.constexpr, GRAD_PITCH: tl.constexpr, ALIGNED: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_DEPTH: tl.constexpr,
    BLOCK_D: tl.constexpr, COLUMNS: tl.constexpr,
    Q_IN_REGISTERS: tl.constexpr, MASKED_STAGES: tl.constexpr, ALIGNMENT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """P and dC of BLOCK_M queries of one head, out of the `rows` from `first_row` on, for all keys they see.

    q_desc, k_desc, v_desc and logsumexp as in the forward; grad `[B*Hq, N, GRAD_PITCH]`, delta `[B*Hq, N]`; p and
    dc `[B*Hq, rows, keys]` of equal strides. Causal rows are zero from the first key of the band on, up to the
    next multiple of ALIGNED: `_band_gradients_kernel` takes the band. Tiles of values and of grad are BLOCK_D of
    their COLUMNS wide; if that is all of them, grad is loaded once.
    """
    if not HOST_DESCRIPTORS:
        q_desc = describe_rows(q_desc, stride_qh, stride_qn, seq_len, DEPTH, BLOCK_M, BLOCK_DEPTH, ALIGNMENT)
        k_desc = describe_rows(k_desc, stride_kh, stride_kn, seq_len, DEPTH, BLOCK_N, BLOCK_DEPTH, ALIGNMENT)
        v_desc = tl.make_tensor_descriptor(
            v_desc, shape=[tl.num_programs(0), heads // v_group, seq_len, HEAD_DIM],
            strides=[tl.multiple_of(stride_vb, ALIGNMENT), tl.multiple_of(stride_vh, ALIGNMENT),
                     tl.multiple_of(stride_vn, ALIGNMENT), 1],
            block_shape=[1, 1, BLOCK_N, BLOCK_D],
        )  # fmt: skip
        grad_desc = describe_rows(grad_desc, stride_gh, stride_gn, seq_len, GRAD_PITCH, BLOCK_M, BLOCK_D, ALIGNMENT)
        p_desc = describe_rows(p_desc, stride_ph, stride_pn, rows, keys, BLOCK_M, BLOCK_N, ALIGNMENT)
        dc_desc = describe_rows(dc_desc, stride_ph, stride_pn, rows, keys, BLOCK_M, BLOCK_N, ALIGNMENT)

    query_blocks = tl.cdiv(rows, BLOCK_M)
    batch_head = tl.program_id(0) // query_blocks
    # Causal blocks near the end have the most keys: start with them.
    start = (query_blocks - 1 - tl.program_id(0) % query_blocks) * BLOCK_M
    first_query = first_row + start
    query = first_query + tl.arange(0, BLOCK_M)
    k_head = batch_head // k_group

    queries = ()
    if Q_IN_REGISTERS:
        for column in tl.static_range(0, DEPTH, BLOCK_DEPTH):
            q = q_desc.load([batch_head, first_query, column]).reshape(BLOCK_M, BLOCK_DEPTH)
            # An operand that comes from arithmetic stays in registers; a plain load is read from shared memory.
            queries += ((q.to(tl.float32) * one).to(q.dtype),)
    grad = ()
    if BLOCK_D == COLUMNS:
        grad = grad_desc.load([batch_head, first_query, 0]).reshape(BLOCK_M, BLOCK_D)
    row = batch_head.to(tl.int64) * seq_len + query
    logsumexp = tl.load(logsumexp_ptr + row, mask=query < seq_len, other=0.0) * LOG2_E
    delta = tl.load(delta_ptr + row, mask=query < seq_len, other=0.0)

    if CAUSAL:
        unmasked_end = tl.maximum(first_query - BAND + 1, 0) // BLOCK_N * BLOCK_N
        end = tl.minimum(first_query + BLOCK_M - BAND, keys)
    else:
        # Keys after the last one make columns that are not stored.
        unmasked_end = keys
        end = keys
    # Flattened with the loop over slices, so that the copies run ahead over the end of a key block.
    for first_key in tl.range(0, unmasked_end, BLOCK_N, flatten=not Q_IN_REGISTERS and BLOCK_D == COLUMNS):
        scores = _score_tile(queries, q_desc, k_desc, batch_head, k_head, first_query, first_key, one,
                             DEPTH, BLOCK_M, BLOCK_N, BLOCK_DEPTH, Q_IN_REGISTERS, PRECISION)  # fmt: skip
        dp = _value_tile(grad, grad_desc, v_desc, batch_head, heads, v_group, first_query, first_key,
                         BLOCK_M, BLOCK_N, BLOCK_D, COLUMNS, PRECISION)  # fmt: skip
        p = tl.exp2(scores - logsumexp[:, None])
        dc = p * (dp - delta[:, None])
        p_desc.store([batch_head, start, first_key], p.to(p_desc.dtype).reshape(1, BLOCK_M, BLOCK_N))
        dc_desc.store([batch_head, start, first_key], dc.to(p_desc.dtype).reshape(1, BLOCK_M, BLOCK_N))
    if CAUSAL:
        for first_key in tl.range(unmasked_end, end, BLOCK_N, num_stages=MASKED_STAGES):
            scores = _score_tile(queries, q_desc, k_desc, batch_head, k_head, first_query, first_key, one,
                                 DEPTH, BLOCK_M, BLOCK_N, BLOCK_DEPTH, Q_IN_REGISTERS, PRECISION)  # fmt: skip
            dp = _value_tile(grad, grad_desc, v_desc, batch_head, heads, v_group, first_query, first_key,
                             BLOCK_M, BLOCK_N, BLOCK_D, COLUMNS, PRECISION)  # fmt: skip
            back = query[:, None] - (first_key + tl.arange(0, BLOCK_N))[None, :]  # [BLOCK_M, BLOCK_N]
            p = tl.where(back >= BAND, tl.exp2(scores - logsumexp[:, None]), 0.0)
            dc = tl.where(back >= BAND, p * (dp - delta[:, None]), 0.0)
            p_desc.store([batch_head, start, first_key], p.to(p_desc.dtype).reshape(1, BLOCK_M, BLOCK_N))
            dc_desc.store([batch_head, start, first_key], dc.to(p_desc.dtype).reshape(1, BLOCK_M, BLOCK_N))
        nothing = tl.zeros([1, BLOCK_M, BLOCK_N], tl.float32).to(p_desc.dtype)
        written = unmasked_end + tl.cdiv(tl.maximum(end - unmasked_end, 0), BLOCK_N) * BLOCK_N
        aligned_end = tl.minimum(tl.cdiv(first_query + BLOCK_M, ALIGNED) * ALIGNED, keys)
        for first_key in tl.range(written, aligned_end, BLOCK_N):
            p_desc.store([batch_head, start, first_key], nothing)
            dc_desc.store([batch_head, start, first_key], nothing)


@triton.jit
def _value_tile(
    grad, grad_desc, v_desc, batch_head, heads, v_group, first_query, first_key,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, COLUMNS: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Products of output gradients with values, `[BLOCK_M, BLOCK_N]`; `grad` holds the former if they are kept."""
    batch = batch_head // heads
    head = batch_head % heads // v_group
    if BLOCK_D == COLUMNS:
        v = v_desc.load([batch, head, first_key, 0]).reshape(BLOCK_N, BLOCK_D)
        products = tl.dot(grad, v.T, input_precision=PRECISION)
    else:
        products = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for start in tl.range(0, COLUMNS, BLOCK_D):
            slice = grad_desc.load([batch_head, first_query, start]).reshape(BLOCK_M, BLOCK_D)
            v = v_desc.load([batch, head, first_key, start]).reshape(BLOCK_N, BLOCK_D)
            products = tl.dot(slice, v.T, products, input_precision=PRECISION)
    return products


@dataclass(frozen=True)
class BackwardConfig:
    """Tile sizes of the score gradients, as in `ForwardConfig`; block_m and block_n divide ALIGNED.

    `block_d` columns of values are taken at a time.
    """

    block_m: int
    block_n: int
    block_depth: int
    block_d: int
    q_in_registers: bool
    num_warps: int
    num_stages: int
    masked_stages: int

    def shared_memory(self, depth: int, element_size: int) -> int:
        """Bytes of shared memory that a program needs, rounded up a little."""
        slices = -(-depth // self.block_depth)
        slice_bytes = self.block_depth * element_size
        values = self.block_n * self.block_d * element_size
        grad = self.block_m * self.block_d * element_size
        leaving = self.block_m * self.block_n * element_size  # P, then dC, on its way to memory
        stages = max(self.num_stages, self.masked_stages)
        if self.q_in_registers:
            loading = self.block_m * slice_bytes * slices
            stage = self.block_n * slice_bytes * slices + values
            return max(loading, grad + stages * stage + leaving) + 1024
        stage = (self.block_m + self.block_n) * slice_bytes
        if slices == 1:  # no inner loop: the values are in the pipeline too
            stage += values
        return max(stages * stage + grad + values, stages * (grad + values)) + leaving + 1024


def conv_attention_backward(
    q: Tensor, k: Tensor, v: Tensor, weight: Tensor, out: Tensor, logsumexp: Tensor, grad_out: Tensor, *,
    causal: bool, scale: float, pad: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of `conv_attention_forward` in q, k, v and weight, in their shapes and dtypes.

    The arguments are those of the forward, its results `out [B, Hq, N, D]` and `logsumexp [B, Hq, N]`, and
    `grad_out [B, Hq, N, D]`, the gradient of out, of any strides.
    """
    batch, heads, seq_len, head_dim = q.shape
    kv_heads = k.shape[1]
    query_taps, key_taps = weight.shape[1:]
    factor = scale * LOG2_E.value
    prepared = prepare(q, k, v, weight, causal=causal, scale=scale, pad=pad)
    config = backward_config(
        depth=prepared.queries.shape[2],
        columns=value_block(q),
        element_size=q.element_size(),
        compute_capability=capability(q.device),
        shared_memory=shared_memory_limit(q.device),
    )
    loss_scale = gradient_scale(grad_out, v)
    grad_rows, delta = output_gradient(grad_out, out, loss_scale)

    def sums(*shape: int) -> Tensor:
        return torch.empty(*shape, dtype=torch.float32, device=q.device)

    dq, dk = sums(batch * heads, seq_len, head_dim), sums(batch * kv_heads, seq_len, head_dim)
    dv, dkeys = sums(batch * heads, seq_len, head_dim), sums(batch * heads, seq_len, prepared.queries.shape[2])
    dweight = torch.zeros(weight.shape, dtype=torch.float32, device=q.device)
    unit = 16 // q.element_size()
    scratch = torch.empty(
        2, batch * heads, min(CHUNK_ROWS, seq_len), triton.cdiv(seq_len, unit) * unit, dtype=q.dtype, device=q.device
    )
    expanded_keys = query_taps <= key_taps
    for first_row in range(0, seq_len, CHUNK_ROWS):
        rows = min(CHUNK_ROWS, seq_len - first_row)
        p, dc = scratch[:, :, :rows, : first_row + rows if causal else seq_len]
        launch_score_gradients(prepared, grad_rows, logsumexp, delta, p, dc, q.shape, first_row, causal, config)
        chunk: dict[str, Any] = {
            "first_row": first_row, "causal": causal, "host_descriptors": capability(q.device)[0] >= 9
        }  # fmt: skip
        add_transposed_product(p, grad_rows, dv, loss_scale, factor=1.0, **chunk)
        add_transposed_product(dc, prepared.queries, dkeys, loss_scale, factor=LN_2.value, **chunk)
        dqueries = row_product(dc, prepared.keys, loss_scale, factor=LN_2.value, **chunk)
        rows_of_q = {"above": query_taps - 1, "first_row": first_row}
        if expanded_keys:
            add_overlapping(dqueries, dq, taps=query_taps, **rows_of_q)
        else:
            dweight += add_expanded(dqueries, q, weight.mT, dq, factor=factor, **rows_of_q).mT
    if expanded_keys:
        dweight += add_expanded(dkeys, k, weight, dk, factor=factor, above=pad)
    else:
        add_overlapping(dkeys, dk, taps=key_taps, above=pad)
    if prepared.band_width:
        dweight += add_band(
            prepared.band, q, k, v, weight, grad_out, logsumexp, delta, loss_scale, dq, dk, dv,
            factor=factor, pad=pad, width=prepared.band_width,
        )  # fmt: skip
    return (
        dq.view(q.shape).to(q.dtype),
        dk.view(k.shape).to(k.dtype),
        dv.view(batch, kv_heads, heads // kv_heads, seq_len, head_dim).sum(2).to(v.dtype),
        dweight.to(weight.dtype),
    )


def launch_score_gradients(
    prepared: Prepared, grad_rows: Tensor, logsumexp: Tensor, delta: Tensor, p: Tensor, dc: Tensor,
    shape: torch.Size, first_row: int, causal: bool, config: BackwardConfig,
) -> None:  # fmt: skip
    """Fill `p, dc [B*Hq, rows, keys]`, the rows from `first_row` on; `shape` is q's."""
    batch, heads, seq_len, head_dim = shape
    queries, keys, values = prepared.queries, prepared.keys, prepared.values
    rows, seen_keys = p.shape[1:]
    blocks = [
        (queries, [1, config.block_m, config.block_depth]),
        (keys, [1, config.block_n, config.block_depth]),
        (values, [1, 1, config.block_n, config.block_d]),
        (grad_rows, [1, config.block_m, config.block_d]),
        (p, [1, config.block_m, config.block_n]),
        (dc, [1, config.block_m, config.block_n]),
    ]
    host_descriptors = capability(values.device)[0] >= 9
    _score_gradients_kernel[(triton.cdiv(rows, config.block_m) * batch * heads,)](
        *(operand(x, block, host_descriptors) for x, block in blocks),
        logsumexp, delta,
        *queries.stride()[:2], *keys.stride()[:2], *values.stride()[:3], *grad_rows.stride()[:2], *p.stride()[:2],
        heads, batch * heads // keys.shape[0], heads // values.shape[1], seq_len, first_row, rows, seen_keys, 1.0,
        HOST_DESCRIPTORS=host_descriptors,
        CAUSAL=causal, BAND=prepared.band_width,
        DEPTH=queries.shape[2], HEAD_DIM=head_dim, GRAD_PITCH=grad_rows.shape[2], ALIGNED=ALIGNED,
        BLOCK_M=config.block_m, BLOCK_N=config.block_n, BLOCK_DEPTH=config.block_depth,
        BLOCK_D=config.block_d, COLUMNS=value_block(values),
        Q_IN_REGISTERS=config.q_in_registers, MASKED_STAGES=config.masked_stages,
        ALIGNMENT=16 // p.element_size(), PRECISION=dot_precision(p.dtype),
        num_warps=config.num_warps, num_stages=config.num_stages,
    )  # fmt: skip


def output_gradient(grad_out: Tensor, out: Tensor, loss_scale: Tensor) -> tuple[Tensor, Tensor]:
    """`loss_scale * grad_out` as `[B*H, N, pitch]`, and its product with out, row by row, `[B*H, N]` float32."""
    batch, heads, seq_len, head_dim = grad_out.shape
    pitch = row_pitch(grad_out)
    rows = torch.empty(batch * heads, seq_len, pitch, dtype=grad_out.dtype, device=grad_out.device)
    delta = torch.empty(batch * heads, seq_len, dtype=torch.float32, device=grad_out.device)
    _output_gradient_kernel[(triton.cdiv(seq_len, 32) * batch * heads,)](
        grad_out, out, loss_scale, rows, delta, *grad_out.stride(), *out.stride(), heads, seq_len, head_dim,
        PITCH=pitch, BLOCK_ROWS=32, BLOCK_D=triton.next_power_of_2(pitch),
    )  # fmt: skip
    return rows, delta


def gradient_scale(grad_out: Tensor, v: Tensor) -> Tensor:
    """`[B*Hq]` powers of two that keep the gradients of a head's scores within float16; ones for other dtypes."""
    batch, heads = grad_out.shape[:2]
    if grad_out.dtype != torch.float16:
        return torch.ones(batch * heads, dtype=torch.float32, device=grad_out.device)
    largest, largest_value = (x.abs().amax((2, 3)).float().clamp_min(1e-10) for x in (grad_out, v))
    largest_value = largest_value.repeat_interleave(heads // v.shape[1], dim=1)
    scale = (LARGEST_TERM / (largest * largest_value)).minimum(LARGEST_GRADIENT / largest)
    return torch.exp2(torch.floor(torch.log2(scale))).flatten()


def backward_config(
    *, depth: int, columns: int, element_size: int, compute_capability: tuple[int, int], shared_memory: int
) -> BackwardConfig:
    """Tile sizes for these shapes on a GPU of this capability, within `shared_memory` bytes a program."""
    candidates = []
    if element_size == 4:
        candidates.append(BackwardConfig(64, 32, 32, 32, False, 4, 2, 2))
    else:
        slices = -(-depth // 128)
        if compute_capability[0] == 9 and slices * columns <= 256 and columns <= 128:  # one program an SM and more
            candidates.append(BackwardConfig(64, 64, 128, columns, True, 4, 2, 1))
        if columns <= 128:
            candidates.append(BackwardConfig(128, 64, 64, columns, False, 8, 3, 2))
        candidates.append(BackwardConfig(64, 64, 64, min(columns, 128), False, 4, 2, 2))
        candidates.append(BackwardConfig(64, 64, 64, 64, False, 4, 2, 2))
    for config in candidates:
        if config.shared_memory(depth, element_size) <= shared_memory:
            return config
    raise ValueError(
        f"the smallest tiles for depth {depth} and {columns} columns of values need more than "
        f"the {shared_memory} bytes of shared memory of this GPU; backend='reference' needs none"
    )
