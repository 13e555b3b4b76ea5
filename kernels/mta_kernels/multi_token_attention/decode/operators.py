"""A decode step as a `torch.library` operator, which takes its backend by name and updates the state in place."""

from __future__ import annotations

from torch import Tensor

from mta_kernels import flop_formulas
from mta_kernels.backend import Backend
from mta_kernels.multi_token_attention.arguments import NormGate
from mta_kernels.multi_token_attention.backends import MULTI_TOKEN_ATTENTION as BACKENDS
from mta_kernels.multi_token_attention.decode.state import DecodeState
from mta_kernels.multi_token_attention.mixers import Mixers, operation_by_numbers
from mta_kernels.multi_token_attention.operators import numbers_of
from mta_kernels.operation import Operation
from mta_kernels.operator_gradients import (
    check_no_tangents_in_kernels,
    check_not_mapped,
    define,
    like_newest_row,
    register_kernel,
)


def decode_op(
    operation: Operation, q_window: Tensor, k_cache: Tensor, v_cache: Tensor, mixers: Mixers, after: NormGate,
    lengths: Tensor, state: DecodeState | None, block_table: Tensor | None, *, splits: int, backend: Backend,
) -> Tensor:  # fmt: skip
    """The newest row by the kernels of a backend, for checked arguments with dense mixings; splits 0 is "auto".

    Raises RuntimeError for dual tensors, and within torch.func.vmap.
    """
    _, scale, *pads, _, _ = numbers_of(operation)
    kept = (None, None, None) if state is None else (state.logits, state.logsumexp, state.lengths)
    tensors = q_window, k_cache, v_cache, *mixers, *kept, *after.tensors.values()
    check_no_tangents_in_kernels("multi_token_attention_decode", backend.name, *tensors)
    check_not_mapped(f"multi_token_attention_decode through backend {backend.name!r}", *tensors, lengths, block_table)
    return DECODE(*tensors, lengths, block_table, after.norm_eps, after.depth, scale, *pads, splits, backend.name)


DECODE = define(
    "multi_token_attention_decode",
    "(Tensor q_window, Tensor k_cache, Tensor v_cache, Tensor? pre_conv, Tensor? pre_mix, Tensor? post_conv, "
    "Tensor? post_mix, Tensor(a!)? logits, Tensor(b!)? logsumexp, Tensor(c!)? seen, Tensor? norm_weight, "
    "Tensor? gate_weight, Tensor? gate_bias, Tensor lengths, Tensor? block_table, float norm_eps, int? depth, "
    "float scale, int pre_pad, int post_pad, int splits, str backend) -> Tensor",
    like_newest_row,
)
flop_formulas.count_flops(flop_formulas.multi_token_attention_decode)


def _decode(
    q_window: Tensor, k_cache: Tensor, v_cache: Tensor, pre_conv: Tensor | None, pre_mix: Tensor | None,
    post_conv: Tensor | None, post_mix: Tensor | None, logits: Tensor | None, logsumexp: Tensor | None,
    seen: Tensor | None, norm_weight: Tensor | None, gate_weight: Tensor | None, gate_bias: Tensor | None,
    lengths: Tensor, block_table: Tensor | None, norm_eps: float, depth: int | None, scale: float, pre_pad: int,
    post_pad: int, splits: int, backend: str,
) -> Tensor:  # fmt: skip
    decode = BACKENDS.part(backend, "decode")
    mixers = Mixers(pre_conv, pre_mix, post_conv, post_mix)
    operation = operation_by_numbers(mixers, True, scale, pre_pad, post_pad)
    state = None
    if logits is not None and logsumexp is not None and seen is not None:
        state = DecodeState(logits, logsumexp, seen)
    after = NormGate(norm_weight, norm_eps, depth, gate_weight, gate_bias)
    return decode(
        operation, q_window, k_cache, v_cache, mixers, after, lengths, state, block_table, splits or "auto"
    )  # fmt: skip


register_kernel(DECODE, _decode)
