"""Decode: one new query a sequence, keys split over programs, partial results combined by a second kernel.

The kernel of the shares is in decode_shares.py, their number and its tiles in decode_plan.py.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_wait
from triton.tools.tensor_descriptor import TensorDescriptor

from mta_kernels import planned
from mta_kernels.allocation import empty, empty_like
from mta_kernels.conv_attention.arguments import check_block_table, check_splits
from mta_kernels.conv_attention.surroundings import on_device_of
from mta_kernels.conv_attention.triton.decode_plan import (
    DecodeConfig,
    bulk_pays,
    choose_splits,
    column_steps,
    decode_config,
    newest_last,
)
from mta_kernels.conv_attention.triton.decode_shares import _conv_attention_decode_kernel, _finite
from mta_kernels.conv_attention.triton.launch import (
    call_signature,
    cdiv,
    dependent_launches,
    launch,
    next_power_of_2,
    operand,
)
from mta_kernels.conv_attention.triton.prepare import dot_precision
from mta_kernels.gpu_limits import compiled_capability, shared_memory_limit, sm_count
from mta_kernels.operation import Operation

SLOTS_AT_ONCE = 64  # up to so many partial results a head are merged without a loop


@triton.jit
def _combine_splits_kernel(
    partial_ptr, max_ptr, sum_ptr, out_ptr, slots,
    HEAD_DIM: tl.constexpr, BLOCK_SLOTS: tl.constexpr, BLOCK_D: tl.constexpr, CHUNK: tl.constexpr,
    AT_ONCE: tl.constexpr, DEPENDENT_LAUNCH: tl.constexpr,
):  # fmt: skip
    """`out[h] = sum_s 2^(max_s - max) partial_s / sum_s 2^(max_s - max) sum_s`; zero for a sequence without tokens.

    AT_ONCE if CHUNK is BLOCK_SLOTS: all loads are issued before the first result is needed.
    """
    if DEPENDENT_LAUNCH:
        gdc_wait()
    DIM_BLOCKS: tl.constexpr = (HEAD_DIM + BLOCK_D - 1) // BLOCK_D
    head = (tl.program_id(0) // DIM_BLOCKS).to(tl.int64)
    dim = tl.program_id(0) % DIM_BLOCKS * BLOCK_D + tl.arange(0, BLOCK_D)
    slot = tl.arange(0, BLOCK_SLOTS)
    all_maxima = tl.load(max_ptr + head * slots + slot, mask=slot < slots, other=float("-inf"))
    sums = tl.load(sum_ptr + head * slots + slot, mask=slot < slots, other=0.0)
    if AT_ONCE:
        out = _load_partial(partial_ptr, head, slots, slot, dim, HEAD_DIM)
    largest = _finite(tl.max(all_maxima, 0))
    all_scales = tl.exp2(all_maxima - largest)
    total = tl.sum(all_scales * sums, 0)
    if AT_ONCE:
        out *= all_scales[:, None]
    else:
        out = tl.zeros([CHUNK, BLOCK_D], tl.float32)
        for first in tl.range(0, slots, CHUNK):
            chunk_slot = first + tl.arange(0, CHUNK)
            scale = tl.exp2(
                tl.load(max_ptr + head * slots + chunk_slot, mask=chunk_slot < slots, other=float("-inf")) - largest
            )
            out += _load_partial(partial_ptr, head, slots, chunk_slot, dim, HEAD_DIM) * scale[:, None]
    merged = tl.sum(out, 0) / tl.where(total > 0, total, 1.0)
    tl.store(out_ptr + head * HEAD_DIM + dim, merged.to(out_ptr.dtype.element_ty), mask=dim < HEAD_DIM)


@triton.jit
def _load_partial(partial_ptr, head, slots, slot, dim, HEAD_DIM: tl.constexpr):
    """Partial results of a head, zero for slots that there are not: `[len(slot), len(dim)]`."""
    return tl.load(
        partial_ptr + (head * slots + slot[:, None]) * HEAD_DIM + dim[None, :],
        mask=(slot < slots)[:, None] & (dim < HEAD_DIM)[None, :],
        other=0.0,
    )


def conv_attention_decode(
    operation: Operation, q_window: Tensor, k_cache: Tensor, v_cache: Tensor, weight: Tensor, *, lengths: Tensor,
    splits: int | str = "auto", block_table: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """One decode step by the Triton kernels, for arguments already checked: `[B, Hq, 1, D]`.

    With `block_table [B, max_pages]` int32 the caches are `[pages, Hkv, page_size, D]`, and key `y` of sequence `b`
    is row `y % page_size` of page `block_table[b, y // page_size]`; entries past a sequence's length are not read.
    `splits` shares each sequence's keys among that many programs a KV head, "auto" by `choose_splits`.
    Reads nothing on the host that is on the device: fit for a CUDA graph. A length of 0 gives zeros.
    Raises ValueError for splits or a block_table that do not fit.
    """
    capacity = k_cache.shape[2]
    if block_table is not None:
        check_block_table(block_table, q_window, k_cache)
        capacity *= block_table.shape[1]
    bulk = reads_in_bulk(q_window, k_cache, v_cache, block_table)
    splits, config = chosen_tiles(q_window, k_cache, weight, splits, capacity)
    tensors = q_window, k_cache, v_cache, weight, lengths, block_table
    with on_device_of(q_window):
        return launch_decode(operation, *tensors, splits=splits, config=config, bulk=bulk)


def reads_in_bulk(q_window: Tensor, k_cache: Tensor, v_cache: Tensor, block_table: Tensor | None) -> bool:
    """Whether the copy engine reads the caches: where that pays (`bulk_pays`), and it can.

    It reads no pages. The head dim's stride is 1, starts and other strides are multiples of 16 bytes, no stride is 0.
    """
    group, compute_capability = q_window.shape[1] // k_cache.shape[1], compiled_capability(k_cache.device)
    if block_table is not None or not bulk_pays(k_cache.shape[3], group, k_cache.element_size(), compute_capability):
        return False
    return all(
        x.stride(3) == 1 and x.data_ptr() % 16 == 0 and all(stride > 0 and stride % 8 == 0 for stride in x.stride()[:3])
        for x in (k_cache, v_cache)
    )


def chosen_tiles(
    q_window: Tensor, k_cache: Tensor, weight: Tensor, splits: int | str, capacity: int
) -> tuple[int, DecodeConfig]:
    """How many programs share the keys of a KV head, in a cache for `capacity` keys, and their tiles.

    Programs are small where the copy engine pays, even if pointers read the cache. On an H200, with four query heads a
    KV head of 128, they save 21 to 29 % with the engine, and 19 % with pointers. Raises ValueError for splits that do
    not fit.
    """
    check_splits(splits)
    (batch, heads, _, head_dim), kv_heads = q_window.shape, k_cache.shape[1]
    dtype, device = q_window.dtype, q_window.device
    group, sequences = heads // kv_heads, batch * kv_heads
    shape = {
        "key_taps": weight.shape[2], "block_d": max(16, next_power_of_2(head_dim)), "element_size": dtype.itemsize,
        "shared_memory": shared_memory_limit(device),
    }  # fmt: skip
    small = bulk_pays(head_dim, group, dtype.itemsize, compiled_capability(device))
    config = decode_config(group=group, small=small, **shape)
    if splits == "auto":
        at_once = config.programs_per_sm(**shape)
        splits = choose_splits(sequences, capacity, group, sm_count(device), config.heads, at_once)
    return int(splits), config


def launch_decode(
    operation: Operation, q_window: Tensor, k_cache: Tensor, v_cache: Tensor, weight: Tensor, lengths: Tensor,
    block_table: Tensor | None, *, splits: int, config: DecodeConfig, bulk: bool = False,
) -> Tensor:  # fmt: skip
    """Run the decode kernel with these tiles, then combine its `splits + 1` partial results a head.

    With `bulk` the copy engine reads the caches: see `reads_in_bulk`.
    """
    batch, query_heads, window, head_dim = q_window.shape
    kv_heads = k_cache.shape[1]
    group = query_heads // kv_heads
    query_taps, key_taps = operation.conv.query_taps, operation.conv.key_taps
    unit = 16 // q_window.element_size()  # strides in whole loads of 16 bytes, so that the compiler knows they are
    if any(stride % unit for x in (k_cache, v_cache) for stride in x.stride()[:3]):
        unit = 1
    units = [stride // unit for x in (k_cache, v_cache) for stride in x.stride()[:3]]
    if (recorder := planned.recorder()) is not None:
        recorder.found.splits = splits
    slots = splits + 1
    partial = empty(batch * query_heads, slots, head_dim, dtype=torch.float32, device=q_window.device)
    maxima = empty(batch * query_heads, slots, dtype=torch.float32, device=q_window.device)
    sums = empty_like(maxima)
    programs = group + splits * cdiv(group, config.heads)
    signature = (call_signature(q_window, k_cache, v_cache, weight, lengths, block_table), splits)
    # Programmatic dependent launch: the merge starts while the last shares finish.
    dependent_launch = dependent_launches(q_window)
    # The compiler's pipeline takes two stages a tile if it has to look up the pages first.
    num_stages = config.num_stages if block_table is None else 2 * config.num_stages - 1
    k_desc, v_desc = _descriptors(k_cache, v_cache, config) if bulk else (None, None)
    launch(
        _conv_attention_decode_kernel, programs * batch * kv_heads, signature,
        q_window, k_cache, v_cache, k_desc, v_desc, weight, lengths, block_table, partial, maxima, sums,
        *q_window.stride(), *units[:3], k_cache.stride(3), *units[3:], v_cache.stride(3), *weight.stride(),
        lengths.stride(0), *(block_table.stride() if block_table is not None else (0, 0)),
        kv_heads, window, splits, operation.scale * math.log2(math.e),
        GROUP=group, HEADS=config.heads, QUERY_TAPS=query_taps, KEY_TAPS=key_taps, PAD=operation.conv.pad,
        HEAD_DIM=head_dim, PAGE_SIZE=0 if block_table is None else k_cache.shape[2],
        PACK=config.pack, STEPS=column_steps(key_taps, config.pack),
        BLOCK_STEPS=config.block_steps(key_taps),
        BLOCK_TAPS=max(16, next_power_of_2(query_taps)), BLOCK_N=config.block_n,
        BLOCK_D=max(16, next_power_of_2(head_dim)),
        BLOCK_NEAR=max(16, next_power_of_2(query_taps + key_taps - 2)),
        SPLIT_WEIGHT=weight.dtype != q_window.dtype,
        UNIT=unit, DEPENDENT_LAUNCH=dependent_launch,
        PRECISION=dot_precision(q_window.dtype), BULK=bulk,
        NEWEST_LAST=newest_last(batch * kv_heads, splits, group, sm_count(q_window.device)),
        num_warps=config.num_warps, num_stages=num_stages,
    )  # fmt: skip
    out = empty(batch, query_heads, 1, head_dim, dtype=q_window.dtype, device=q_window.device)
    at_once = slots <= SLOTS_AT_ONCE
    combine_d = min(32 if at_once else 64, max(16, next_power_of_2(head_dim)))
    launch(
        _combine_splits_kernel, batch * query_heads * cdiv(head_dim, combine_d), signature,
        partial, maxima, sums, out, slots,
        HEAD_DIM=head_dim, BLOCK_SLOTS=next_power_of_2(slots), BLOCK_D=combine_d,
        CHUNK=min(SLOTS_AT_ONCE, next_power_of_2(slots)), AT_ONCE=at_once,
        DEPENDENT_LAUNCH=dependent_launch, num_warps=1 if at_once else 4, launch_pdl=dependent_launch,
    )  # fmt: skip
    return out


def _descriptors(k_cache: Tensor, v_cache: Tensor, config: DecodeConfig) -> tuple[TensorDescriptor, TensorDescriptor]:
    """Of K `[B, Hkv, pack, S // pack, D]` and V `[B, Hkv, S, D]`, in the kernel's tiles.

    Keys of an incomplete last column are left out: no whole tile has any.
    """
    batch, kv_heads, capacity, head_dim = k_cache.shape
    pack, columns, block_d = config.pack, config.block_n // config.pack, max(16, next_power_of_2(head_dim))
    stride_b, stride_h, stride_n, _ = k_cache.stride()
    shape = [batch, kv_heads, pack, max(1, capacity // pack), head_dim]
    strides = [stride_b, stride_h, stride_n, pack * stride_n, 1]
    return (
        TensorDescriptor(k_cache, shape, strides, [1, 1, 1, columns, block_d]),
        operand(v_cache, [1, 1, config.block_n, block_d], True),
    )
