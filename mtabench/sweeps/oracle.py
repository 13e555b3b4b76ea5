"""The float64 result of a problem on a bounded sample, and how far from it a right result may lie.

Two bounds, both set by what eager PyTorch in the case's dtype does on the same sample: for the error of the whole
sample, and for that of its worst row, since a fault in one row hides in a norm over thousands.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from mta_kernels.attention import attention_reference
from mta_kernels.conv_attention import conv_attention_decode_reference, conv_attention_reference
from mtabench.measuring.sample import backward_sample, decode_sample, forward_sample
from mtabench.sweeps.case import Case
from mtabench.sweeps.inputs import DTYPES, Inputs

NORM_FACTOR, ROW_FACTOR = 2, 4
NEIGHBOURS = 8
GRADIENTS = {"q": "dq", "k": "dk", "v": "dv", "weight": "dweight"}


@dataclass(frozen=True, slots=True)
class Check:
    """Whether a result is right. `rel_error` is the largest of its parts, None if it could not be told."""

    ok: bool
    rel_error: float | None
    tolerance: float
    reason: str = ""


@dataclass(slots=True)
class Bound:
    """What one tensor is held to: float64 values `[rows, D]` of its parts, and how to pick them from a result.

    Errors are relative to the norm: of the whole sample, and of a row. Gradients of single rows can vanish by
    cancellation, so a row's error is set against the largest of its neighbours' norms and the typical norm.
    """

    picks: list[Callable[[Tensor], Tensor]] = field(default_factory=list)
    values: list[Tensor] = field(default_factory=list)
    eager: list[Tensor] = field(default_factory=list)
    tolerance: float = 0.0
    row_tolerance: float = 0.0

    def add(self, pick: Callable[[Tensor], Tensor], value: Tensor, eager: Tensor) -> None:
        """One more part, `value` and `eager` of any shape `[.., D]`."""
        self.picks.append(pick)
        self.values.append(value.detach().flatten(0, -2))
        self.eager.append(eager.detach().flatten(0, -2))

    def close(self, floor: float) -> None:
        """All parts are there: set the tolerances by eager's errors, which are needed no longer."""
        error, row_error = self._errors(self.eager)
        self.tolerance = max(NORM_FACTOR * error, floor)
        self.row_tolerance = max(ROW_FACTOR * row_error, self.tolerance)
        self.eager = []

    def errors(self, result: Tensor) -> tuple[float, float]:
        """Relative error of a result's sample, and of its worst row."""
        return self._errors(pick(result.detach()) for pick in self.picks)

    def _errors(self, parts: Iterable[Tensor]) -> tuple[float, float]:
        norms = torch.cat([value.norm(dim=-1) for value in self.values])
        differences = torch.cat(
            [(part.double() - value).norm(dim=-1) for part, value in zip(parts, self.values, strict=True)]
        )
        tiny = torch.finfo(torch.float64).tiny
        scale = F.max_pool1d(norms[None], 2 * NEIGHBOURS + 1, stride=1, padding=NEIGHBOURS)[0]
        rows = differences / scale.clamp(min=max(norms.square().mean().sqrt().item(), tiny))
        return (differences.norm() / norms.norm().clamp(min=tiny)).item(), rows.max().item()


class Oracle:
    """Judges results of one problem: one shape, convolution, dtype and pass, whatever the implementation.

    Time and memory are bounded by the sample (`mtabench.measuring.sample`).
    """

    def __init__(self, case: Case, inputs: Inputs) -> None:
        self._case, self._inputs = case, inputs
        collect = {"fwd": _forward, "decode": _decode, "bwd": _backward}[case.pass_]
        self._bounds = collect(case, inputs)
        floor = tolerance_floor(DTYPES[case.dtype])
        for name, bound in self._bounds.items():
            if name == "dweight":
                # Few numbers, which eager may have right by luck: allowed is what those have that it is made of.
                floor = max(_sum_floor(case), *(other.tolerance for other in self._bounds.values()))
            bound.close(floor)

    @property
    def tolerance(self) -> float:
        """The relative error allowed; each gradient has its own, and this is the largest."""
        return max(bound.tolerance for bound in self._bounds.values())

    def check(self, result: Tensor | Sequence[Tensor]) -> Check:
        """Judge an output `[B, Hq, N, D]` (decode `[B, Hq, 1, D]`), or the gradients (dq, dk, dv, dweight)."""
        tensors = [result] if isinstance(result, Tensor) else list(result)
        if len(tensors) != len(self._bounds):
            return self._wrong(f"there are {len(tensors)} results; expected {', '.join(self._bounds)}")
        named = dict(zip(self._bounds, tensors, strict=True))
        for name, tensor in named.items():
            fault = self._fault(name, tensor)
            if fault:
                return self._wrong(fault)
        errors = {name: bound.errors(named[name]) for name, bound in self._bounds.items()}
        largest = max(error for error, _ in errors.values())
        for name, (error, row_error) in errors.items():
            bound = self._bounds[name]
            if not error <= bound.tolerance:
                reason = f"{name} is off by {error:.2g} of its norm against float64; allowed is {bound.tolerance:.2g}"
                return Check(False, largest, bound.tolerance, f"{reason}, twice what eager is off")
            if not row_error <= bound.row_tolerance:
                reason = f"a row of {name} is off by {row_error:.2g} of its norm against float64"
                return Check(False, largest, bound.tolerance, f"{reason}; allowed is {bound.row_tolerance:.2g}")
        if "out" in named:
            slack = self._bounds["out"].row_tolerance
            outside = outside_values(named["out"].detach(), self._inputs.v.detach(), slack)
            if outside.any():
                reason = f"out leaves the range of v, of which it is an average, first at {_first(outside)}"
                return Check(False, largest, self.tolerance, reason)
        return Check(True, largest, self.tolerance)

    def _wrong(self, reason: str) -> Check:
        return Check(False, None, self.tolerance, reason)

    def _fault(self, name: str, tensor: Tensor) -> str:
        """Why a tensor cannot be compared at all, or an empty text."""
        shape, dtype = self._shape(name), DTYPES[self._case.dtype]
        if tensor.shape != shape or tensor.dtype != dtype:
            return f"{name} is {tensor.dtype} {list(tensor.shape)}; expected {dtype} {list(shape)}"
        strange = ~torch.isfinite(tensor)
        return f"{name} has NaN or infinity, first at {_first(strange)}" if strange.any() else ""

    def _shape(self, name: str) -> torch.Size:
        if name == "out":
            batch, heads, rows, head_dim = self._inputs.q.shape
            return torch.Size((batch, heads, 1 if self._case.pass_ == "decode" else rows, head_dim))
        return next(self._inputs.differentiable[k].shape for k, v in GRADIENTS.items() if v == name)


def _first(where: Tensor) -> list[int]:
    return where.nonzero()[0].tolist()


def tolerance_floor(dtype: torch.dtype) -> float:
    """The relative error allowed even where eager is exact: the rounding of the output, or of a few float32 sums."""
    return max(torch.finfo(dtype).eps / 2, 8 * torch.finfo(torch.float32).eps)


def _sum_floor(case: Case) -> float:
    """The relative error allowed to the weight's gradient on a CPU, whose eager adds all scores in one float32 sum.

    Rounding each of n partial sums of terms of random signs leaves about u sqrt(n / 2) of the sum (Higham and Mary,
    "A new approach to probabilistic rounding error analysis", 2019): more than eager shows on few heads, whose order
    of summation is another. GPUs add in trees, which lose next to nothing.
    """
    if case.device != "cpu":
        return 0.0
    terms = case.batch * case.seq**2 / (2 if case.causal else 1)
    return NORM_FACTOR * torch.finfo(torch.float32).eps / 2 * math.sqrt(terms / 2)


def outside_values(out: Tensor, v: Tensor, slack: float) -> Tensor:
    """Where `out [B, Hq, M, D]` is no average of the rows of `v [B, Hkv, N, D]`, with `slack` relative to v."""
    low, high = v.amin(2, keepdim=True), v.amax(2, keepdim=True)
    margin = slack * max(low.abs().max().item(), high.abs().max().item())
    low, high = (x.repeat_interleave(out.shape[1] // v.shape[1], dim=1) for x in (low, high))
    return (out < low - margin) | (out > high + margin)


def _forward(case: Case, inputs: Inputs) -> dict[str, Bound]:
    bound = Bound()
    for sample in forward_sample(case):
        for heads in sample.chunks:
            exact, eager = (heads.gather(inputs, dtype) for dtype in (torch.float64, DTYPES[case.dtype]))
            for rows in sample.blocks:
                bound.add(heads.picker("q", rows), _output(case, exact, rows), _output(case, eager, rows))
    return {"out": bound}


def _decode(case: Case, inputs: Inputs) -> dict[str, Bound]:
    bound = Bound()
    for heads in decode_sample(case).chunks:
        exact, eager = (_decode_output(heads.gather(inputs, dtype)) for dtype in (torch.float64, DTYPES[case.dtype]))
        bound.add(heads.picker("q", None), exact, eager)
    return {"out": bound}


def _backward(case: Case, inputs: Inputs) -> dict[str, Bound]:
    """Gradients of the sampled heads by all rows; the weight's is summed over the sequences."""
    sample = backward_sample(case)
    bounds = {GRADIENTS[name]: Bound() for name in inputs.differentiable}
    weight_sums = [torch.zeros_like(w, dtype=torch.float64) for w in (inputs.weight, inputs.weight) if w is not None]
    for heads in sample.chunks:
        exact, eager = (
            _gradients(case, heads.gather(inputs, dtype), sample.blocks)
            for dtype in (torch.float64, DTYPES[case.dtype])
        )
        for name in ("q", "k", "v"):
            bounds[GRADIENTS[name]].add(heads.picker(name, None), exact[name], eager[name])
        for total, gradients in zip(weight_sums, (exact, eager), strict=False):
            total.index_add_(0, heads.query_heads.flatten(), gradients["weight"])
    if weight_sums:
        kept = torch.cat([heads.query_heads.flatten() for heads in sample.chunks]).unique()
        values, eager_values = (total[kept].flatten(1) for total in weight_sums)
        bounds["dweight"].add(lambda gradient: gradient[kept].flatten(1), values, eager_values)
    return bounds


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
    end = stop if case.causal else x.q.shape[2]
    q, k, v = (tensor[:, :, :end] for tensor in (x.q, x.k, x.v))
    if x.weight is None:
        return attention_reference(q[:, :, start:stop], k, v, causal=case.causal)
    return conv_attention_reference(q, k, v, x.weight, causal=case.causal, rows=rows)


def _decode_output(x: Inputs) -> Tensor:
    if x.weight is None:
        return attention_reference(x.q[:, :, -1:], x.k, x.v, causal=False)
    assert x.lengths is not None
    # All sequences of a case have the same length, so that heads of several can stand for heads of one.
    return conv_attention_decode_reference(x.q, x.k, x.v, x.weight, lengths=x.lengths[:1])
