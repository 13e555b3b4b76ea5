"""A case's call through the public functions, in the way that the case says."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor

from fuzz.cases import AFTER, MIXERS, STATE, FuzzCase, Parts
from fuzz.inputs import Inputs, drop_seed
from fuzz.layouts import Placed
from fuzz.poison import fresh_memory_is_nan
from mta_kernels import gpu_limits, score_chunks
from mta_kernels.conv_attention import ConvAttention, conv_attention, conv_attention_decode
from mta_kernels.multi_token_attention import (
    DecodeState,
    MultiTokenAttention,
    explain,
    multi_token_attention,
    multi_token_attention_decode,
    prefill_state,
)
from mta_kernels.multi_token_attention.mixers import Mixers
from mtabench.problem.inputs import DTYPES

BACKENDS = {"eager": "reference"}  # where a backend's name differs from its implementation's
ALIGNED = 128  # rows of which chunks of conv attention are multiples
FEW_PROGRAMS = 2  # of Triton's interpreter, each with several tiles
STALE = 1e3  # numbers of a sequence that had a place of a state before
Results = dict[str, Tensor]


class Operation(NamedTuple):
    """What is called: the public functions, or what a test has in their place."""

    attention: Callable[..., Tensor] = conv_attention
    decode: Callable[..., Tensor] = conv_attention_decode
    mta: Callable[..., Tensor] = multi_token_attention
    mta_decode: Callable[..., Tensor] = multi_token_attention_decode
    prefill: Callable[..., DecodeState] = prefill_state


PUBLIC = Operation()


class Call:
    """The arguments of a case in memory, and what calls the operation with them."""

    def __init__(
        self, inputs: Inputs, operation: Operation = PUBLIC, values: Mapping[str, Tensor] | None = None
    ) -> None:
        """With other `values` than the inputs', by name, where they are given."""
        self.case, self._operation = inputs.case, operation
        self.placed = {
            name: Placed(self._as_given(name, x), inputs.layouts[name])
            for name, x in (inputs.values | dict(values or {})).items()
        }
        self._leaves: dict[str, Tensor] = {}
        for name, placed in self.placed.items():
            wanted = name in self.case.wanted or (name == "q_history" and "q" in self.case.wanted)
            self._leaves[name] = placed.x.detach().requires_grad_(wanted)

    @property
    def tensors(self) -> dict[str, Tensor]:
        """The arguments by name."""
        return self._leaves

    def put(self, values: Mapping[str, Tensor]) -> None:
        """Other values at the same addresses."""
        for name, x in values.items():
            self.placed[name].put(self._as_given(name, x))

    def run(self, gradients: bool = True) -> Results:
        """Call it, with NaN wherever nothing was written; results are detached, and gradients are those wanted.

        Without `gradients` a plain call leaves out its backward.
        """
        with fresh_memory_is_nan():
            if self.case.way == "graph":
                return self._replayed()
            if self.case.way == "stream":
                return self._beside()
            if self.case.way == "again":
                with self._other_numbers():
                    self.run_plainly()
            return self.run_plainly(gradients)

    def keep(self) -> None:
        """Note what the arguments hold, for `changed`."""
        for placed in self.placed.values():
            placed.keep()

    def changed(self) -> list[str]:
        """Names of arguments in whose memory anything was written since `keep`."""
        flags = torch.stack([placed.changed() for placed in self.placed.values()])
        return [name for name, changed in zip(self.placed, flags.tolist(), strict=True) if changed]

    def _as_given(self, name: str, values: Tensor) -> Tensor:
        """Under autocast the caller has float32."""
        if self.case.way == "autocast" and name in ("q", "k", "v", "q_history", "weight"):
            return values.float()
        return values

    def run_plainly(self, gradients: bool = True) -> Results:
        """Call it in memory as it is."""
        case, leaves = self.case, self._leaves
        autocast = torch.autocast(case.device, DTYPES[case.dtype]) if case.way == "autocast" else nullcontext()
        with torch.set_grad_enabled(bool(case.wanted)), small_chunks(case):
            with autocast:
                out = self._out()
            found = {"out": out.detach()}
            if case.wanted and gradients:
                names = [name for name, leaf in leaves.items() if leaf.requires_grad]
                # A history that is longer than the convolution looks back may not be used at all.
                wanted = [leaves[name] for name in names]
                of_wanted = torch.autograd.grad(out, wanted, leaves["grad_out"], materialize_grads=True)
                found |= {f"d{name}": x for name, x in zip(names, of_wanted, strict=True)}
        return found

    def _out(self) -> Tensor:
        case, x, backend = self.case, self._leaves, BACKENDS.get(self.case.backend, self.case.backend)
        if case.parts is not None:
            return _call_mta(case, x, self._operation, backend)
        options: dict[str, Any] = {"scale": case.scale, "pad_key": case.pad_key, "backend": backend}
        if case.pass_ == "decode":
            options |= {"lengths": x["lengths"], "splits": case.splits}
            if "block_table" in x:
                options["block_table"] = x["block_table"]
            return self._operation.decode(x["q"], x["k"], x["v"], x["weight"], **options)
        options |= {"causal": case.causal, "head_chunk": case.head_chunk}
        optional: dict[str, Any] = {name: x[name] for name in ("q_history", "cu_seqlens") if name in x}
        if case.way == "module":
            taps = case.query_taps, case.key_taps
            module = ConvAttention(case.heads, *taps, **options, dtype=x["weight"].dtype, device=case.device)
            return torch.func.functional_call(module, {"weight": x["weight"]}, (x["q"], x["k"], x["v"]), optional)
        return self._operation.attention(x["q"], x["k"], x["v"], x["weight"], **options, **optional)

    def _beside(self) -> Results:
        """On a stream that is not the default one."""
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            found = self.run_plainly()
        torch.cuda.current_stream().wait_stream(stream)
        for x in found.values():
            x.record_stream(torch.cuda.current_stream())
        return found

    def _replayed(self) -> Results:
        """Captured with other numbers in q, k and v, which the replay must not see."""
        graph = torch.cuda.CUDAGraph()
        with self._other_numbers():
            self._beside()  # compiles and warms up
            with torch.cuda.graph(graph):
                found = self.run_plainly()
        for x in found.values():
            x.fill_(float("nan"))
        graph.replay()
        return {name: x.clone() for name, x in found.items()}

    @contextmanager
    def _other_numbers(self) -> Iterator[None]:
        """Within it q, k and v hold others at their addresses."""
        own = {name: self.placed[name].x.clone() for name in ("q", "k", "v")}
        for name, x in own.items():
            self.placed[name].put(x * -0.5)
        try:
            yield
        finally:
            for name, x in own.items():
                self.placed[name].put(x)


def _call_mta(case: FuzzCase, x: Mapping[str, Tensor], operation: Operation, backend: str) -> Tensor:
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
    return operation.mta(x["q"], x["k"], x["v"], **_named(x, (*MIXERS, *AFTER)), **options, **optional)


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
def small_chunks(case: FuzzCase) -> Iterator[None]:
    """Within it kernels store the scores of as few rows at a time as the case says, forward and backward."""
    if case.device == "cuda" and case.chunk_rows is case.chunk_bytes is None:
        yield
        return
    with ExitStack() as stack:
        stack.enter_context(patch.object(gpu_limits, "INTERPRETED_SM_COUNT", FEW_PROGRAMS))
        if case.chunk_bytes is not None:
            stack.enter_context(patch.object(score_chunks, "CHUNK_BYTES", case.chunk_bytes))
        if case.chunk_rows is not None:
            stack.enter_context(patch.object(score_chunks, "CHUNK_ROWS", case.chunk_rows))
            from mta_kernels.conv_attention.triton import backward

            rows = max(case.chunk_rows, ALIGNED)
            stack.enter_context(patch.object(backward, "CHUNK_ROWS", rows))
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


def _steps(case: FuzzCase, x: Mapping[str, Tensor], operation: Operation, options: dict[str, Any]) -> Tensor:
    """A prefill of all tokens but the last ones, and a step for each of these."""
    outputs = _decoded(case, x, operation, options, None)
    if case.replaced is not None:
        sequence, first = case.replaced
        alone, outputs = outputs, _decoded(case, x, operation, options, case.replaced)
        outputs[sequence, :, :first] = alone[sequence, :, :first]  # in its place, another one had these steps
    return outputs


def _decoded(
    case: FuzzCase, x: Mapping[str, Tensor], operation: Operation, options: dict[str, Any],
    replaced: tuple[int, int] | None,
) -> Tensor:  # fmt: skip
    """The outputs of all steps `[B, H, steps, D]`; in place of a sequence, another one has those before a step."""
    assert case.parts is not None
    optional, steps = _named(x, ("block_table",)), case.query_rows
    q, lengths = x["q"], x["lengths"]
    last = lengths.clone()
    own = lengths[:1] if lengths.stride(0) == 0 and lengths.shape[0] > 1 else lengths  # what is written, as a loop does

    def write_lengths(left: int) -> None:
        own.copy_((last - left).clamp(min=0)[: own.shape[0]])

    write_lengths(steps)
    state = _state(case, x, operation, options, 0)
    outputs = []
    for step in range(steps):
        if replaced is not None and state is not None and step in (0, replaced[1]):
            if step:
                write_lengths(steps - step)
                _put_into_place(state, replaced[0], _state(case, x, operation, options, step))
            else:
                state.lengths[replaced[0]].zero_()  # assigning a number copies from the host, which no graph can
        write_lengths(steps - 1 - step)
        if replaced is not None and step < replaced[1]:
            lengths[replaced[0]].fill_(step + 1)
        window = q[:, :, : q.shape[2] - (steps - 1 - step)]
        more = options | optional | _after(case.parts) | {"splits": case.splits, "state": state}
        mixers = _named(x, (*MIXERS, *AFTER))
        outputs.append(operation.mta_decode(window, x["k"], x["v"], lengths=lengths, **mixers, **more))
    return torch.cat(outputs, 2)


def _put_into_place(state: DecodeState, place: int, begun: DecodeState | None) -> None:
    """Another sequence into a place of a state: of one without tokens, the length alone is written."""
    assert begun is not None
    for own, new in ((state.logits, begun.logits), (state.logsumexp, begun.logsumexp), (state.lengths, begun.lengths)):
        own[place] = torch.where(begun.lengths[place] > 0, new[place], own[place]) if own.dim() > 1 else new[place]


def _state(
    case: FuzzCase, x: Mapping[str, Tensor], operation: Operation, options: dict[str, Any], step: int
) -> DecodeState | None:
    """Of the tokens before a step, laid out as the case says."""
    assert case.parts is not None
    if case.parts.post_taps[0] == 1:
        return None
    optional = _named(x, ("block_table",))
    dtype, before = DTYPES[case.dtype], x["q"].shape[2] - case.query_rows + step
    if before:
        mixers = _named(x, Mixers._fields[:3])
        numbers = {name: options[name] for name in ("scale", "pad_key")}
        q, k = x["q"][:, :, :before].to(dtype), x["k"].to(dtype)
        state = operation.prefill(q, k, lengths=x["lengths"], **mixers, **numbers, **optional)
    else:
        rows, capacity = case.parts.post_taps[0], case.seq_len
        state = DecodeState.empty(case.batch, case.heads, rows, capacity, dtype=dtype, device=case.device)
    return _behind_other_sequences(case, state)


def _behind_other_sequences(case: FuzzCase, state: DecodeState) -> DecodeState:
    """The same in memory that other sequences had: of a sequence without tokens, the length alone is written."""
    layouts, reused = dict(case.layouts), []
    for name, values in zip(STATE, (state.logits, state.logsumexp, state.lengths), strict=True):
        placed = Placed(torch.full_like(values, STALE), layouts.get(name, "contiguous"))
        is_new = torch.ones_like(state.lengths, dtype=torch.bool) if name == STATE[2] else state.lengths > 0
        where = is_new.view(-1, *[1] * (values.dim() - 1))
        placed.put(torch.where(where, values, placed.x))
        reused.append(placed.x)
    return DecodeState(*reused)
