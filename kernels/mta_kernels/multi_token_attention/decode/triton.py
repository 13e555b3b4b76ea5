"""A decode step by the Triton kernels; each may start while the one before it finishes.

Where the kernels of `decode_cuda/` can run, they run instead, since they are faster.

The order: scores from K if they are convolved; beside it, the older rows' part; logits (from K if not convolved);
partial outputs from V; the output; norm and gate. Between K and V a step stores two bytes a key and head, and four more
with convolutions.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from mta_kernels.allocation import empty
from mta_kernels.conv_attention.arguments import check_splits
from mta_kernels.conv_attention.surroundings import on_device_of
from mta_kernels.conv_attention.triton.launch import call_signature, cdiv, dependent_launches, launch, next_power_of_2
from mta_kernels.conv_attention.triton.prepare import dot_precision
from mta_kernels.multi_token_attention.arguments import NormGate
from mta_kernels.multi_token_attention.decode.keys import _mta_decode_convolved_kernel, _mta_decode_logits_kernel
from mta_kernels.multi_token_attention.decode.plan import StepLaunch, StepPlan, band, plan
from mta_kernels.multi_token_attention.decode.rows import _mta_decode_early_kernel
from mta_kernels.multi_token_attention.decode.state import DecodeState
from mta_kernels.multi_token_attention.decode.values import _mta_decode_merge_kernel, _mta_decode_values_kernel
from mta_kernels.multi_token_attention.decode_cuda import step as cuda_step
from mta_kernels.multi_token_attention.mixers import Mixers
from mta_kernels.multi_token_attention.norm_gate import norm_and_gate
from mta_kernels.operation import ONE_TAP, Operation


class _Step(NamedTuple):
    """What the launches of a step have in common."""

    operation: Operation
    mixers: Mixers
    plan: StepPlan
    lengths: Tensor
    block_table: Tensor | None
    signature: int
    constants: dict[str, Any]  # of all kernels; each takes the names of its own parameters
    state: DecodeState | None
    scores: Tensor  # [B, H, keys]: convolved; empty if they are not
    logits: Tensor  # [B, H, slots, S]: the state's, or one slot
    older: Tensor  # [B, H, keys] in float32: the older rows' part; empty without one


def newest_row(
    operation: Operation, q_window: Tensor, k_cache: Tensor, v_cache: Tensor, mixers: Mixers, after: NormGate,
    lengths: Tensor, state: DecodeState | None, block_table: Tensor | None, splits: int | str = "auto",
) -> Tensor:  # fmt: skip
    """The newest row, for checked arguments with dense mixings: `[B, Hq, 1, D]`.

    Reads no device memory on the host: fit for a CUDA graph. Raises ValueError for splits that do not fit.
    """
    check_splits(splits)
    batch, heads, _, head_dim = q_window.shape
    capacity = k_cache.shape[2] * (1 if block_table is None else block_table.shape[1])
    dtype, device = q_window.dtype, q_window.device
    shape = dtype, head_dim, heads, k_cache.shape[1], operation, batch, capacity
    count = 0 if splits == "auto" else int(splits)
    if operation.post_conv is None or operation.post_conv.query_taps == 1:
        state = None
    keys = cdiv(capacity, 16) * 16
    logits = empty(batch, heads, 1, keys, dtype=dtype, device=device) if state is None else state.logits
    caches = q_window, k_cache, v_cache
    if cuda_step.unsupported(operation, *caches) is None:
        with on_device_of(q_window):
            return cuda_step.newest_row(operation, *caches, mixers, after, lengths, state, block_table, count, logits)
    chosen = plan(*shape, device, count)
    scores = empty(batch, heads, keys if chosen.of_scores else 0, dtype=dtype, device=device)
    older = empty(batch, heads, 0 if state is None else keys, dtype=torch.float32, device=device)
    kept = (None, None) if state is None else (state.logsumexp, state.lengths)
    signature = call_signature(
        q_window, k_cache, v_cache, *mixers, lengths, block_table, logits, *kept, options=chosen
    )  # fmt: skip
    constants = _constants(operation, mixers, q_window, k_cache, block_table, logits)
    step = _Step(
        operation, mixers, chosen, lengths, block_table, signature, constants, state, scores, logits, older
    )  # fmt: skip
    with on_device_of(q_window):
        if chosen.of_scores is None:
            found = _launch_logits(step, q_window, k_cache)
            _launch_early(step)
        else:
            _launch_scores(step, chosen.of_scores, q_window, k_cache)
            _launch_early(step)
            found = _launch_logits(step, q_window, k_cache)
        out = _launch_values(step, found, v_cache)
    return norm_and_gate(out, *after.steps)


def _constants(
    operation: Operation, mixers: Mixers, q_window: Tensor, k_cache: Tensor, block_table: Tensor | None, logits: Tensor
) -> dict[str, Any]:
    (_, heads, _, head_dim), dtype = q_window.shape, q_window.dtype
    pre, post = operation.pre_conv or ONE_TAP, operation.post_conv or ONE_TAP
    before, span = band(operation)
    return {
        "HEADS": heads, "GROUP": heads // k_cache.shape[1], "BLOCK_H": max(16, next_power_of_2(heads)),
        "HEAD_DIM": head_dim, "BLOCK_D": max(16, next_power_of_2(head_dim)),
        "PAGE_SIZE": 0 if block_table is None else k_cache.shape[2],
        "PRE_CONV": operation.pre_conv is not None, "QUERY_TAPS": pre.query_taps, "KEY_TAPS": pre.key_taps,
        "PAD": pre.pad, "BLOCK_TAPS": max(16, next_power_of_2(pre.query_taps)),
        "BLOCK_NEAR": max(16, next_power_of_2(pre.query_taps + pre.key_taps - 2)),
        "SPLIT_WEIGHT": mixers.pre_conv is not None and mixers.pre_conv.dtype != dtype,
        "PRE_MIX": mixers.pre_mix is not None,
        "SPLIT_MIX": mixers.pre_mix is not None and mixers.pre_mix.dtype != dtype,
        "POST_CONV": operation.post_conv is not None, "POST_QUERY_TAPS": post.query_taps,
        "POST_KEY_TAPS": post.key_taps, "POST_PAD": post.pad, "BEFORE": before, "SPAN": span,
        "POST_MIX": mixers.post_mix is not None, "SLOTS": logits.shape[2],
        "WIDE": cuda_step.has_whole_groups(logits),
        "DEPENDENT_LAUNCH": dependent_launches(q_window), "PRECISION": dot_precision(dtype),
    }  # fmt: skip


def _launch_scores(step: _Step, how: StepLaunch, q_window: Tensor, k_cache: Tensor) -> None:
    """Convolved scores of the newest row."""
    kv_heads, taps, group = k_cache.shape[1], step.mixers.pre_conv, step.constants["GROUP"]
    sequences = step.scores.shape[0] * kv_heads
    _launch(
        step, _mta_decode_convolved_kernel, sequences * (group + how.programs * cdiv(group, how.tiles["AT_ONCE"])),
        how, False,
        q_window, k_cache, taps, step.lengths, step.block_table, step.scores, *q_window.stride(), *k_cache.stride(),
        *_strides(taps, 3), step.lengths.stride(0), *_strides(step.block_table, 2), *step.scores.stride()[:2],
        kv_heads, q_window.shape[2], how.programs, step.operation.scale,
    )  # fmt: skip


def _launch_early(step: _Step) -> None:
    """The older rows' part of the convolution of probabilities, if there is one."""
    (batch, heads, _), how, state, taps = step.older.shape, step.plan.early, step.state, step.mixers.post_conv
    if state is None:
        return
    _launch(
        step, _mta_decode_early_kernel, batch * cdiv(heads, how.tiles["AT_ONCE"]) * how.programs, how, True,
        taps, state.logits, state.logsumexp, step.lengths, step.older, *_strides(taps, 3), *state.logits.stride(),
        *state.logsumexp.stride(), step.lengths.stride(0), *step.older.stride()[:2], how.programs,
    )  # fmt: skip


def _launch_logits(step: _Step, q_window: Tensor, k_cache: Tensor) -> Tensor:
    """Logits of the newest row; returns the logsumexp over each program's keys: `[B, programs, H]` in float32."""
    (batch, heads, window, _), how, mix = q_window.shape, step.plan.of_logits, step.mixers.pre_mix
    found = empty(batch, how.programs, heads, dtype=torch.float32, device=q_window.device)
    _launch(
        step, _mta_decode_logits_kernel, batch * how.programs, how, step.plan.of_scores is not None,
        q_window, k_cache, mix, step.lengths, step.block_table, step.scores, step.logits, found, *q_window.stride(),
        *k_cache.stride(), *_strides(mix, 2), step.lengths.stride(0), *_strides(step.block_table, 2),
        *step.scores.stride()[:2], *step.logits.stride(), window, step.operation.scale, how.programs,
    )  # fmt: skip
    return found


def _launch_values(step: _Step, found: Tensor, v_cache: Tensor) -> Tensor:
    """The output: partial outputs of shares of the keys, and their sum."""
    how, taps, mix, device = step.plan.of_v, step.mixers.post_conv, step.mixers.post_mix, v_cache.device
    (batch, slots, heads), head_dim, state = found.shape, v_cache.shape[3], step.state
    kept = (None, None) if state is None else (state.logsumexp, state.lengths)
    parts = cdiv(v_cache.shape[1], how.tiles["KV_HEADS"])
    partial = empty(batch, how.programs, heads, head_dim, dtype=torch.float32, device=device)
    out = empty(batch, heads, 1, head_dim, dtype=step.logits.dtype, device=device)
    _launch(
        step, _mta_decode_values_kernel, batch * how.programs * parts, how, True,
        v_cache, step.block_table, step.logits, found, taps, step.older, mix, step.lengths, *kept, partial,
        *v_cache.stride(), *_strides(step.block_table, 2), *step.logits.stride(), *step.older.stride()[:2],
        *_strides(taps, 3), *_strides(mix, 2), step.lengths.stride(0), *_strides(kept[0], 3), *_strides(kept[1], 1),
        slots, how.programs, parts, BLOCK_SLOTS=max(16, next_power_of_2(slots)), KEEPS=state is not None,
    )  # fmt: skip
    block_d = min(32, max(16, next_power_of_2(head_dim)))
    tiles = {"BLOCK_D": block_d, "CHUNK": min(128, next_power_of_2(how.programs))}
    _launch(
        step, _mta_decode_merge_kernel, batch * heads * cdiv(head_dim, block_d),
        StepLaunch(how.programs, tiles, 4, 3, None), True, partial, out, how.programs,
    )  # fmt: skip
    return out


def _launch(step: _Step, kernel: Any, programs: int, how: StepLaunch, follows: bool, *args: Any, **own: Any) -> None:
    """Launch a kernel with the constants of the step and its own; one that `follows` another waits for it itself."""
    constants = step.constants | how.tiles | own
    launch(
        kernel, programs, step.signature, *args,
        **{name: constants[name] for name in kernel.arg_names if name.isupper()}, num_warps=how.warps,
        num_stages=how.stages, maxnreg=how.registers, launch_pdl=follows and step.constants["DEPENDENT_LAUNCH"],
    )  # fmt: skip


def _strides(x: Tensor | None, dims: int) -> tuple[int, ...]:
    return (0,) * dims if x is None else x.stride()
