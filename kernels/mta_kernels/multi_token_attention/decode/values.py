"""The kernels of a decode step that read V: the mixed probabilities, products with a share of the values, their sum."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from mta_kernels.conv_attention.triton.decode_shares import _cache_rows, _finite, _load_rows
from mta_kernels.multi_token_attention.decode.rows import (
    LOG2E,
    _add_row,
    _band_of_taps,
    _is_finite,
    _load_mix,
    _load_row,
    _takes_part,
    _wide,
)


@triton.jit
def _mta_decode_values_kernel(
    v_ptr, table_ptr, logits_ptr, found_ptr, post_taps_ptr, older_ptr, post_mix_ptr, lengths_ptr, logsumexp_ptr,
    seen_ptr, partial_ptr,
    stride_vb, stride_vh, stride_vn, stride_vd, stride_tb, stride_tp, stride_lb, stride_lh, stride_ls, stride_ln,
    stride_ob, stride_oh, stride_ph, stride_pa, stride_pb, stride_mi, stride_mo,
    stride_l, stride_sb, stride_sh, stride_ss, stride_seen, slots, programs, parts,
    HEADS: tl.constexpr, GROUP: tl.constexpr, KV_HEADS: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_V: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, PAGE_SIZE: tl.constexpr,
    BLOCK_SLOTS: tl.constexpr, POST_QUERY_TAPS: tl.constexpr, POST_KEY_TAPS: tl.constexpr,
    POST_PAD: tl.constexpr, BEFORE: tl.constexpr, SPAN: tl.constexpr, SLOTS: tl.constexpr,
    WIDE: tl.constexpr, POST_CONV: tl.constexpr, POST_MIX: tl.constexpr, KEEPS: tl.constexpr, AHEAD: tl.constexpr,
    EARLY: tl.constexpr, DEPENDENT_LAUNCH: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Partial outputs `[B, programs, H, D]` of every `programs`-th tile of `16 * BLOCK_M` keys, KV_HEADS heads of V.

    A tile divides into `16 * BLOCK_M / BLOCK_V` parts of V. First come the probabilities of all heads in a tile,
    convolved with the older rows' part and mixed, while the first AHEAD KV heads' values are prefetched. If KEEPS,
    logsumexp `[B, H, SLOTS]` and seen `[B]` are a state's: a sequence's first program writes the newest row's.
    """
    if DEPENDENT_LAUNCH:
        gdc_launch_dependents()
    BLOCK_N: tl.constexpr = 16 * BLOCK_M
    DTYPE: tl.constexpr = logits_ptr.dtype.element_ty
    batch = tl.program_id(0) // (programs * parts)
    program = tl.program_id(0) // parts % programs
    first_kv = tl.program_id(0) % parts * KV_HEADS
    last_kv = tl.minimum(first_kv + KV_HEADS, HEADS // GROUP)
    length = tl.load(lengths_ptr + batch.to(tl.int64) * stride_l).to(tl.int32)
    if PAGE_SIZE > 0:
        table_ptr += batch.to(tl.int64) * stride_tb
    else:
        v_ptr += batch.to(tl.int64) * stride_vb
    head = tl.arange(0, BLOCK_H)
    if POST_MIX:
        mix = _load_mix(post_mix_ptr, stride_mo, stride_mi, HEADS, BLOCK_H).to(DTYPE)
    if POST_CONV:
        band = _band_of_taps(
            post_taps_ptr + (POST_QUERY_TAPS - 1) * stride_pa, head, stride_ph, stride_pb, POST_KEY_TAPS, POST_PAD,
            BEFORE, SPAN, HEADS,
        ).to(DTYPE)  # fmt: skip
    if DEPENDENT_LAUNCH and not EARLY:
        gdc_wait()
    if DEPENDENT_LAUNCH and AHEAD > 0:
        _ask_for_values(
            v_ptr, table_ptr, program * BLOCK_N, length, first_kv, tl.minimum(first_kv + AHEAD, last_kv), stride_vb,
            stride_vh, stride_vn, stride_vd, stride_tp, BLOCK_N, HEAD_DIM, PAGE_SIZE,
        )  # fmt: skip
    if DEPENDENT_LAUNCH and EARLY:
        gdc_wait()
    # The newest row's logsumexp of each head, from its shares' results; 0 without keys and past the heads.
    of_share = tl.arange(0, BLOCK_SLOTS)[:, None]
    place = found_ptr + (batch.to(tl.int64) * slots + of_share) * HEADS + head[None, :]
    found = tl.load(place, mask=(of_share < slots) & (head < HEADS)[None, :], other=float("-inf"))
    largest = _finite(tl.max(found, 0))
    total = tl.sum(tl.exp2((found - largest[None, :]) * LOG2E), 0)
    logsumexp = largest + tl.log2(tl.where(total != 0, total, 1.0)) / LOG2E  # NaN stays
    slot = tl.maximum(length - 1, 0) % SLOTS
    if KEEPS and tl.program_id(0) % (programs * parts) == 0:
        kept = logsumexp_ptr + batch.to(tl.int64) * stride_sb + _wide(head) * stride_sh + slot * stride_ss
        tl.store(kept, logsumexp, mask=(head < HEADS) & (length > 0))
        tl.store(seen_ptr + batch.to(tl.int64) * stride_seen, length)

    logits_ptr += batch.to(tl.int64) * stride_lb
    older_ptr += batch.to(tl.int64) * stride_ob
    dim = tl.arange(0, BLOCK_D)
    accumulator = tl.zeros([BLOCK_H, BLOCK_D], tl.float32)
    spoiled = tl.zeros([BLOCK_H], tl.float32)
    for first in tl.range(program * BLOCK_N, length, programs * BLOCK_N, num_stages=1):
        key = first + tl.arange(0, BLOCK_N)[None, :]
        if POST_CONV:
            heads = head[:, None, None]
            within = tl.arange(0, BLOCK_M)[None, :, None] * 16 + tl.arange(0, 16)[None, None, :]
            mixed = tl.zeros([BLOCK_H, BLOCK_M, 16], tl.float32)
            if POST_QUERY_TAPS > 1:
                mixed = tl.load(
                    older_ptr + heads.to(tl.int64) * stride_oh + first + within,
                    mask=(heads < HEADS) & ((first + within) // 16 * 16 < length), other=0.0,
                )  # fmt: skip
            row = _load_row(
                logits_ptr, head, length - 1, first, stride_lh, stride_ls, stride_ln, BLOCK_M, BEFORE, SPAN, HEADS,
                SLOTS, WIDE,
            )  # fmt: skip
            mixed = _add_row(mixed, row, band, logsumexp, length - 1, first, BEFORE, WIDE, PRECISION)
            mixed = mixed.reshape(BLOCK_H, BLOCK_N)
        else:
            groups = (first // 8 + tl.arange(0, BLOCK_N)[None, :] // 8) * 8  # of keys that one load covers
            newest = logits_ptr + slot.to(tl.int64) * stride_ls + head[:, None].to(tl.int64) * stride_lh
            visible = (head < HEADS)[:, None] & (groups < length)
            if not WIDE:
                visible = visible & (key < length)
            logits = tl.load(newest + key.to(tl.int64) * stride_ln, mask=visible, other=float("-inf"))
            mixed = tl.exp2((logits.to(tl.float32) - logsumexp[:, None]) * LOG2E)
        mixed = tl.where(key < length, mixed, 0.0).to(DTYPE)
        if POST_MIX:
            finite = _is_finite(mixed)
            spoiled = tl.maximum(spoiled, tl.max(tl.where(finite, 0.0, 1.0), 1))
            mixed = tl.dot(mix, tl.where(finite, mixed, 0.0).to(DTYPE), input_precision=PRECISION).to(DTYPE)
        for part in tl.range(0, (tl.minimum(length - first, BLOCK_N) + BLOCK_V - 1) // BLOCK_V, num_stages=1):
            left = _part(mixed, part, BLOCK_N // BLOCK_V)
            of_part = first + part * BLOCK_V + tl.arange(0, BLOCK_V)
            inside = of_part < length
            rows = _cache_rows(table_ptr, of_part, inside, stride_vb, stride_vn, stride_tp, PAGE_SIZE)
            for kv_head in tl.range(first_kv, last_kv):
                v = _load_rows(v_ptr + _wide(kv_head) * stride_vh, rows, dim, inside, stride_vd, HEAD_DIM)
                products = tl.dot(left, v, accumulator, input_precision=PRECISION)
                own = (head >= kv_head * GROUP) & (head < (kv_head + 1) * GROUP)
                accumulator = tl.where(own[:, None], products, accumulator)
    if POST_MIX:
        accumulator = tl.where(_takes_part(mix, spoiled)[:, None], float("nan"), accumulator)
    place = (batch * programs + program).to(tl.int64) * HEADS + head
    mine = (head < HEADS) & (head // GROUP >= first_kv) & (head // GROUP < last_kv)
    tl.store(
        partial_ptr + place[:, None] * HEAD_DIM + dim[None, :], accumulator,
        mask=mine[:, None] & (dim < HEAD_DIM)[None, :],
    )  # fmt: skip


@triton.jit
def _part(x, part, PARTS: tl.constexpr):
    """One of PARTS equal parts of the columns of x."""
    if PARTS > 1:
        apart = x.reshape(x.shape[0], PARTS, x.shape[1] // PARTS)
        wanted = tl.arange(0, PARTS)[None, :, None] == part
        x = tl.sum(tl.where(wanted, apart.to(tl.float32), 0.0), 1).to(x.dtype)
    return x


@triton.jit
def _ask_for_values(
    v_ptr, table_ptr, first, length, first_kv, last_kv, stride_vb, stride_vh, stride_vn, stride_vd, stride_tp,
    BLOCK_N: tl.constexpr, HEAD_DIM: tl.constexpr, PAGE_SIZE: tl.constexpr,
):  # fmt: skip
    """Prefetch the values of some KV heads in a tile of keys into the L2 cache."""
    LINE: tl.constexpr = 1024 // v_ptr.dtype.element_ty.primitive_bitwidth
    key = first + tl.arange(0, BLOCK_N)
    inside = key < length
    rows = _cache_rows(table_ptr, key, inside, stride_vb, stride_vn, stride_tp, PAGE_SIZE)
    rows = tl.where(inside, rows, 0)
    if first < length:
        for kv_head in tl.range(first_kv, last_kv, num_stages=1):
            for line in tl.static_range((HEAD_DIM + LINE - 1) // LINE):
                tl.inline_asm_elementwise(
                    "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l",
                    [v_ptr + _wide(kv_head) * stride_vh + rows + line * LINE * stride_vd],
                    dtype=tl.int32, is_pure=False, pack=1,
                )  # fmt: skip


@triton.jit
def _mta_decode_merge_kernel(
    partial_ptr, out_ptr, programs, HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    CHUNK: tl.constexpr, DEPENDENT_LAUNCH: tl.constexpr,
):  # fmt: skip
    """out `[B, H, D]`: the sum of the programs' partial outputs, in a fixed order."""
    if DEPENDENT_LAUNCH:
        gdc_wait()
    DIM_BLOCKS: tl.constexpr = (HEAD_DIM + BLOCK_D - 1) // BLOCK_D
    batch_head = (tl.program_id(0) // DIM_BLOCKS).to(tl.int64)
    dim = tl.program_id(0) % DIM_BLOCKS * BLOCK_D + tl.arange(0, BLOCK_D)
    first_row = batch_head // HEADS * programs * HEADS + batch_head % HEADS
    out = tl.zeros([CHUNK, BLOCK_D], tl.float32)
    for first in tl.range(0, programs, CHUNK):
        program = first + tl.arange(0, CHUNK)
        out += tl.load(
            partial_ptr + (first_row + program[:, None] * HEADS) * HEAD_DIM + dim[None, :],
            mask=(program < programs)[:, None] & (dim < HEAD_DIM)[None, :],
            other=0.0,
        )
    merged = tl.sum(out, 0).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + batch_head * HEAD_DIM + dim, merged, mask=dim < HEAD_DIM)
