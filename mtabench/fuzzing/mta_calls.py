"""A case's call of the whole multi-token attention: as a function, as a module, or as steps of a decode."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor

from mta_kernels import gpu_limits, score_chunks
from mta_kernels.multi_token_attention import (
    DecodeState,
    MultiTokenAttention,
    explain,
    multi_token_attention,
    multi_token_attention_decode,
    prefill_state,
)
from mta_kernels.multi_token_attention.mixers import Mixers
from mtabench.fuzzing.cases import FuzzCase, Parts
from mtabench.fuzzing.layouts import Placed
from mtabench.fuzzing.mta_cases import AFTER, MIXERS, STATE
from mtabench.fuzzing.mta_inputs import drop_seed
from mtabench.problem.inputs import DTYPES

FEW_PROGRAMS = 2  # of Triton's interpreter, each with several tiles


class MtaOperation(NamedTuple):
    """What is called: the public functions, or what a test has in their place."""

    attention: Callable[..., Tensor] = multi_token_attention
    decode: Callable[..., Tensor] = multi_token_attention_decode
    prefill: Callable[..., DecodeState] = prefill_state


def call_mta(case: FuzzCase, x: Mapping[str, Tensor], operation: MtaOperation, backend: str) -> Tensor:
    """The output of a case's tensors by name; of a decode `[B, H, steps, D]`."""
    assert case.parts is not None
    options: dict[str, Any] = {"scale": case.scale, "pad_key": case.pad_key, "backend": backend}
    if case.pass_ == "decode":
        return _steps(case, x, operation, options)
    options["causal"] = case.causal
    optional: dict[str, Any] = {name: x[name] for name in ("q_history", "cu_seqlens") if name in x}
    if case.parts.dropout:
        optional["seed"] = drop_seed(case)
    if case.way == "module":
        module, parameters = _as_module(case, case.parts, x, options)
        return torch.func.functional_call(module, parameters, (x["q"], x["k"], x["v"]), optional)
    options |= _after(case.parts) | {"dropout": case.parts.dropout}
    return operation.attention(x["q"], x["k"], x["v"], **_named(x, (*MIXERS, *AFTER)), **options, **optional)


def backend_of(case: FuzzCase, x: Mapping[str, Tensor], backend: str) -> str:
    """The backend that `explain` says that a call takes; raises ValueError where it says that none can."""
    assert case.parts is not None
    decode = case.pass_ == "decode"
    options: dict[str, Any] = {"decode": True} if decode else {"causal": case.causal, "dropout": case.parts.dropout}
    options |= _named(x, MIXERS if decode else (*MIXERS, "cu_seqlens"))
    autocast = torch.autocast(case.device, DTYPES[case.dtype], enabled=case.way == "autocast")
    with autocast, torch.set_grad_enabled(bool(case.wanted)):
        return explain(x["q"], x["k"], x["v"], **options, backend=backend).backend


def _named(x: Mapping[str, Tensor], names: tuple[str, ...]) -> dict[str, Tensor]:
    return {name: x[name] for name in names if name in x}


def _after(parts: Parts) -> dict[str, Any]:
    return {"depth": parts.depth} | ({} if parts.norm_eps is None else {"norm_eps": parts.norm_eps})


@contextmanager
def chunk_rows(case: FuzzCase) -> Iterator[None]:
    """Within it kernels store the scores of as few rows at a time as the case says, forward and backward."""
    if case.parts is None:
        yield
        return
    rows = case.parts.chunk_rows or score_chunks.CHUNK_ROWS
    with patch.object(score_chunks, "CHUNK_ROWS", rows), patch.object(gpu_limits, "INTERPRETED_SM_COUNT", FEW_PROGRAMS):
        yield


def _as_module(
    case: FuzzCase, parts: Parts, x: Mapping[str, Tensor], options: dict[str, Any]
) -> tuple[MultiTokenAttention, dict[str, Tensor]]:
    """The module of a case, and its parameters, made of the tensors, by name."""
    groups = len(parts.post_mix) == 3
    module = MultiTokenAttention(
        case.heads, case.head_dim, pre_conv=(case.query_taps, case.key_taps) if parts.pre_conv else None,
        pre_mix=bool(parts.pre_mix), post_conv=parts.post_conv,
        post_mix=parts.post_mix[-1] if groups else "linear" if parts.post_mix else False,
        norm=parts.norm_eps is not None, depth=parts.depth,
        gate=("full" if parts.gate[0] > 1 else True) if parts.gate else False, dropout=parts.dropout,
        dtype=DTYPES[case.dtype], device=case.device, **options,
    )  # fmt: skip
    names = {
        "pre_mix": "wpsm.weight", "norm_weight": "subln.weight", "gate_weight": "gate.weight", "gate_bias": "gate.bias",
    }  # fmt: skip
    parameters = {own: x[name] for name, own in names.items() if name in x}
    for name, own in (("pre_conv", "mta_kernel"), ("post_conv", "mta_kernel_after_sm")):
        if name in x:
            parameters[own] = x[name][:, None]
    if "post_mix" in x:
        parameters |= {"head_kernel": x["post_mix"]} if groups else {"wposm.weight": x["post_mix"].t()}
    return module, parameters


def _steps(case: FuzzCase, x: Mapping[str, Tensor], operation: MtaOperation, options: dict[str, Any]) -> Tensor:
    """A prefill of all tokens but the last ones, and a step for each of these."""
    assert case.parts is not None
    optional, steps = _named(x, ("block_table",)), case.query_rows
    q, lengths = x["q"], x["lengths"]
    last = lengths.clone()
    own = lengths[:1] if lengths.stride(0) == 0 and lengths.shape[0] > 1 else lengths  # what is written, as a loop does
    own.copy_((last - steps).clamp(min=0)[: own.shape[0]])
    state = _state(case, x, operation, options, optional)
    outputs = []
    for step in range(steps):
        own.copy_((last - (steps - 1 - step)).clamp(min=0)[: own.shape[0]])
        window = q[:, :, : q.shape[2] - (steps - 1 - step)]
        more = options | optional | _after(case.parts) | {"splits": case.splits, "state": state}
        mixers = _named(x, (*MIXERS, *AFTER))
        outputs.append(operation.decode(window, x["k"], x["v"], lengths=lengths, **mixers, **more))
    return torch.cat(outputs, 2)


def _state(
    case: FuzzCase, x: Mapping[str, Tensor], operation: MtaOperation, options: dict[str, Any], optional: dict[str, Any]
) -> DecodeState | None:
    """Of the tokens before the first step, laid out as the case says."""
    assert case.parts is not None
    if case.parts.post_taps[0] == 1:
        return None
    dtype, before = DTYPES[case.dtype], x["q"].shape[2] - case.query_rows
    if before:
        mixers = _named(x, Mixers._fields[:3])
        numbers = {name: options[name] for name in ("scale", "pad_key")}
        q, k = x["q"][:, :, :before].to(dtype), x["k"].to(dtype)
        state = operation.prefill(q, k, lengths=x["lengths"], **mixers, **numbers, **optional)
    else:
        rows, capacity = case.parts.post_taps[0], case.seq_len
        state = DecodeState.empty(case.batch, case.heads, rows, capacity, dtype=dtype, device=case.device)
    layouts = dict(case.layouts)
    tensors = zip(STATE, (state.logits, state.logsumexp, state.lengths), strict=True)
    return DecodeState(*(Placed(values, layouts.get(name, "contiguous")).x for name, values in tensors))
