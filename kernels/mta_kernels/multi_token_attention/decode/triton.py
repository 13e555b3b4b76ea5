"""A decode step by the Triton kernels: tiles, shares of the keys, launches."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from mta_kernels.conv_attention.arguments import check_splits
from mta_kernels.conv_attention.surroundings import on_device_of
from mta_kernels.conv_attention.triton.launch import (
    call_signature,
    cdiv,
    dependent_launches,
    launch,
    next_power_of_2,
)
from mta_kernels.conv_attention.triton.prepare import dot_precision
from mta_kernels.gpu_limits import shared_memory_limit, sm_count
from mta_kernels.multi_token_attention.decode.kernels import (
    _mta_decode_logits_kernel,
    _mta_decode_merge_kernel,
    _mta_decode_values_kernel,
)
from mta_kernels.multi_token_attention.decode.state import DecodeState
from mta_kernels.multi_token_attention.mixers import Mixers
from mta_kernels.operation import ONE_TAP, Convolution, Operation

MAX_PROGRAMS_A_SEQUENCE = 512  # every program of the values reads what all of the logits have found
TILE_BYTES = 32 * 1024  # of keys or values, without a convolution half of it
PRODUCTS_BYTES = 16 * 1024  # of shared memory for all but tiles and queries, or a little less


@dataclass(frozen=True)
class Tiles:
    """What a program works on at a time: `block_n` keys of a KV head; `stages - 1` of these are on their way."""

    block_n: int
    warps: int = 4
    stages: int = 3
    registers: int | None = None  # of a thread at most, so that more programs run at a time


@dataclass(frozen=True)
class Plan:
    """Tiles of the kernel that reads K and of the one that reads V, and programs a sequence."""

    of_k: Tiles
    of_v: Tiles
    splits: int


def plan(
    dtype: torch.dtype, head_dim: int, heads: int, operation: Operation, batch: int, capacity: int, device: torch.device
) -> Plan:
    """Programs enough to fill the GPU, if there are keys enough for them."""
    row = max(16, next_power_of_2(head_dim)) * dtype.itemsize
    largest, warps = (128, 4) if heads <= 16 else (64, 8)  # all heads' numbers of a tile's keys are in registers

    def tiles(convolution: Convolution | None) -> Tiles:
        keys = min(largest, (TILE_BYTES if convolution else TILE_BYTES // 2) // row)
        least = 32 if convolution is None else max(32, 4 * next_power_of_2(convolution.key_taps))
        while keys > least and batch * cdiv(capacity, keys) < sm_count(device):
            keys //= 2
        keys = max(least, keys)
        queries = 16 if convolution else max(16, next_power_of_2(heads))
        room = shared_memory_limit(device) - PRODUCTS_BYTES
        stages = max((n for n in (2, 3) if (n - 1) * (keys + queries) * row <= room), default=1)
        if convolution is None:
            return Tiles(keys, warps, stages)
        # With 128 registers two such programs run on an SM: a convolution's steps wait for each other.
        return Tiles(keys, 8, stages, 128 if heads <= 16 and dtype.itemsize == 2 else None)

    of_k, of_v = tiles(operation.pre_conv), tiles(operation.post_conv)
    convolves = operation.pre_conv or operation.post_conv
    at_once = (2 if convolves or heads > 16 else 3) * sm_count(device)
    new = min(
        tile.block_n - (convolution or ONE_TAP).key_taps + 1
        for tile, convolution in ((of_k, operation.pre_conv), (of_v, operation.post_conv))
    )
    return Plan(of_k, of_v, choose_splits(batch, capacity, new, at_once))


@functools.lru_cache(maxsize=4096)
def choose_splits(batch: int, capacity: int, new: int, at_once: int) -> int:
    """Programs a sequence: the most of those that take the fewest rounds of tiles, each of `new` keys.

    The GPU runs `at_once` programs at a time; if that is enough, all of them do.
    """

    def cost(splits: int) -> tuple[int, int]:
        share = cdiv(cdiv(capacity, splits), 16) * 16
        waves = cdiv(batch * splits, at_once)
        return waves * cdiv(share, new), waves

    most = max(1, min(MAX_PROGRAMS_A_SEQUENCE, cdiv(capacity, min(64, new))))
    return min(range(most, 0, -1), key=cost)


def newest_row(
    operation: Operation, q_window: Tensor, k_cache: Tensor, v_cache: Tensor, mixers: Mixers, lengths: Tensor,
    state: DecodeState | None, block_table: Tensor | None, splits: int | str = "auto", chosen: Plan | None = None,
) -> Tensor:  # fmt: skip
    """Steps 1 to 7 of the newest row, for arguments already checked, their mixings dense: `[B, Hq, 1, D]`.

    Reads nothing on the host that is on the device: fit for a CUDA graph. Raises ValueError for splits that do not fit.
    """
    check_splits(splits)
    batch, heads, _, head_dim = q_window.shape
    capacity = k_cache.shape[2] * (1 if block_table is None else block_table.shape[1])
    if chosen is None:
        chosen = plan(q_window.dtype, head_dim, heads, operation, batch, capacity, q_window.device)
    splits = chosen.splits if splits == "auto" else int(splits)
    device = q_window.device
    if operation.post_conv is None or operation.post_conv.query_taps == 1:
        state = None
    logits = (
        torch.empty(batch, heads, 1, capacity, dtype=q_window.dtype, device=device) if state is None else state.logits
    )
    maxima, sums = (torch.empty(batch, splits, heads, dtype=torch.float32, device=device) for _ in range(2))
    partial = torch.empty(batch, splits, heads, head_dim, dtype=torch.float32, device=device)
    out = torch.empty(batch, heads, 1, head_dim, dtype=q_window.dtype, device=device)
    kept = (maxima, lengths) if state is None else (state.logsumexp, state.lengths)
    table_strides = block_table.stride() if block_table is not None else (0, 0)
    dependent = dependent_launches(q_window)
    pre, post = operation.pre_conv or ONE_TAP, operation.post_conv or ONE_TAP
    precision = dot_precision(q_window.dtype)
    # TF32 cuts scores off at fp16's precision: too early for fp16, and four times later than eager bf16 rounds them.
    exact = "ieee" if precision == "ieee" else "tf32x3"
    common = {
        "HEADS": heads, "GROUP": heads // k_cache.shape[1], "HEAD_DIM": head_dim,
        "PAGE_SIZE": 0 if block_table is None else k_cache.shape[2], "SLOTS": logits.shape[2],
        "BLOCK_H": max(16, next_power_of_2(heads)), "BLOCK_D": max(16, next_power_of_2(head_dim)),
        "DEPENDENT_LAUNCH": dependent,
    }  # fmt: skip
    tensors = q_window, k_cache, v_cache, *mixers, lengths, block_table, logits, *kept
    signature = call_signature(*tensors, options=(chosen, splits))
    with on_device_of(q_window):
        launch(
            _mta_decode_logits_kernel, batch * splits, signature,
            q_window, k_cache, mixers.pre_conv, mixers.pre_mix, lengths, block_table, logits, maxima, sums,
            *q_window.stride(), *k_cache.stride(), *_strides(mixers.pre_conv, 3), *_strides(mixers.pre_mix, 2),
            lengths.stride(0), *table_strides, *logits.stride(), q_window.shape[2], splits, operation.scale,
            **_convolution(pre), **common, PRE_CONV=mixers.pre_conv is not None, PRE_MIX=mixers.pre_mix is not None,
            BLOCK_N=chosen.of_k.block_n, STAGES=chosen.of_k.stages, PRECISION=precision,
            PRECISION_OF_TAPS="tf32" if q_window.dtype == torch.bfloat16 else exact, PRECISION_OF_MIX=exact,
            num_warps=chosen.of_k.warps, maxnreg=chosen.of_k.registers,
        )  # fmt: skip
        launch(
            _mta_decode_values_kernel, batch * splits, signature,
            v_cache, mixers.post_conv, mixers.post_mix, lengths, block_table, logits, maxima, sums, *kept, partial,
            *v_cache.stride(), *_strides(mixers.post_conv, 3), *_strides(mixers.post_mix, 2),
            lengths.stride(0), *table_strides, *logits.stride(), *kept[0].stride(), kept[1].stride(0), splits,
            **_convolution(post), **common, POST_CONV=mixers.post_conv is not None,
            POST_MIX=mixers.post_mix is not None, BLOCK_N=chosen.of_v.block_n, STAGES=chosen.of_v.stages,
            PRECISION=precision, KEEPS=state is not None, BLOCK_SPLITS=next_power_of_2(splits),
            num_warps=chosen.of_v.warps, maxnreg=chosen.of_v.registers, launch_pdl=dependent,
        )  # fmt: skip
        block_d = min(32, common["BLOCK_D"])
        launch(
            _mta_decode_merge_kernel, batch * heads * cdiv(head_dim, block_d), signature, partial, out, splits,
            HEADS=heads, HEAD_DIM=head_dim, BLOCK_D=block_d, CHUNK=min(64, next_power_of_2(splits)),
            DEPENDENT_LAUNCH=dependent, num_warps=4, launch_pdl=dependent,
        )  # fmt: skip
    return out


def _strides(x: Tensor | None, dims: int) -> tuple[int, ...]:
    return (0,) * dims if x is None else x.stride()


def _convolution(convolution: Convolution) -> dict[str, int]:
    """What a kernel is told of a convolution."""
    query_taps, key_taps = convolution.taps
    return {
        "QUERY_TAPS": query_taps, "KEY_TAPS": key_taps, "PAD": convolution.pad,
        "BLOCK_A": max(16, next_power_of_2(query_taps)), "BLOCK_B": max(16, next_power_of_2(key_taps)),
    }  # fmt: skip
