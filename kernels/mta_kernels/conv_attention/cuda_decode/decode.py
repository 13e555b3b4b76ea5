"""Launches few_heads.cu, or hopper_heads.cu or many_heads.cu and merge.cu: constants of a shape, programs, scratch."""

from __future__ import annotations

import ctypes
import math
import threading
from ctypes import c_float, c_int, c_int64, c_void_p

import torch
from torch import Tensor

from mta_kernels import planned
from mta_kernels.allocation import empty
from mta_kernels.backend import size_unsupported
from mta_kernels.conv_attention.arguments import check_block_table, check_splits
from mta_kernels.conv_attention.cuda_decode.hopper_plan import (
    HopperConstants,
    are_describable,
    choose_hopper_plan,
    maps,
    pays,
)
from mta_kernels.conv_attention.cuda_decode.plan import MergeConstants, choose_plan, has_whole_chunks
from mta_kernels.conv_attention.surroundings import on_device_of
from mta_kernels.gpu_limits import overlaps_launches
from mta_kernels.nvrtc.kernel import kernel
from mta_kernels.nvrtc.structures import ELEMENTS, Weight, fields
from mta_kernels.operation import Operation

SPARE = 1 << 17  # counters zeroed ahead, half a MiB

_lock = threading.Lock()
_of_stream: dict[tuple[torch.device, int], Tensor] = {}
_spare: dict[torch.device, Tensor] = {}
_captured: list[Tensor] = []  # kept alive


def arrivals(count: int, device: torch.device) -> Tensor:
    """`[count]` int32 zeros that the kernel leaves as zeros, on the current stream of a device."""
    if device.type != "cuda" or planned.gpu_at(device.index):  # in the tests' emulator, or without a GPU
        return torch.zeros(count, dtype=torch.int32, device=device)
    with _lock:
        spare = _spare.get(device)
        if torch.cuda.is_current_stream_capturing():
            if spare is None or len(spare) < count:
                return torch.zeros(count, dtype=torch.int32, device=device)  # a small kernel in the graph
            _spare[device] = spare[count:]
            _captured.append(spare[:count])
            return _captured[-1]
        if spare is None or len(spare) < SPARE // 2:
            _spare[device] = torch.zeros(SPARE, dtype=torch.int32, device=device)
        key = (device, torch._C._cuda_getCurrentRawStream(device.index))
        mine = _of_stream.get(key)
        if mine is None or len(mine) < count:
            mine = _of_stream[key] = torch.zeros(max(count, 1024), dtype=torch.int32, device=device)
        return mine


def shape_unsupported(dtype: torch.dtype, head_dim: int, query_taps: int, key_taps: int) -> str | None:
    """Why no GPU could run these, or None."""
    if dtype not in ELEMENTS:
        return f"dtype {dtype} is not float16 or bfloat16"
    return size_unsupported(head_dim, query_taps, key_taps)


class CacheRows(ctypes.Structure):
    """`struct Rows` of layout.cuh."""

    _fields_ = (("start", c_void_p), *fields(c_int64, "stride_batch stride_head stride_row stride_number"))

    @classmethod
    def of(cls, x: Tensor) -> CacheRows:
        batch, heads, row, number = x.stride()
        return cls(x.data_ptr(), 2 * batch, 2 * heads, 2 * row, 2 * number)  # numbers of two bytes


class Lengths(ctypes.Structure):
    """`struct Lengths` of work.cuh."""

    _fields_ = (("start", c_void_p), ("stride", c_int64), *fields(c_int, "batch kv_heads"))


class DecodeArguments(ctypes.Structure):
    """`struct Arguments` of layout.cuh."""

    _fields_ = (
        *fields(CacheRows, "q k v"), ("weight", Weight), ("window", c_int), ("table", c_void_p),
        *fields(c_int64, "table_stride_batch table_stride_page"), ("page_bits", c_int), ("lengths", Lengths),
        *fields(c_int, "group programs splits"), ("factor", c_float),
        *fields(c_void_p, "out parts statistics arrived"),
    )  # fmt: skip


def conv_attention_decode(
    operation: Operation, q_window: Tensor, k_cache: Tensor, v_cache: Tensor, weight: Tensor, *, lengths: Tensor,
    splits: int | str = "auto", block_table: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """One decode step by the CUDA kernel, for arguments already checked: `[B, Hq, 1, D]`.

    With `splits="auto"` about one program an SM shares the keys of all sequences and KV heads evenly, by the lengths on
    the device. A number is the programs that share each KV head's keys. Caches of any strides are read in place, slowly
    if their rows are not contiguous, aligned 16-byte chunks. A length of 0 gives zeros. Nothing waits for the GPU: fit
    for a CUDA graph. Raises ValueError for splits or a block_table that do not fit.
    """
    check_splits(splits)
    if block_table is not None:
        check_block_table(block_table, q_window, k_cache)
    (batch, query_heads, window, head_dim), (_, kv_heads, rows, _) = q_window.shape, k_cache.shape
    group, paged, device = query_heads // kv_heads, block_table is not None, q_window.device
    aligned = has_whole_chunks(k_cache) and has_whole_chunks(v_cache)
    shape = q_window.dtype, head_dim, operation.conv, group, paged
    plan = choose_hopper_plan(*shape, device) if aligned and are_describable(k_cache, v_cache, paged) else None
    sequences, pages = (1, k_cache.shape[0]) if block_table is None else block_table.shape
    if not pays(plan, group, sequences * pages * kv_heads * rows):
        plan = choose_plan(*shape, aligned, device)
    constants, keys, count = plan.constants, rows * (pages if paged else 1), 0 if splits == "auto" else int(splits)
    heads = constants.heads * constants.sharing
    programs = batch * kv_heads * count or plan.programs_for(batch * kv_heads, keys)
    if (recorder := planned.recorder()) is not None:
        recorder.found.splits = count or plan.splits_for(batch * kv_heads, keys)
    blocks = programs * constants.head_blocks
    if aligned and not has_whole_chunks(q_window):
        q_window = q_window.clone(memory_format=torch.contiguous_format)  # small
    out = empty(batch, query_heads, 1, head_dim, dtype=q_window.dtype, device=device)
    scratch = empty(2 * blocks * heads, constants.depth + 2, dtype=torch.float32, device=device)
    arguments = DecodeArguments(
        q=CacheRows.of(q_window), k=CacheRows.of(k_cache), v=CacheRows.of(v_cache),
        weight=Weight.of(weight), window=window,
        lengths=Lengths(lengths.data_ptr(), lengths.stride(0) * lengths.element_size() // 4, batch, kv_heads),
        group=group, programs=programs, splits=count,
        factor=operation.scale * math.log2(math.e), out=out.data_ptr(), parts=scratch.data_ptr(),
        statistics=scratch.data_ptr() + 2 * blocks * heads * constants.depth * 4,
    )  # fmt: skip
    if isinstance(constants, HopperConstants) and not count and 2 * batch * kv_heads > programs:
        constants = constants.without_merge  # few programs share a KV head, or none
    if block_table is not None:
        arguments.table = block_table.data_ptr()
        arguments.table_stride_batch, arguments.table_stride_page = block_table.stride()
        arguments.page_bits = rows.bit_length() - 1
    with on_device_of(q_window):
        if constants.last_adds_up:
            arguments.arrived = arrivals(batch * kv_heads * constants.head_blocks, device).data_ptr()
        read = (maps(k_cache, v_cache, constants),) if isinstance(constants, HopperConstants) else ()
        kernel(constants, device.index).launch((blocks, 1), *read, arguments)
        if not constants.last_adds_up and programs > 1 and count != 1:
            merge = kernel(MergeConstants(constants), device.index)
            merge.launch((batch * query_heads, 1), arguments, follows=overlaps_launches(device))
    return out
