"""A decode step by the Triton kernels: tiles, shares of the keys, launches.

Scores from K, logits and their statistics, probabilities, partial outputs from V, the output: each kernel takes its
place while the one before it finishes, and what lies between them is two bytes a key and head.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mta_kernels.conv_attention.arguments import check_splits
from mta_kernels.conv_attention.surroundings import on_device_of
from mta_kernels.conv_attention.triton.decode_plan import DecodeConfig, column_steps, decode_candidates
from mta_kernels.conv_attention.triton.launch import (
    call_signature,
    cdiv,
    dependent_launches,
    launch,
    next_power_of_2,
)
from mta_kernels.conv_attention.triton.prepare import dot_precision
from mta_kernels.gpu_limits import shared_memory_limit, sm_count
from mta_kernels.multi_token_attention.decode.keys import _mta_decode_convolved_kernel, _mta_decode_scores_kernel
from mta_kernels.multi_token_attention.decode.rows import _mta_decode_logits_kernel, _mta_decode_probabilities_kernel
from mta_kernels.multi_token_attention.decode.state import DecodeState
from mta_kernels.multi_token_attention.decode.values import _mta_decode_merge_kernel, _mta_decode_values_kernel
from mta_kernels.multi_token_attention.mixers import Mixers
from mta_kernels.operation import ONE_TAP, Convolution, Operation

MAX_PROGRAMS_A_HEAD = 512
MAX_SHARES = 128  # of logits: every program of the probabilities reads what all of them have found
TILE_BYTES = 16 * 1024  # of keys or values
WARPS_PER_SM = 8  # of the kernels that read K and V
AHEAD_BYTES = 16 * 1024 * 1024  # of all values, asked for before they can be used


@dataclass(frozen=True)
class Tiles:
    """What a program works on at a time: `block_n` keys of a KV head; `stages - 1` of these are on their way."""

    block_n: int
    warps: int
    stages: int


@dataclass(frozen=True)
class Plan:
    """How a step is shared out: tiles of K (its convolution's, if it has one) and of V, programs a KV head that read
    them, shares of logits of `logits_keys` a tile, programs of probabilities of `16 * blocks` keys a tile, both a
    sequence, and values of a program of V that are asked for early."""

    of_k: Tiles | DecodeConfig
    of_v: Tiles
    splits: int
    logits_keys: int
    shares: int
    blocks: int
    programs: int
    ahead: int


@functools.lru_cache(maxsize=4096)
def plan(
    dtype: torch.dtype, head_dim: int, heads: int, kv_heads: int, operation: Operation, batch: int, capacity: int,
    device: torch.device,
) -> Plan:  # fmt: skip
    """Programs enough to fill the GPU, if there are keys enough for them."""
    block_d, sms = max(16, next_power_of_2(head_dim)), sm_count(device)
    row, group = block_d * dtype.itemsize, heads // kv_heads
    keys = max(32, min(64, TILE_BYTES // row))
    warps = 2 if group <= 16 and row <= 256 else 4
    room = shared_memory_limit(device) // (WARPS_PER_SM // warps)
    stages = max((n for n in (2, 3, 4) if (n - 1) * keys * row <= room - 12 * 1024), default=2)
    of_v = Tiles(keys, warps, stages)
    of_k: Tiles | DecodeConfig = of_v
    if operation.pre_conv is not None:
        of_k = decode_candidates(
            key_taps=operation.pre_conv.key_taps, group=group, block_d=block_d, element_size=dtype.itemsize,
            shared_memory=shared_memory_limit(device),
        )[0]  # fmt: skip
    sequences = batch * kv_heads
    most_warps = max(warps, of_k.num_warps if isinstance(of_k, DecodeConfig) else warps)
    splits = choose_splits(sequences, capacity, keys, WARPS_PER_SM // most_warps * sms)
    logits_keys = 512 if batch * cdiv(capacity, 512) >= sms // 2 and heads <= 16 else 256
    shares = min(MAX_SHARES, cdiv(capacity, logits_keys), max(1, 2 * sms // batch))
    small = dtype.itemsize == 2 and heads <= 16 and (operation.post_conv or ONE_TAP).key_taps <= 16
    blocks = 32 if small and batch * cdiv(capacity, 512) >= sms // 2 else 16
    programs = min(cdiv(capacity, 16 * blocks), max(1, 2 * sms // batch))
    ahead = min(AHEAD_BYTES // (sequences * splits * row), cdiv(capacity, splits), 128)
    ahead = 0 if ahead < 16 else next_power_of_2(ahead + 1) // 2
    return Plan(of_k, of_v, splits, logits_keys, shares, blocks, programs, ahead)


@functools.lru_cache(maxsize=4096)
def choose_splits(sequences: int, capacity: int, new: int, at_once: int) -> int:
    """Programs a sequence: the most of those that take the fewest rounds of tiles, each of `new` keys.

    The GPU runs `at_once` programs at a time; if that is enough, all of them do.
    """

    def cost(splits: int) -> tuple[int, int]:
        share = cdiv(cdiv(capacity, splits), 16) * 16
        waves = cdiv(sequences * splits, at_once)
        return waves * cdiv(share, new), waves

    most = max(1, min(MAX_PROGRAMS_A_HEAD, cdiv(capacity, min(64, new))))
    return min(range(most, 0, -1), key=cost)


class _Step(NamedTuple):
    """What the launches of a step have in common."""

    operation: Operation
    mixers: Mixers
    plan: Plan
    splits: int
    signature: int
    dependent: bool
    precision: str
    scores: Tensor  # [B, H, keys], room for whole groups of 16: of K, and then what V is multiplied with
    logits: Tensor


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
    dtype, device = q_window.dtype, q_window.device
    if chosen is None:
        chosen = plan(dtype, head_dim, heads, k_cache.shape[1], operation, batch, capacity, device)
    if operation.post_conv is None or operation.post_conv.query_taps == 1:
        state = None
    scores = torch.empty(batch, heads, cdiv(capacity, 16) * 16, dtype=dtype, device=device)
    logits = torch.empty_like(scores)[:, :, None] if state is None else state.logits
    kept = (None, None) if state is None else (state.logsumexp, state.lengths)
    tensors = q_window, k_cache, v_cache, *mixers, lengths, block_table, logits, *kept
    splits = chosen.splits if splits == "auto" else int(splits)
    step = _Step(
        operation, mixers, chosen, splits, call_signature(*tensors, options=(chosen, splits)),
        dependent_launches(q_window), dot_precision(dtype), scores, logits,
    )  # fmt: skip
    with on_device_of(q_window):
        _launch_scores(step, q_window, k_cache, lengths, block_table)
        _launch_rows(step, v_cache, lengths, state, block_table)
        return _launch_values(step, v_cache, lengths, block_table)


def _launch_scores(step: _Step, q_window: Tensor, k_cache: Tensor, lengths: Tensor, block_table: Tensor | None) -> None:
    """Scores of the newest row, convolved if they are to be."""
    (batch, heads, window, head_dim), kv_heads, tiles = q_window.shape, k_cache.shape[1], step.plan.of_k
    group, taps = heads // kv_heads, step.mixers.pre_conv
    places = (lengths.stride(0), *_strides(block_table, 2), *step.scores.stride()[:2])
    numbers = kv_heads, window, step.splits, step.operation.scale
    sizes: dict[str, Any] = {
        "HEAD_DIM": head_dim, "PAGE_SIZE": 0 if block_table is None else k_cache.shape[2],
        "BLOCK_D": max(16, next_power_of_2(head_dim)), "BLOCK_N": tiles.block_n,
        "DEPENDENT_LAUNCH": step.dependent, "PRECISION": step.precision,
    }  # fmt: skip
    if taps is None or step.operation.pre_conv is None:
        assert isinstance(tiles, Tiles)
        names = "GROUP", "ROWS", "HEAD_DIM", "PAGE_SIZE", "BLOCK_N", "BLOCK_D", "DEPENDENT_LAUNCH", "PRECISION"
        sizes |= {"GROUP": group, "ROWS": max(16, next_power_of_2(group))}
        launch(
            _mta_decode_scores_kernel, batch * kv_heads * step.splits, step.signature,
            q_window, k_cache, lengths, block_table, step.scores, *q_window.stride(), *k_cache.stride(), *places,
            *numbers, **{name: sizes[name] for name in names}, num_warps=tiles.warps,
            num_stages=_stages(tiles.stages, block_table),
        )  # fmt: skip
        return
    assert isinstance(tiles, DecodeConfig)
    query_taps, key_taps = step.operation.pre_conv.taps
    stages = tiles.num_stages + (tiles.heads == 1 and sizes["BLOCK_D"] * q_window.element_size() <= 128)
    launch(
        _mta_decode_convolved_kernel, batch * kv_heads * (group + step.splits * cdiv(group, tiles.heads)),
        step.signature, q_window, k_cache, taps, lengths, block_table, step.scores, *q_window.stride(),
        *k_cache.stride(), *taps.stride(), *places, *numbers, GROUP=group, HEADS=tiles.heads, QUERY_TAPS=query_taps,
        KEY_TAPS=key_taps, PAD=step.operation.pre_conv.pad, HEAD_DIM=head_dim, PAGE_SIZE=sizes["PAGE_SIZE"],
        PACK=tiles.pack, STEPS=column_steps(key_taps, tiles.pack), BLOCK_STEPS=tiles.block_steps(key_taps),
        BLOCK_TAPS=max(16, next_power_of_2(query_taps)), BLOCK_N=tiles.block_n, BLOCK_D=sizes["BLOCK_D"],
        BLOCK_NEAR=max(16, next_power_of_2(query_taps + key_taps - 2)), SPLIT_WEIGHT=taps.dtype != q_window.dtype,
        DEPENDENT_LAUNCH=step.dependent, PRECISION=step.precision, num_warps=tiles.num_warps,
        num_stages=_stages(stages, block_table),
    )  # fmt: skip


def _launch_rows(
    step: _Step, v_cache: Tensor, lengths: Tensor, state: DecodeState | None, block_table: Tensor | None
) -> None:
    """Logits of these scores, and in the scores' place probabilities as values are multiplied with them."""
    scores, logits, mixers, chosen = step.scores, step.logits, step.mixers, step.plan
    (batch, heads, _), device = scores.shape, scores.device
    maxima, sums = (torch.empty(batch, chosen.shares, heads, dtype=torch.float32, device=device) for _ in range(2))
    kept = (maxima, lengths) if state is None else (state.logsumexp, state.lengths)
    post = step.operation.post_conv or ONE_TAP
    before, span = _band(post)
    bands = scores
    if mixers.post_conv is not None:
        bands = torch.empty(heads, post.query_taps, span, 16, dtype=scores.dtype, device=device)
    wide = logits.stride(3) == 1 and all(n % 8 == 0 for n in (logits.shape[3], *logits.stride()[:3]))
    block_h = max(16, next_power_of_2(heads))
    launch(
        _mta_decode_logits_kernel, batch * chosen.shares, step.signature,
        scores, mixers.pre_mix, mixers.post_conv, lengths, logits, maxima, sums, bands, v_cache, block_table,
        *scores.stride()[:2], *_strides(mixers.pre_mix, 2), *_strides(mixers.post_conv, 3), lengths.stride(0),
        *logits.stride(), *v_cache.stride(), *_strides(block_table, 2), chosen.shares, v_cache.shape[1], step.splits,
        QUERY_TAPS=post.query_taps, KEY_TAPS=post.key_taps, PAD=post.pad, BEFORE=before, SPAN=span,
        HEADS=heads, BLOCK_H=block_h, BLOCK_N=chosen.logits_keys, SLOTS=logits.shape[2], WIDE=wide,
        PRE_MIX=mixers.pre_mix is not None,
        SPLIT_MIX=mixers.pre_mix is not None and mixers.pre_mix.dtype != scores.dtype,
        POST_CONV=mixers.post_conv is not None, DEPENDENT_LAUNCH=step.dependent, PRECISION=step.precision,
        AHEAD=chosen.ahead, HEAD_DIM=v_cache.shape[3], PAGE_SIZE=0 if block_table is None else v_cache.shape[2],
        num_warps=8, num_stages=1, launch_pdl=step.dependent,
    )  # fmt: skip
    launch(
        _mta_decode_probabilities_kernel, batch * chosen.programs, step.signature,
        logits, bands, mixers.post_mix, maxima, sums, lengths, *kept, scores, *_strides(mixers.post_mix, 2),
        lengths.stride(0), *logits.stride(), *kept[0].stride(), kept[1].stride(0), *scores.stride()[:2],
        chosen.shares, chosen.programs, QUERY_TAPS=post.query_taps, BEFORE=before, SPAN=span, HEADS=heads,
        BLOCK_H=block_h, BLOCK_M=chosen.blocks, BLOCK_SHARES=16 if chosen.shares <= 16 else MAX_SHARES,
        SLOTS=logits.shape[2],
        WIDE=wide, POST_CONV=mixers.post_conv is not None, POST_MIX=mixers.post_mix is not None,
        KEEPS=state is not None, DEPENDENT_LAUNCH=step.dependent, PRECISION=step.precision,
        num_warps=16 if mixers.post_conv is not None else 8, num_stages=1, launch_pdl=step.dependent,
    )  # fmt: skip


def _launch_values(step: _Step, v_cache: Tensor, lengths: Tensor, block_table: Tensor | None) -> Tensor:
    """The output: values by what the scores' place holds, in shares, and these added up."""
    (batch, heads, _), (kv_heads, head_dim), tiles = step.scores.shape, v_cache.shape[1::2], step.plan.of_v
    partial = torch.empty(batch, step.splits, heads, head_dim, dtype=torch.float32, device=v_cache.device)
    out = torch.empty(batch, heads, 1, head_dim, dtype=step.scores.dtype, device=v_cache.device)
    launch(
        _mta_decode_values_kernel, batch * kv_heads * step.splits, step.signature,
        v_cache, step.scores, lengths, block_table, partial, *v_cache.stride(), lengths.stride(0),
        *_strides(block_table, 2), *step.scores.stride()[:2], kv_heads, step.splits, GROUP=heads // kv_heads,
        ROWS=max(16, next_power_of_2(heads // kv_heads)), HEAD_DIM=head_dim,
        PAGE_SIZE=0 if block_table is None else v_cache.shape[2], BLOCK_N=tiles.block_n,
        BLOCK_D=max(16, next_power_of_2(head_dim)), DEPENDENT_LAUNCH=step.dependent, PRECISION=step.precision,
        num_warps=tiles.warps, num_stages=_stages(tiles.stages, block_table),
        launch_pdl=step.dependent,
    )  # fmt: skip
    block_d = min(32, max(16, next_power_of_2(head_dim)))
    launch(
        _mta_decode_merge_kernel, batch * heads * cdiv(head_dim, block_d), step.signature, partial, out, step.splits,
        HEADS=heads, HEAD_DIM=head_dim, BLOCK_D=block_d, CHUNK=min(64, next_power_of_2(step.splits)),
        DEPENDENT_LAUNCH=step.dependent, num_warps=4, launch_pdl=step.dependent,
    )  # fmt: skip
    return out


def _stages(stages: int, block_table: Tensor | None) -> int:
    """The compiler's pipeline takes two stages a tile if it has to look up the pages first."""
    return stages if block_table is None else 2 * stages - 1


def _strides(x: Tensor | None, dims: int) -> tuple[int, ...]:
    return (0,) * dims if x is None else x.stride()


def _band(convolution: Convolution) -> tuple[int, int]:
    """Keys before a group of 16 that its band of taps begins with, in whole groups of 8, and the keys of a band."""
    before = cdiv(convolution.pad, 8) * 8
    return before, max(16, next_power_of_2(15 + before - convolution.pad + convolution.key_taps))
