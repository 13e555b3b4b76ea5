"""The float64 result of a problem on a bounded sample, and how far from it a right result may lie.

Eager PyTorch in the case's dtype sets three bounds on the same sample. One bounds the error of the whole sample. One
bounds the error of its worst row, since a norm over thousands hides a fault in one. One bounds the result's size, since
rounding errors of thousands of numbers hide that all are 1 % too large.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from mta_kernels.conv_attention import conv_attention_decode_reference, conv_attention_reference
from mta_kernels.multi_token_attention import multi_token_attention_reference
from mta_ladder import attention_reference
from mtabench.checking.sample import CONVOLUTIONS, backward_sample, decode_sample, forward_sample
from mtabench.implementations._calls import mta_call
from mtabench.problem.case import Case
from mtabench.problem.inputs import DTYPES, FINISHERS, MIXERS, SEED, Inputs
from mtabench.prose import plural

NORM_FACTOR, ROW_FACTOR = 2, 4
NEIGHBOURS = 8
# Independent errors of n numbers change the size of the whole by their norm / sqrt(n), one sigma. Of their norm one
# sigma is 1 / sqrt(2 n).
SIGMAS = 6
SIZE_SHARE = 1 / 4  # of the tolerance, what errors that do know of each other may change
LEAST_SIZE_TOLERANCE = 2e-3
LEAST_RUN = 128 * 128  # scores that one SM adds up before using another pays
TINY = torch.finfo(torch.float64).tiny ** 0.5
GRADIENTS = {name: f"d{name}" for name in ("q", "k", "v", *MIXERS)}


MIXER_GRADIENTS = tuple(GRADIENTS[name] for name in MIXERS)


@dataclass(frozen=True, slots=True)
class Check:
    """Whether a result is right. `rel_error` is the largest of its parts, None if it is unknown."""

    ok: bool
    rel_error: float | None
    tolerance: float
    reason: str = ""


class Errors(NamedTuple):
    """Relative errors of a sample: of its norm, of its worst row, and how much too large it is along the right one."""

    norm: float
    row: float
    size: float


@dataclass(slots=True)
class Bound:
    """What one tensor is held to: float64 values `[rows, D]` of its parts, and how to pick them from a result.

    Errors are relative to the norm: of the whole sample, and of a row, as `row_errors` says; or to `least`, if that is
    more.
    """

    picks: list[Callable[[Tensor], Tensor]] = field(default_factory=list)
    values: list[Tensor] = field(default_factory=list)
    eager: list[Tensor] = field(default_factory=list)
    tolerance: float = 0.0
    row_tolerance: float = 0.0
    size_tolerance: float = 0.0
    least: float = 0.0

    def add(self, pick: Callable[[Tensor], Tensor], value: Tensor, eager: Tensor) -> None:
        """One more part, `value` and `eager` of any shape `[.., D]`."""
        self.picks.append(pick)
        self.values.append(value.detach().flatten(0, -2))
        self.eager.append(eager.detach().flatten(0, -2))

    @property
    def numbers(self) -> int:
        """Numbers of all parts."""
        return sum(value.numel() for value in self.values)

    def close(self, floor: float, *, rows_alike: bool) -> None:
        """All parts are there: set the tolerances by eager's errors, which are needed no longer.

        `rows_alike`: the numbers of a row share errors, as rows of q, k, v and out do by their probabilities.
        """
        eager = self._errors(self.eager)
        independent = max(1, sum(value.shape[0] for value in self.values) if rows_alike else self.numbers)
        # Of few rows eager may have most right by luck.
        self.tolerance = max(max(NORM_FACTOR, 1 + SIGMAS / math.sqrt(2 * independent)) * eager.norm, floor)
        # A row's error scatters more than the error of all rows: of some thousand draws, eager's worst may be small.
        self.row_tolerance = max(ROW_FACTOR * eager.row, 2 * self.tolerance)
        chance = SIGMAS / math.sqrt(independent)
        share = min(1.0, max(SIZE_SHARE, chance))
        self.size_tolerance = max(NORM_FACTOR * abs(eager.size), share * self.tolerance, LEAST_SIZE_TOLERANCE)
        self.eager = []

    def rest(self) -> None:
        """Keep the values in the host's memory, where they take none of a GPU's from what is timed."""
        self.values = [value.cpu() for value in self.values]

    def errors(self, result: Tensor, signs: Tensor | int = 1) -> Errors:
        """How far the sample of a result is from what it should be, its columns being multiplied by 1 or -1."""
        return self._errors(signs * pick(result.detach()) for pick in self.picks)

    def _errors(self, parts: Iterable[Tensor]) -> Errors:
        norms, differences, along = [], [], 0.0
        for part, value in zip(parts, self.values, strict=True):
            value = value.to(part.device)
            difference = part.double() - value
            norms.append(value.norm(dim=-1))
            differences.append(difference.norm(dim=-1))
            along += (difference * value).sum().item()
        norm, difference = torch.cat(norms), torch.cat(differences)
        whole = norm.norm().clamp(min=max(self.least, TINY)).item()
        rows = row_errors(difference, norm, self.least)
        return Errors(difference.norm().item() / whole, rows.max().item(), along / whole**2)


def row_errors(differences: Tensor, norms: Tensor, least: float = 0.0) -> Tensor:
    """The errors of rows `[R]` relative to their norms, which follow each other in a result.

    Gradients of single rows can vanish by cancellation. So an error is relative to the largest of its neighbours' norms
    and the typical norm, or `least`.
    """
    scale = F.max_pool1d(norms[None], 2 * NEIGHBOURS + 1, stride=1, padding=NEIGHBOURS)[0]
    return differences / scale.clamp(min=max(norms.square().mean().sqrt().item(), least, TINY))


class Oracle:
    """Judges results of one problem: one shape, convolution, dtype and pass, whatever the implementation.

    Time and memory are bounded by the sample, which is drawn from `seed` (`mtabench.checking.sample`).
    """

    def __init__(self, case: Case, inputs: Inputs, seed: int = SEED) -> None:
        self._case, self._inputs = case, inputs
        collect = {"fwd": _forward, "decode": _decode, "bwd": _backward}[case.pass_]
        self._bounds = collect(case, inputs, seed)
        floor = tolerance_floor(DTYPES[case.dtype])
        for name, bound in self._bounds.items():
            if name in MIXER_GRADIENTS:
                # Few numbers, which eager may have right by luck: allowed is what those have that it is made of.
                floor = max(sum_floor(case, bound.numbers), *(other.tolerance for other in self._bounds.values()))
            bound.close(floor, rows_alike=name not in MIXER_GRADIENTS)

    @property
    def tolerance(self) -> float:
        """The relative error allowed; each gradient has its own, and this is the largest."""
        return max(bound.tolerance for bound in self._bounds.values())

    @property
    def row_tolerances(self) -> dict[str, float]:
        """The relative error allowed to a row of each result, by its name."""
        return {name: bound.row_tolerance for name, bound in self._bounds.items()}

    def rest(self) -> None:
        """Keep what results are compared with in the host's memory, until the next check."""
        for bound in self._bounds.values():
            bound.rest()

    def fault(self, results: Sequence[Tensor]) -> str:
        """Why results cannot be compared at all (number, shape, dtype, device, NaN, infinity), or an empty text."""
        if len(results) != len(self._bounds):
            return f"it gives {plural(len(results), 'result')}; expected {', '.join(self._bounds)}"
        named = zip(self._bounds, results, strict=True)
        return next(filter(None, (self._fault(name, tensor) for name, tensor in named)), "")

    def check(
        self, result: Tensor | Sequence[Tensor], signs: Mapping[str, Tensor | int] = MappingProxyType({})
    ) -> Check:
        """Judge an output `[B, Hq, N, D]` (decode `[B, Hq, 1, D]`), or the gradients of q, k, v and the mixers.

        `signs` are factors 1 and -1 of columns, or of all, of some results by name, which `Inputs.flip` makes.
        """
        tensors = listed(result)
        fault = self.fault(tensors)
        if fault:
            return Check(False, None, self.tolerance, fault)
        named = dict(zip(self._bounds, tensors, strict=True))
        errors = {name: bound.errors(named[name], signs.get(name, 1)) for name, bound in self._bounds.items()}
        largest = max(error.norm for error in errors.values())
        for name, error in errors.items():
            reason = _beyond(name, error, self._bounds[name])
            if reason:
                return Check(False, largest, self._bounds[name].tolerance, reason)
        operation = self._case.operation
        after_softmax = operation.post_conv, operation.post_mix, operation.norm, operation.gate
        if "out" in named and not any(after_softmax):
            slack = self._bounds["out"].row_tolerance
            outside = outside_values(named["out"].detach(), self._inputs.v.detach(), slack)
            if outside.any():
                reason = f"out leaves the range of v, of which it is an average, first at {_first(outside)}"
                return Check(False, largest, self.tolerance, reason)
        return Check(True, largest, self.tolerance)

    def _fault(self, name: str, tensor: Tensor) -> str:
        """Why a tensor cannot be compared at all, or an empty text."""
        shape, dtype = self._shape(name), DTYPES[self._case.dtype]
        if tensor.shape != shape or tensor.dtype != dtype:
            return f"{name} is {tensor.dtype} {list(tensor.shape)}; expected {dtype} {list(shape)}"
        if tensor.device != self._inputs.q.device:
            return f"{name} is on {tensor.device}; expected {self._inputs.q.device}, where the inputs are"
        strange = ~torch.isfinite(tensor)
        return f"{name} has NaN or infinity, first at {_first(strange)}" if strange.any() else ""

    def _shape(self, name: str) -> torch.Size:
        if name == "out":
            batch, heads, rows, head_dim = self._inputs.q.shape
            return torch.Size((batch, heads, 1 if self._case.pass_ == "decode" else rows, head_dim))
        return next(self._inputs.differentiable[k].shape for k, v in GRADIENTS.items() if v == name)


def each(result: Tensor | Sequence[Tensor]) -> Sequence[Tensor]:
    """An output, or gradients, as they are."""
    return [result] if isinstance(result, Tensor) else result


def listed(result: Tensor | Sequence[Tensor]) -> list[Tensor]:
    """An output or gradients as a list, of tensors without graphs."""
    return [tensor.detach() for tensor in each(result)]


def _beyond(name: str, error: Errors, bound: Bound) -> str:
    """Which bound an error is beyond, or an empty text."""
    if not error.norm <= bound.tolerance:
        reason = f"{name} is off by {error.norm:.2g} of its norm against float64; allowed is {bound.tolerance:.2g}"
        return f"{reason}, by what eager is off"
    if not error.row <= bound.row_tolerance:
        reason = f"a row of {name} is off by {error.row:.2g} of its norm against float64"
        return f"{reason}; allowed is {bound.row_tolerance:.2g}"
    if not abs(error.size) <= bound.size_tolerance:
        much = f"{100 * abs(error.size):.2g} % too {'large' if error.size > 0 else 'small'}"
        return f"{name} is {much} all over against float64; allowed is {100 * bound.size_tolerance:.2g} %"
    return ""


def _first(where: Tensor) -> list[int]:
    return where.nonzero()[0].tolist()


def tolerance_floor(dtype: torch.dtype) -> float:
    """The relative error allowed even where eager is exact: the rounding of the output, or of a few float32 sums."""
    return max(torch.finfo(dtype).eps / 2, 8 * torch.finfo(torch.float32).eps)


def sum_floor(case: Case, numbers: int) -> float:
    """The relative error allowed to a mixer's gradient of so many numbers, sums of all scores in float32.

    Rounding each of n partial sums of terms of random signs leaves about u sqrt(n / 2) of the sum (Higham and Mary, "A
    new approach to probabilistic rounding error analysis", 2019). On a CPU eager adds all terms one by one. A GPU does
    so within each of its SMs at most, whose sums' errors are as independent as their terms. So the whole's error is as
    if n were the terms of one. The sample's eager does not show this: its blocks of rows are added up in float64, which
    is sqrt(blocks) times as exact as one sum. Nor do few numbers, whose errors are small by luck. Allowed is
    NORM_FACTOR of the expected error, or SIGMAS of its norm's spread.
    """
    terms = case.batch * case.seq**2 / (2 if case.operation.causal else 1)
    run = terms
    if case.device == "cuda":
        run = max(terms / torch.cuda.get_device_properties("cuda").multi_processor_count, min(terms, LEAST_RUN))
    factor = max(NORM_FACTOR, 1 + SIGMAS / math.sqrt(2 * numbers))
    return factor * torch.finfo(torch.float32).eps / 2 * math.sqrt(run / 2)


def outside_values(out: Tensor, v: Tensor, slack: float) -> Tensor:
    """Where `out [B, Hq, M, D]` is no average of the rows of `v [B, Hkv, N, D]`, with `slack` relative to v."""
    low, high = v.amin(2, keepdim=True), v.amax(2, keepdim=True)
    margin = slack * max(low.abs().max().item(), high.abs().max().item())
    low, high = (x.repeat_interleave(out.shape[1] // v.shape[1], dim=1) for x in (low, high))
    return (out < low - margin) | (out > high + margin)


def finished(case: Case, inputs: Inputs, out: Tensor) -> Tensor:
    """What norm and gate of the case make of `out [B, Hq, M, D]`, in its dtype; the same where it has neither.

    Each row of `out` is the value of a sequence of one token, whose attention is that value.
    """
    after: dict[str, Any] = {name: x.to(out.dtype) for name, x in inputs.mixers.items() if name in FINISHERS}
    if case.operation.norm:
        after["depth"] = case.operation.norm.depth
    values = out.transpose(1, 2).flatten(0, 1)[:, :, None]
    query = torch.zeros_like(values)
    rows = multi_token_attention_reference(query, query, values, **after)
    return rows[:, :, 0].unflatten(0, (out.shape[0], -1)).transpose(1, 2)


def _forward(case: Case, inputs: Inputs, seed: int) -> dict[str, Bound]:
    bound = Bound()
    for sample in forward_sample(case, seed):
        for heads in sample.chunks:
            exact, eager = (heads.gather(inputs, dtype) for dtype in (torch.float64, DTYPES[case.dtype]))
            for rows in sample.blocks:
                bound.add(heads.picker("q", rows), _output(case, exact, rows), _output(case, eager, rows))
    return {"out": bound}


def _decode(case: Case, inputs: Inputs, seed: int) -> dict[str, Bound]:
    bound = Bound()
    for heads in decode_sample(case, seed).chunks:
        exact, eager = (
            _decode_output(case, heads.gather(inputs, dtype)) for dtype in (torch.float64, DTYPES[case.dtype])
        )
        bound.add(heads.picker("q", None), exact, eager)
    return {"out": bound}


def _backward(case: Case, inputs: Inputs, seed: int) -> dict[str, Bound]:
    """Gradients of the sampled heads by all rows; the mixers' gradients are summed over the sequences."""
    sample = backward_sample(case, seed)
    bounds = {GRADIENTS[name]: Bound() for name in inputs.differentiable}
    exact_sums, eager_sums = (
        {name: torch.zeros_like(x, dtype=torch.float64) for name, x in inputs.mixers.items()} for _ in range(2)
    )
    squares = 0.0
    for heads in sample.chunks:
        exact, eager = (
            _gradients(case, heads.gather(inputs, dtype), sample.blocks)
            for dtype in (torch.float64, DTYPES[case.dtype])
        )
        squares += _bias_terms(case, heads.gather(inputs, torch.float64), sample.blocks)
        for name in ("q", "k", "v"):
            bounds[GRADIENTS[name]].add(heads.picker(name, None), exact[name], eager[name])
        for sums, gradients in ((exact_sums, exact), (eager_sums, eager)):
            for name, total in sums.items():
                if name in CONVOLUTIONS:
                    total.index_add_(0, heads.query_heads.flatten(), gradients[name])
                else:
                    total += gradients[name]
    kept = torch.cat([heads.query_heads.flatten() for heads in sample.chunks]).unique()
    for name, total in exact_sums.items():
        pick = (lambda gradient: gradient[kept].flatten(1)) if name in CONVOLUTIONS else _mixing_rows
        bounds[GRADIENTS[name]].add(pick, pick(total), pick(eager_sums[name]))
    if "gate_bias" in exact_sums:
        bounds[GRADIENTS["gate_bias"]].least = math.sqrt(squares)
    return bounds


def _bias_terms(case: Case, x: Inputs, blocks: Iterable[tuple[int, int]]) -> float:
    """The sum of the squares of what a gate's bias has its gradient of, which is one sum and may cancel by chance."""
    if case.operation.gate is None or x.dout is None:
        return 0.0
    ungated = replace(case, operation=replace(case.operation, gate=None))
    weight, bias, total = x.gate_weight, x.gate_bias, 0.0
    assert weight is not None
    for start, stop in blocks:
        out = _output(ungated, replace(x, gate_weight=None, gate_bias=None), (start, stop))
        gate = torch.sigmoid(F.linear(out, weight, bias))
        terms = x.dout[:, :, start:stop] * out * gate * (1 - gate)
        total += (terms if case.operation.gate.full else terms.sum(-1)).square().sum().item()
    return total


def _mixing_rows(gradient: Tensor) -> Tensor:
    """The gradient of a mixing, of all heads at once or of groups, of a gate or of a norm, as rows."""
    return gradient[None] if gradient.dim() == 1 else gradient.flatten(0, -2)


def _gradients(case: Case, x: Inputs, blocks: Iterable[tuple[int, int]]) -> dict[str, Tensor]:
    """Gradients of gathered inputs by name, accumulated in float64 a block of rows at a time."""
    assert x.dout is not None
    leaves = {name: tensor.requires_grad_() for name, tensor in x.differentiable.items()}
    totals = {name: torch.zeros_like(tensor, dtype=torch.float64) for name, tensor in leaves.items()}
    for start, stop in blocks:
        with torch.enable_grad():
            out = _output(case, x, (start, stop))
        gradients = torch.autograd.grad(out, list(leaves.values()), x.dout[:, :, start:stop])
        for total, gradient in zip(totals.values(), gradients, strict=True):
            total += gradient
    return totals


def _output(case: Case, x: Inputs, rows: tuple[int, int]) -> Tensor:
    """Those rows of the output; a causal row needs nothing of what comes after it."""
    start, stop = rows
    end = stop if case.operation.causal else x.q.shape[2]
    q, k, v = (tensor[:, :, :end] for tensor in (x.q, x.k, x.v))
    if case.op == "mta":
        ended = replace(x, k=k, v=v)
        return mta_call(multi_token_attention_reference, ended, q, rows=rows, **case.operation.options)()
    if x.weight is None:
        return attention_reference(q[:, :, start:stop], k, v, **case.operation.options)
    return conv_attention_reference(q, k, v, x.weight, **case.operation.options, rows=rows)


def _decode_output(case: Case, x: Inputs) -> Tensor:
    if case.op == "mta":  # from the queries before the newest, not from a state
        q, history = x.q[:, :, -1:], x.q[:, :, :-1] if x.q.shape[2] > 1 else None
        return mta_call(multi_token_attention_reference, x, q, q_history=history, **case.operation.options)()
    if x.weight is None:
        return attention_reference(x.q[:, :, -1:], x.k, x.v, causal=False, **case.operation.decode_options)
    assert x.lengths is not None
    # All sequences of a case have the same length, so that heads of several can stand for heads of one.
    return conv_attention_decode_reference(
        x.q, x.k, x.v, x.weight, lengths=x.lengths[:1], **case.operation.decode_options
    )
