"""Decode: one new query a sequence, keys split over programs, partial results combined by a second kernel.

With one query the taps fold into it: `c[j] = sum_b qt[b] . k[j - pad + b]`, `qt[b] = sum_a weight[a, b] q_window[a]`.
A column of products stands for PACK consecutive keys, `r[(p, e), u] = sum_g qt[PACK*e + g - p] . k[PACK*u + g]`, so
`c[PACK*v + pad + p] = sum_e r[(p, e), v + e]`: about PACK times fewer numbers to move along the diagonal than with
`r[b, y] = qt[b] . k[y]`, while the rows `(p, e)` fill the 16 rows that a tensor core multiplies anyway.

The newest keys, which some of the window's queries may not see, are left to one small program a query head (the tail);
no other program needs a mask on scores. Everything is in base-2 units: `factor = scale * log2(e)`.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Hashable
from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from mta_kernels.conv_attention.arguments import MAX_SPLITS, check_block_table, check_splits, key_padding, softmax_scale
from mta_kernels.conv_attention.operators import on_device_of
from mta_kernels.conv_attention.triton.forward import capability, shared_memory_limit
from mta_kernels.conv_attention.triton.launch import call_signature, cdiv, launch, next_power_of_2
from mta_kernels.conv_attention.triton.prepare import dot_precision
from mta_kernels.conv_attention.triton.tuning import Key, best_config

PROGRAMS_PER_SM = 2
INTERPRETED_SM_COUNT = 132


@triton.jit
def _conv_attention_decode_kernel(
    q_ptr, k_ptr, v_ptr, weight_ptr, lengths_ptr, table_ptr, partial_ptr, max_ptr, sum_ptr,
    stride_qb, stride_qh, stride_qw, stride_qd, stride_kb, stride_kh, stride_kn, stride_kd,
    stride_vb, stride_vh, stride_vn, stride_vd, stride_wh, stride_wa, stride_wb, stride_tb, stride_tp,
    kv_heads, window, splits, factor,
    GROUP: tl.constexpr, HEADS: tl.constexpr, QUERY_TAPS: tl.constexpr, KEY_TAPS: tl.constexpr, PAD: tl.constexpr,
    HEAD_DIM: tl.constexpr, PAGE_SIZE: tl.constexpr, PACK: tl.constexpr, STEPS: tl.constexpr,
    BLOCK_STEPS: tl.constexpr, BLOCK_TAPS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_NEAR: tl.constexpr, SPLIT_WEIGHT: tl.constexpr, UNIT: tl.constexpr, DEPENDENT_LAUNCH: tl.constexpr,
    PRECISION: tl.constexpr, FIRST: tl.constexpr, OWN: tl.constexpr, HELD: tl.constexpr,
):  # fmt: skip
    """One program: a share of the keys for HEADS query heads of a KV head, or the newest keys of one query head.

    q `[B, Hq, window, D]`; k, v `[B, Hkv, S, D]`, or `[pages, Hkv, PAGE_SIZE, D]` with table `[B, max_pages]` if
    PAGE_SIZE > 0; their first three strides count UNIT elements. Slot `split` of partial `[B, Hq, splits + 1, D]`,
    max and sum `[B, Hq, splits + 1]` is a share's, the last slot is the newest keys'.
    If OWN > 0 the cache is a part of one: it holds HELD keys, the OWN from FIRST on take part in the softmax, and the
    sequence may end before or after them, by a length that counts from the first key held and may be negative.
    """
    if DEPENDENT_LAUNCH:
        gdc_launch_dependents()  # the programs that merge may take their places, and wait
    head_blocks: tl.constexpr = (GROUP + HEADS - 1) // HEADS
    programs = GROUP + splits * head_blocks  # of one KV head; those of the newest keys come first
    program = tl.program_id(0) % programs
    batch = tl.program_id(0) // programs // kv_heads
    kv_head = tl.program_id(0) // programs % kv_heads
    length = tl.load(lengths_ptr + batch).to(tl.int32)
    tail_start = tl.maximum(length - (QUERY_TAPS - 1) - (KEY_TAPS - 1 - PAD), FIRST)
    shares_end = tail_start  # the newest keys come after the shares
    if OWN > 0:
        shares_end = tl.minimum(tail_start, FIRST + OWN)

    unit = tl.full([], UNIT, tl.int64)
    stride_kb, stride_kh, stride_kn = unit * stride_kb, unit * stride_kh, unit * stride_kn
    stride_vb, stride_vh, stride_vn = unit * stride_vb, unit * stride_vh, unit * stride_vn
    if PAGE_SIZE > 0:
        table_ptr += batch.to(tl.int64) * stride_tb
    else:
        k_ptr += batch.to(tl.int64) * stride_kb
        v_ptr += batch.to(tl.int64) * stride_vb
    k_ptr += kv_head.to(tl.int64) * stride_kh
    v_ptr += kv_head.to(tl.int64) * stride_vh
    q_ptr += batch.to(tl.int64) * stride_qb
    dim = tl.arange(0, BLOCK_D)

    if program < GROUP:
        head = kv_head * GROUP + program
        slot = (batch * kv_heads * GROUP + head).to(tl.int64) * (splits + 1) + splits
        r = _newest_products(
            q_ptr + head.to(tl.int64) * stride_qh, k_ptr, weight_ptr + head.to(tl.int64) * stride_wh, table_ptr,
            stride_qw, stride_qd, stride_kb, stride_kn, stride_kd, stride_wa, stride_wb, stride_tp,
            window, length, factor, QUERY_TAPS, KEY_TAPS, HEAD_DIM, PAGE_SIZE, BLOCK_TAPS, BLOCK_D, BLOCK_NEAR,
            PRECISION, HELD,
        )  # fmt: skip
        # [key taps, BLOCK_NEAR]
        column = tl.arange(0, BLOCK_NEAR)
        source = column[None, :] - PAD + tl.arange(0, r.shape[0])[:, None]
        known = (source >= 0) & (source < BLOCK_NEAR)
        moved = tl.gather(r, tl.where(known, source, 0), 1)
        scores = tl.sum(tl.where(known, moved, 0.0), 0)
        key = length - BLOCK_NEAR + column
        inside = (key >= tail_start) & (key < length)
        if OWN > 0:
            inside = inside & (key < FIRST + OWN)
        scores = tl.where(inside, scores, float("-inf"))
        newest_max = tl.max(scores, 0)
        p = tl.exp2(scores - _finite(newest_max))
        rows = _cache_rows(table_ptr, key, inside, stride_vb, stride_vn, stride_tp, PAGE_SIZE)
        v = _load_rows(v_ptr, rows, dim, inside, stride_vd, HEAD_DIM)  # [BLOCK_NEAR, BLOCK_D]
        tl.store(partial_ptr + slot * HEAD_DIM + dim, tl.sum(p[:, None] * v.to(tl.float32), 0), mask=dim < HEAD_DIM)
        tl.store(max_ptr + slot, newest_max)
        tl.store(sum_ptr + slot, tl.sum(p, 0))
        return

    COLUMNS: tl.constexpr = BLOCK_N // PACK
    ROWS: tl.constexpr = HEADS * PACK * BLOCK_STEPS
    OUT_ROWS: tl.constexpr = max(16, HEADS)  # every head's probabilities repeated to fill the tensor core
    first_head = (program - GROUP) % head_blocks * HEADS  # programs that read the same keys run side by side
    split = (program - GROUP) // head_blocks
    share = (tl.cdiv(shares_end - FIRST, splits) + 15) // 16 * 16
    start = FIRST + split * share
    stop = tl.minimum(start + share, shares_end)

    accumulator = tl.zeros([OUT_ROWS, BLOCK_D], tl.float32)
    running_max = tl.full([HEADS], float("-inf"), tl.float32)
    running_sum = tl.zeros([HEADS, BLOCK_N], tl.float32)  # added up over the keys at the end alone
    if start < stop:
        queries = ()
        for g in tl.static_range(PACK):
            queries += (_fold_taps(
                q_ptr, weight_ptr, kv_head * GROUP, first_head, g, stride_qh, stride_qw, stride_qd,
                stride_wh, stride_wa, stride_wb, window, factor, GROUP, HEADS, QUERY_TAPS, KEY_TAPS, HEAD_DIM,
                PACK, STEPS, BLOCK_STEPS, BLOCK_TAPS, BLOCK_D, SPLIT_WEIGHT, PRECISION, k_ptr.dtype.element_ty,
            ),)  # fmt: skip

        column = tl.arange(0, COLUMNS)
        step = (tl.arange(0, ROWS) % BLOCK_STEPS)[:, None]
        # A tile finishes the scores of the columns that end STEPS - 1 before its own last one.
        source = (column[None, :] - (STEPS - 1) + step + COLUMNS) % COLUMNS  # [ROWS, COLUMNS]
        is_new = column[None, :] <= COLUMNS - STEPS + step
        out_key = (tl.arange(0, BLOCK_N) % COLUMNS - (STEPS - 1)) * PACK + PAD + tl.arange(0, BLOCK_N) // COLUMNS
        carried = tl.zeros([ROWS, COLUMNS], tl.float32)
        first_column = start // PACK - (PAD + PACK - 1) // PACK
        last_key = stop - 1 - PAD + (KEY_TAPS - 1)
        end_column = (stop - 1 - PAD + PACK * STEPS) // PACK  # past the last one that a score of the share needs
        for tile in tl.range(first_column, end_column, COLUMNS):
            r = tl.zeros([ROWS, COLUMNS], tl.float32)
            key = (tile + column) * PACK  # a column never straddles two pages, nor the first key
            inside = (key >= 0) & (key <= last_key)
            rows = _cache_rows(table_ptr, key, inside, stride_kb, stride_kn, stride_tp, PAGE_SIZE)
            for g in tl.static_range(PACK):
                inside = (key >= 0) & (key + g <= last_key)
                k = _load_rows(
                    k_ptr + tl.full([], g, tl.int64) * stride_kn, rows, dim, inside, stride_kd, HEAD_DIM
                )  # [COLUMNS, BLOCK_D]
                r = tl.dot(queries[g], k.T, r, input_precision=PRECISION)
            moved = tl.gather(tl.where(is_new, r, carried), source, 1)
            carried = r
            scores = tl.sum(moved.reshape(HEADS, PACK, BLOCK_STEPS, COLUMNS), 2).reshape(HEADS, BLOCK_N)

            key = tile * PACK + out_key
            inside = (key >= start) & (key < stop)
            rows = _cache_rows(table_ptr, key, inside, stride_vb, stride_vn, stride_tp, PAGE_SIZE)
            v = _load_rows(v_ptr, rows, dim, inside, stride_vd, HEAD_DIM)  # [BLOCK_N, BLOCK_D]
            scores = tl.where(inside[None, :], scores, float("-inf"))
            new_max = tl.maximum(running_max, tl.max(scores, 1))
            reference = _finite(new_max)
            p = tl.exp2(scores - reference[:, None])  # [HEADS, BLOCK_N]
            rescale = tl.exp2(running_max - reference)
            running_sum = running_sum * rescale[:, None] + p
            running_max = new_max
            accumulator *= _repeat_rows(rescale[:, None], OUT_ROWS)
            p = _repeat_rows(p, OUT_ROWS).to(v.dtype)
            accumulator = tl.dot(p, v, accumulator, input_precision=PRECISION)

    head = first_head + tl.arange(0, HEADS)
    slot = (batch * kv_heads * GROUP + kv_head * GROUP + head).to(tl.int64) * (splits + 1) + split
    tl.store(max_ptr + slot, running_max, mask=head < GROUP)
    tl.store(sum_ptr + slot, tl.sum(running_sum, 1), mask=head < GROUP)
    REPEAT: tl.constexpr = OUT_ROWS // HEADS
    out_row = tl.arange(0, OUT_ROWS)
    head = first_head + out_row // REPEAT
    slot = (batch * kv_heads * GROUP + kv_head * GROUP + head).to(tl.int64) * (splits + 1) + split
    wanted = (out_row % REPEAT == 0) & (head < GROUP)
    tl.store(
        partial_ptr + slot[:, None] * HEAD_DIM + dim[None, :],
        accumulator,
        mask=wanted[:, None] & (dim < HEAD_DIM)[None, :],
    )


@triton.jit
def _newest_products(
    q_ptr, k_ptr, weight_ptr, table_ptr,
    stride_qw, stride_qd, stride_kb, stride_kn, stride_kd, stride_wa, stride_wb, stride_tp, window, length, factor,
    QUERY_TAPS: tl.constexpr, KEY_TAPS: tl.constexpr, HEAD_DIM: tl.constexpr, PAGE_SIZE: tl.constexpr,
    BLOCK_TAPS: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_NEAR: tl.constexpr, PRECISION: tl.constexpr,
    HELD: tl.constexpr,
):  # fmt: skip
    """`r[b, y] = factor * sum_a weight[a, b] * s[a, y]` for the last BLOCK_NEAR keys, s zero where a may not see y."""
    dim = tl.arange(0, BLOCK_D)
    tap = tl.arange(0, BLOCK_TAPS)
    KEY_ROWS: tl.constexpr = 16 if KEY_TAPS <= 16 else 32
    key_tap = tl.arange(0, KEY_ROWS)
    key = length - BLOCK_NEAR + tl.arange(0, BLOCK_NEAR)
    held = tap + (window - QUERY_TAPS)  # where the window holds this tap's query
    known = (tap < QUERY_TAPS) & (held >= 0)
    q = tl.load(
        q_ptr + held[:, None].to(tl.int64) * stride_qw + dim[None, :].to(tl.int64) * stride_qd,
        mask=known[:, None] & (dim < HEAD_DIM)[None, :],
        other=0.0,
    )  # [BLOCK_TAPS, BLOCK_D]
    inside = (key >= 0) & (key < length)
    if HELD > 0:
        inside = inside & (key < HELD)
    rows = _cache_rows(table_ptr, key, inside, stride_kb, stride_kn, stride_tp, PAGE_SIZE)
    k = _load_rows(k_ptr, rows, dim, inside, stride_kd, HEAD_DIM)  # [BLOCK_NEAR, BLOCK_D]
    scores = tl.dot(q, k.T, input_precision=PRECISION)  # [BLOCK_TAPS, BLOCK_NEAR]
    visible = (key >= 0)[None, :] & (key[None, :] <= length - QUERY_TAPS + tap[:, None]) & known[:, None]
    scores = tl.where(visible, scores * factor, 0.0)
    weight = tl.load(
        weight_ptr + key_tap[:, None] * stride_wb + tap[None, :] * stride_wa,
        mask=(key_tap < KEY_TAPS)[:, None] & (tap < QUERY_TAPS)[None, :],
        other=0.0,
    )
    return tl.dot(weight.to(tl.float32), scores, input_precision="ieee")


@triton.jit
def _fold_taps(
    q_ptr, weight_ptr, kv_first_head, first_head, g, stride_qh, stride_qw, stride_qd, stride_wh, stride_wa, stride_wb,
    window, factor,
    GROUP: tl.constexpr, HEADS: tl.constexpr, QUERY_TAPS: tl.constexpr, KEY_TAPS: tl.constexpr,
    HEAD_DIM: tl.constexpr, PACK: tl.constexpr, STEPS: tl.constexpr, BLOCK_STEPS: tl.constexpr,
    BLOCK_TAPS: tl.constexpr, BLOCK_D: tl.constexpr, SPLIT_WEIGHT: tl.constexpr, PRECISION: tl.constexpr, DTYPE,
):  # fmt: skip
    """Row (h, p, e): `factor * sum_a weight[h, a, PACK*e + g - p] * q_window[h, a]`: `[rows, BLOCK_D]`.

    One product of a block-diagonal matrix of weights with the windows of all heads, one below the other.
    """
    row = tl.arange(0, HEADS * PACK * BLOCK_STEPS)
    row_head = first_head + row // (PACK * BLOCK_STEPS)
    step = row % BLOCK_STEPS
    key_tap = step * PACK + g - row // BLOCK_STEPS % PACK
    depth = tl.arange(0, HEADS * BLOCK_TAPS)
    head = first_head + depth // BLOCK_TAPS
    tap = depth % BLOCK_TAPS
    dim = tl.arange(0, BLOCK_D)
    held = tap + (window - QUERY_TAPS)  # where the window holds this tap's query
    used = (head < GROUP) & (tap < QUERY_TAPS) & (held >= 0)
    q = tl.load(
        q_ptr + ((kv_first_head + head).to(tl.int64) * stride_qh + held.to(tl.int64) * stride_qw)[:, None]
        + dim[None, :].to(tl.int64) * stride_qd,
        mask=used[:, None] & (dim < HEAD_DIM)[None, :],
        other=0.0,
    )  # fmt: skip
    has_tap = (step < STEPS) & (key_tap >= 0) & (key_tap < KEY_TAPS)
    weight = tl.load(
        weight_ptr + ((kv_first_head + row_head).to(tl.int64) * stride_wh + key_tap * stride_wb)[:, None]
        + tap[None, :] * stride_wa,
        mask=has_tap[:, None] & used[None, :] & (row_head[:, None] == head[None, :]),
        other=0.0,
    )  # fmt: skip
    coarse = weight.to(q.dtype)
    folded = tl.dot(coarse, q, input_precision=PRECISION)
    if SPLIT_WEIGHT:
        folded = tl.dot((weight - coarse.to(weight.dtype)).to(q.dtype), q, folded, input_precision=PRECISION)
    return (folded * factor).to(DTYPE)


@triton.jit
def _cache_rows(table_ptr, key, inside, stride_b, stride_n, stride_tp, PAGE_SIZE: tl.constexpr):
    """Where row `key` of a head's cache begins, in elements; reads no entry of the table that is not `inside`."""
    if PAGE_SIZE > 0:
        page = tl.load(table_ptr + (key // PAGE_SIZE).to(tl.int64) * stride_tp, mask=inside, other=0).to(tl.int64)
        rows = page * stride_b + (key % PAGE_SIZE).to(tl.int64) * stride_n
    else:
        rows = key.to(tl.int64) * stride_n
    return rows


@triton.jit
def _load_rows(x_ptr, rows, dim, inside, stride_d, HEAD_DIM: tl.constexpr):
    """Rows that begin at `rows`, zero where not `inside`: `[len(rows), len(dim)]`. Never reads outside."""
    mask = inside[:, None]
    if dim.shape[0] != HEAD_DIM:
        mask = mask & (dim < HEAD_DIM)[None, :]
    return tl.load(x_ptr + rows[:, None] + dim[None, :].to(tl.int64) * stride_d, mask=mask, other=0.0)


@triton.jit
def _finite(maximum):
    """A maximum to subtract from scores; 0 where there was no score, so that 2^(-inf - 0) is 0 and not NaN."""
    return tl.where(maximum == float("-inf"), 0.0, maximum)


@triton.jit
def _repeat_rows(x, ROWS: tl.constexpr):
    """Every row of x several times in turn: `[ROWS, columns]`."""
    HEADS: tl.constexpr = x.shape[0]
    COLUMNS: tl.constexpr = x.shape[1]
    return tl.broadcast_to(x[:, None, :], [HEADS, ROWS // HEADS, COLUMNS]).reshape(ROWS, COLUMNS)


@triton.jit
def _combine_splits_kernel(
    partial_ptr, max_ptr, sum_ptr, out_ptr, slots,
    HEAD_DIM: tl.constexpr, BLOCK_SLOTS: tl.constexpr, BLOCK_D: tl.constexpr, CHUNK: tl.constexpr,
    DEPENDENT_LAUNCH: tl.constexpr,
):  # fmt: skip
    """`out[h] = sum_s 2^(max_s - max) partial_s / sum_s 2^(max_s - max) sum_s`; zero for a sequence without tokens."""
    if DEPENDENT_LAUNCH:
        gdc_wait()
    DIM_BLOCKS: tl.constexpr = (HEAD_DIM + BLOCK_D - 1) // BLOCK_D
    head = (tl.program_id(0) // DIM_BLOCKS).to(tl.int64)
    dim = tl.program_id(0) % DIM_BLOCKS * BLOCK_D + tl.arange(0, BLOCK_D)
    slot = tl.arange(0, BLOCK_SLOTS)
    all_maxima = tl.load(max_ptr + head * slots + slot, mask=slot < slots, other=float("-inf"))
    largest = _finite(tl.max(all_maxima, 0))
    sums = tl.load(sum_ptr + head * slots + slot, mask=slot < slots, other=0.0)
    total = tl.sum(tl.exp2(all_maxima - largest) * sums, 0)
    out = tl.zeros([CHUNK, BLOCK_D], tl.float32)
    for first in tl.range(0, slots, CHUNK):
        chunk_slot = first + tl.arange(0, CHUNK)
        scale = tl.exp2(
            tl.load(max_ptr + head * slots + chunk_slot, mask=chunk_slot < slots, other=float("-inf")) - largest
        )
        partial = tl.load(
            partial_ptr + (head * slots + chunk_slot[:, None]) * HEAD_DIM + dim[None, :],
            mask=(chunk_slot < slots)[:, None] & (dim < HEAD_DIM)[None, :],
            other=0.0,
        )
        out += partial * scale[:, None]
    merged = tl.sum(out, 0) / tl.where(total > 0, total, 1.0)
    tl.store(out_ptr + head * HEAD_DIM + dim, merged.to(out_ptr.dtype.element_ty), mask=dim < HEAD_DIM)


@dataclass(frozen=True)
class DecodeConfig:
    """Tile sizes of the decode kernel.

    A program reads tiles of `block_n` keys, `pack` of them to a column of products, for `heads` query heads;
    `num_stages - 1` tiles are on the chip or on their way.
    """

    block_n: int
    pack: int
    heads: int
    num_warps: int
    num_stages: int

    def block_steps(self, key_taps: int) -> int:
        """Rows of products a head and a key of a column, padded to fill the tensor core."""
        return max(next_power_of_2(column_steps(key_taps, self.pack)), 16 // (self.pack * self.heads))

    def shared_memory(self, key_taps: int, block_d: int, element_size: int) -> int:
        """Bytes of shared memory that a program needs, rounded up a little."""
        rows = self.heads * self.pack * self.block_steps(key_taps)
        windows = self.heads * 16
        folding = (rows * windows + windows * block_d + rows * block_d * self.pack) * element_size
        queries = rows * self.pack * block_d * element_size
        tiles = max(1, 2 * (self.num_stages - 1)) * self.block_n * block_d * element_size
        products = 4 * rows * self.block_n // self.pack  # change their layout there
        return max(folding, queries + tiles + products) + 2048


def conv_attention_decode_triton(
    q_window: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    weight: Tensor,
    *,
    lengths: Tensor,
    scale: float | None = None,
    pad_key: str = "both",
    splits: int | str = "auto",
    block_table: Tensor | None = None,
) -> Tensor:
    """`conv_attention_decode` by the Triton kernels, for arguments already checked: `[B, Hq, 1, D]`.

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
    splits, config = chosen_tiles(q_window, k_cache, weight, splits, capacity)
    with on_device_of(q_window):
        return launch_decode(
            q_window,
            k_cache,
            v_cache,
            weight,
            lengths,
            block_table,
            scale=softmax_scale(scale, q_window.shape[3]),
            pad=key_padding(weight.shape[2], pad_key),
            splits=splits,
            config=config,
        )


def chosen_tiles(
    q_window: Tensor, k_cache: Tensor, weight: Tensor, splits: int | str, capacity: int
) -> tuple[int, DecodeConfig]:
    """How many programs share the keys of a KV head, of a cache for so many, and their tiles.

    Raises ValueError for splits that do not fit.
    """
    check_splits(splits)
    batch, query_heads, _, head_dim = q_window.shape
    kv_heads = k_cache.shape[1]
    if splits == "auto":
        splits = choose_splits(batch, kv_heads, capacity, sm_count(q_window.device))
    group = query_heads // kv_heads
    candidates = decode_candidates(
        key_taps=weight.shape[2],
        group=group,
        block_d=max(16, next_power_of_2(head_dim)),
        element_size=q_window.element_size(),
        shared_memory=shared_memory_limit(q_window.device),
    )
    key = Key.of(q_window.dtype, head_dim, weight.shape[1:], True, capacity, group, batch * kv_heads)
    return int(splits), best_config("decode", key, candidates, q_window.device)


def launch_decode(
    q_window: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    weight: Tensor,
    lengths: Tensor,
    block_table: Tensor | None,
    *,
    scale: float,
    pad: int,
    splits: int,
    config: DecodeConfig,
) -> Tensor:
    """Run the decode kernel with these tiles, then combine its `splits + 1` partial results a head."""
    found = launch_shares(
        q_window, k_cache, v_cache, weight, lengths, block_table, scale=scale, pad=pad, splits=splits, config=config
    )
    batch, query_heads, _, head_dim = q_window.shape
    out = torch.empty(batch, query_heads, 1, head_dim, dtype=q_window.dtype, device=q_window.device)
    combine_d = min(64, max(16, next_power_of_2(head_dim)))
    slots = splits + 1
    launch(
        _combine_splits_kernel, batch * query_heads * cdiv(head_dim, combine_d), found.signature,
        found.partial, found.maxima, found.sums, out, slots,
        HEAD_DIM=head_dim, BLOCK_SLOTS=next_power_of_2(slots), BLOCK_D=combine_d,
        CHUNK=min(32, next_power_of_2(slots)), DEPENDENT_LAUNCH=found.dependent_launch,
        num_warps=4, launch_pdl=found.dependent_launch,
    )  # fmt: skip
    return out


class Shares(NamedTuple):
    """Partial results of `splits + 1` programs a head, in base-2 units.

    `partial [B * Hq, splits + 1, D]`, `maxima` and `sums [B * Hq, splits + 1]`, float32. The kernel that combines them
    may start before they are there if it waits (`dependent_launch`).
    """

    partial: Tensor
    maxima: Tensor
    sums: Tensor
    signature: Hashable
    dependent_launch: bool


def launch_shares(
    q_window: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    weight: Tensor,
    lengths: Tensor,
    block_table: Tensor | None,
    *,
    scale: float,
    pad: int,
    splits: int,
    config: DecodeConfig,
    first_key: int = 0,
    own_keys: int = 0,
) -> Shares:
    """Run the decode kernel with these tiles.

    With `own_keys` the cache is a part of one: these keys, from `first_key` on, and the few before and after that they
    are mixed with. Lengths count from the first key that is held, and may be negative or beyond.
    """
    batch, query_heads, window, head_dim = q_window.shape
    kv_heads = k_cache.shape[1]
    group = query_heads // kv_heads
    query_taps, key_taps = weight.shape[1:]
    unit = 16 // q_window.element_size()  # strides in whole loads of 16 bytes, so that the compiler knows they are
    if any(stride % unit for x in (k_cache, v_cache) for stride in x.stride()[:3]):
        unit = 1
    units = [stride // unit for x in (k_cache, v_cache) for stride in x.stride()[:3]]
    slots = splits + 1
    partial = torch.empty(batch * query_heads, slots, head_dim, dtype=torch.float32, device=q_window.device)
    maxima = torch.empty(batch * query_heads, slots, dtype=torch.float32, device=q_window.device)
    sums = torch.empty_like(maxima)
    programs = group + splits * cdiv(group, config.heads)
    signature = (call_signature(q_window, k_cache, v_cache, weight, lengths, block_table), splits)
    # Programmatic dependent launch: the merge starts while the last shares finish.
    dependent_launch = capability(q_window.device)[0] >= 9 and q_window.is_cuda
    # The compiler's pipeline takes two stages a tile if it has to look up the pages first.
    num_stages = config.num_stages if block_table is None else 2 * config.num_stages - 1
    launch(
        _conv_attention_decode_kernel, programs * batch * kv_heads, signature,
        q_window, k_cache, v_cache, weight, lengths, block_table, partial, maxima, sums,
        *q_window.stride(), *units[:3], k_cache.stride(3), *units[3:], v_cache.stride(3), *weight.stride(),
        *(block_table.stride() if block_table is not None else (0, 0)),
        kv_heads, window, splits, scale * math.log2(math.e),
        GROUP=group, HEADS=config.heads, QUERY_TAPS=query_taps, KEY_TAPS=key_taps, PAD=pad, HEAD_DIM=head_dim,
        PAGE_SIZE=0 if block_table is None else k_cache.shape[2],
        PACK=config.pack, STEPS=column_steps(key_taps, config.pack),
        BLOCK_STEPS=config.block_steps(key_taps),
        BLOCK_TAPS=max(16, next_power_of_2(query_taps)), BLOCK_N=config.block_n,
        BLOCK_D=max(16, next_power_of_2(head_dim)),
        BLOCK_NEAR=max(16, next_power_of_2(query_taps + key_taps - 2)),
        SPLIT_WEIGHT=weight.dtype != q_window.dtype,
        UNIT=unit, DEPENDENT_LAUNCH=dependent_launch,
        PRECISION=dot_precision(q_window.dtype),
        FIRST=first_key, OWN=own_keys, HELD=k_cache.shape[2] if own_keys else 0,
        num_warps=config.num_warps, num_stages=num_stages,
    )  # fmt: skip
    return Shares(partial, maxima, sums, signature, dependent_launch)


def column_steps(key_taps: int, pack: int) -> int:
    """Columns of `pack` keys that the windows of `pack` neighbouring scores touch."""
    return (pack + key_taps - 2) // pack + 1


@functools.cache
def decode_candidates(
    *, key_taps: int, group: int, block_d: int, element_size: int, shared_memory: int
) -> tuple[DecodeConfig, ...]:
    """Tile sizes that fit in `shared_memory` bytes a program, the best guess first."""
    guess = _decode_guess(key_taps, group, block_d, element_size, shared_memory)
    if guess.heads == 1 and element_size == 2 and block_d <= 128:
        # Small programs, measured on an H200: many of them hide each other's waits.
        shapes = [
            (64, 2, 2, 3),
            (64, 2, 4, 3),
            (64, 2, 2, 4),
            (64, 2, 4, 4),
            (64, 1, 2, 3),
            (128, 2, 4, 3),
            (128, 4, 4, 3),
        ]
        configs = [DecodeConfig(block_n, pack, 1, warps, stages) for block_n, pack, warps, stages in shapes]
    else:
        configs = [
            dataclasses.replace(guess, block_n=block_n, heads=heads, num_warps=warps, num_stages=stages)
            for heads in (guess.heads, max(1, guess.heads // 2))
            for block_n in (guess.block_n, guess.block_n // 2)
            for warps in (guess.num_warps, guess.num_warps // 2)
            for stages in (guess.num_stages, 3, 2)
            if block_n // guess.pack >= max(16, column_steps(key_taps, guess.pack))
        ]
    fitting = [c for c in configs if c.shared_memory(key_taps, block_d, element_size) <= shared_memory]
    return tuple(dict.fromkeys(fitting)) or (guess,)


def _decode_guess(key_taps: int, group: int, block_d: int, element_size: int, shared_memory: int) -> DecodeConfig:
    """About 32 KiB of keys and values a tile; as many tiles in flight, up to three, as leave room for two programs."""
    block_n = max(32, min(128, 16 * 1024 // (block_d * element_size)))
    budgets = [(shared_memory // 2 - 1024, (4, 3)), (shared_memory, (4, 3, 2, 1))]
    heads = min(next_power_of_2(group), 128 // max(16, next_power_of_2(key_taps)))
    while heads:
        pack = 1
        for candidate in (2, 4) if heads == 1 else (2,):
            rows = heads * candidate * next_power_of_2(column_steps(key_taps, candidate))
            # Rows that the tensor core would multiply anyway, enough columns for four warps, room in the registers.
            free = rows <= heads * max(16, next_power_of_2(key_taps)) and block_n // candidate >= 32
            if free and rows * candidate * block_d * element_size <= 8192 * max(1, min(4, rows // 16)):
                pack = candidate
        for budget, depths in budgets:
            for num_stages in depths:
                config = DecodeConfig(block_n, pack, heads, 8 if heads * key_taps > 64 else 4, num_stages)
                if config.shared_memory(key_taps, block_d, element_size) <= budget:
                    return config
        heads //= 2
    raise ValueError(
        f"the smallest tiles for {key_taps} key taps and head_dim up to {block_d} need more than "
        f"the {shared_memory} bytes of shared memory of this GPU; backend='reference' needs none"
    )


def choose_splits(batch: int, kv_heads: int, max_length: int, sm_count: int) -> int:
    """How many programs share the keys of one KV head, so that whole waves of two programs an SM run.

    One where there are KV heads for a whole wave. Else the least of waves of programs times keys a program, where a
    wave's start and end cost as much as 1280 keys and the newest keys of a KV head take a program's place (measured on
    an H200); from 1 to 128, and never less than 64 keys a program.
    """
    slots = PROGRAMS_PER_SM * sm_count
    if batch * kv_heads >= slots:
        return 1

    def cost(splits: int) -> int:
        waves = -(-batch * kv_heads * (splits + 1) // slots)
        return waves * (-(-max_length // splits) + 1280)

    return min(range(1, min(MAX_SPLITS, max(1, max_length // 64)) + 1), key=cost)


def sm_count(device: torch.device) -> int:
    """Streaming multiprocessors of `device`."""
    return (
        torch.cuda.get_device_properties(device).multi_processor_count
        if device.type == "cuda"
        else INTERPRETED_SM_COUNT
    )
