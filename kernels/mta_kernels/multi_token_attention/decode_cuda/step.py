"""Launches keys.cu, values.cu and merge.cu."""

from __future__ import annotations

import ctypes
import functools
from ctypes import c_float, c_int, c_int64, c_void_p

import torch
from torch import Tensor

from mta_kernels.allocation import empty
from mta_kernels.conv_attention.cuda_decode.decode import Lengths
from mta_kernels.conv_attention.cuda_decode.plan import has_whole_chunks
from mta_kernels.gpu_limits import overlaps_launches, sm_count
from mta_kernels.multi_token_attention.arguments import NormGate
from mta_kernels.multi_token_attention.decode.state import DecodeState
from mta_kernels.multi_token_attention.decode_cuda.plan import (
    StepConstants,
    StepKernel,
    constants_for,
    has_whole_groups,
    programs_for,
)
from mta_kernels.multi_token_attention.mixers import Mixers
from mta_kernels.multi_token_attention.rows_cuda.rows import Matrix
from mta_kernels.nvrtc.kernel import Kernel, kernel
from mta_kernels.nvrtc.structures import Weight, fields
from mta_kernels.operation import Operation


class Rows(ctypes.Structure):
    """`struct Rows` of layout.cuh."""

    _fields_ = (("start", c_void_p), *fields(c_int64, "stride_batch stride_head stride_row"))

    @classmethod
    def of(cls, x: Tensor) -> Rows:
        return cls(x.data_ptr(), *(2 * stride for stride in x.stride()[:3]))


class Arguments(ctypes.Structure):
    """`struct Arguments` of layout.cuh."""

    _fields_ = (
        *fields(Rows, "q k v"), *fields(Weight, "pre_taps post_taps"), *fields(Matrix, "pre_mix post_mix"),
        ("table", c_void_p), *fields(c_int64, "table_stride_batch table_stride_page"),
        *fields(c_int, "page_bits window"), ("lengths", Lengths),
        *fields(c_int, "programs splits slots wide"), ("scale", c_float), ("logits", c_void_p),
        *fields(c_int64, "stride_lb stride_lh stride_ls stride_ln"), ("logsumexp", c_void_p),
        *fields(c_int64, "stride_sb stride_sh stride_ss"), ("seen", c_void_p), ("stride_seen", c_int64),
        *fields(c_void_p, "found partial out"), *fields(Matrix, "norm gate bias"), *fields(c_float, "eps factor"),
    )  # fmt: skip


def newest_row(
    operation: Operation, q_window: Tensor, k_cache: Tensor, v_cache: Tensor, mixers: Mixers, after: NormGate,
    lengths: Tensor, state: DecodeState | None, block_table: Tensor | None, splits: int, logits: Tensor,
) -> Tensor:  # fmt: skip
    """The newest row where `unsupported` has no reason: `[B, Hq, 1, D]`.

    `logits [B, H, slots, S]` are the state's, or a slot without one. `splits` is 0 for "auto".
    """
    batch, heads, window, head_dim = q_window.shape
    device, constants = q_window.device, constants_for(operation, q_window, mixers, after, block_table)
    capacity = k_cache.shape[2] * (1 if block_table is None else block_table.shape[1])
    programs = programs_for(sm_count(device), batch, capacity, splits)
    if not has_whole_chunks(q_window):
        q_window = q_window.clone(memory_format=torch.contiguous_format)  # small
    scratch = empty(programs + batch, heads, head_dim + 1, dtype=torch.float32, device=device)
    out = empty(batch, heads, 1, head_dim, dtype=q_window.dtype, device=device)
    arguments = Arguments(
        q=Rows.of(q_window), k=Rows.of(k_cache), v=Rows.of(v_cache), window=window,
        pre_mix=Matrix.of(mixers.pre_mix), post_mix=Matrix.of(mixers.post_mix),
        lengths=Lengths(lengths.data_ptr(), lengths.stride(0) * lengths.element_size() // 4, batch, 1),
        programs=programs, splits=splits, slots=logits.shape[2], scale=operation.scale,
        wide=has_whole_groups(logits) and logits.data_ptr() % 16 == 0, logits=logits.data_ptr(),
        found=scratch.data_ptr() + 4 * (programs + batch) * heads * head_dim,
        partial=scratch.data_ptr(), out=out.data_ptr(), eps=after.norm_eps, factor=after.factor,
    )  # fmt: skip
    arguments.stride_lb, arguments.stride_lh, arguments.stride_ls, arguments.stride_ln = logits.stride()
    if mixers.pre_conv is not None:
        arguments.pre_taps = Weight.of(mixers.pre_conv)
    if mixers.post_conv is not None:
        arguments.post_taps = Weight.of(mixers.post_conv)
    if after.norm_weight is not None:
        arguments.norm = Matrix.of(after.norm_weight[None])
    if after.gate_weight is not None:
        arguments.gate = Matrix.of(after.gate_weight)
    if after.gate_bias is not None:
        arguments.bias = Matrix.of(after.gate_bias[:, None])
    if state is not None:
        arguments.logsumexp, arguments.seen = state.logsumexp.data_ptr(), state.lengths.data_ptr()
        arguments.stride_sb, arguments.stride_sh, arguments.stride_ss = state.logsumexp.stride()
        arguments.stride_seen = state.lengths.stride(0)
    if block_table is not None:
        arguments.table = block_table.data_ptr()
        arguments.table_stride_batch, arguments.table_stride_page = block_table.stride()
        arguments.page_bits = k_cache.shape[2].bit_length() - 1
    keys, values, merge = _kernels(constants, device.index)
    follows = overlaps_launches(device)
    keys.launch((programs, 1), arguments)
    values.launch((programs, 1), arguments, follows=follows)
    merge.launch((batch * heads, 1), arguments, follows=follows)
    return out


@functools.cache
def _kernels(constants: StepConstants, device: int) -> tuple[Kernel, ...]:
    return tuple(kernel(StepKernel(name, constants), device) for name in ("keys", "values", "merge"))
