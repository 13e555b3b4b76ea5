"""Whether an implementation's results can be believed: by the oracle, by probes, and by its last call once more."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from math import prod

import torch
from torch import Tensor

from mtabench.checking.oracle import Check, Oracle, listed
from mtabench.checking.probes import Probe, changed, make_probes
from mtabench.measuring.poison import poisoned_memory
from mtabench.problem.case import Case
from mtabench.problem.inputs import Inputs

Result = Tensor | Sequence[Tensor]


class Judge:
    """Judges implementations of one problem, one after the other; what is drawn comes from the run's `seed`."""

    def __init__(self, case: Case, inputs: Inputs, seed: int) -> None:
        self._inputs = inputs
        self._oracle = Oracle(case, inputs, seed)
        self.probes = make_probes(case, inputs, seed, self._oracle.row_tolerances)

    def first(self, call: Callable[[Probe | None], Result]) -> Check:
        """Judge an implementation by calls of one closure: on the inputs as they are, then as each probe changes them.

        `call` gives the result, and has changed the inputs back.
        """
        first = listed(call(None))
        check = self._oracle.check(first)
        if not check.ok:
            return check
        for probe in self.probes:
            results = listed(call(probe))
            fault = _remembered(first, results) or self._oracle.fault(results) or probe.fault(first, results)
            if fault:
                return replace(check, ok=False, reason=fault)
        return check

    def first_of(self, closure: Callable[[], Tensor], case: Case) -> Check:
        """Judge an implementation by its closure over this problem's inputs."""

        def call(probe: Probe | None) -> Result:
            if probe is None:
                return results_of(closure, case, self._inputs)
            with changed(probe, self._inputs) as inputs:
                return results_of(closure, case, inputs)

        return self.first(call)

    def rest(self) -> None:
        """Hold no memory of a GPU until the last calls are judged."""
        self._oracle.rest()

    def last(self, call: Callable[[], Sequence[Result]]) -> str:
        """Why the results of a last call, made in the way that was timed, are wrong, or an empty text.

        Its v is negated, backward its dout, so that none of it is a result of before.
        """
        with self._inputs.negated():
            for result in call():
                check = self._oracle.check(result, sign=-1)
                if not check.ok:
                    negated = "v" if self._inputs.dout is None else "dout"
                    return f"right at first, wrong when called last, {negated} being negated: {check.reason}"
        return ""


def results_of(closure: Callable[[], Tensor], case: Case, inputs: Inputs) -> Tensor | tuple[Tensor, ...]:
    """The output of a closure, or in backward the gradients (dq, dk, dv, the mixers'); free memory is NaN before."""
    leaves = list(inputs.differentiable.values())
    rows = 1 if case.pass_ == "decode" else inputs.q.shape[2]
    with poisoned_memory(case.device, [prod((*inputs.q.shape[:2], rows, inputs.q.shape[3])) * inputs.q.itemsize]):
        out = closure()
    if case.pass_ != "bwd":
        return out
    with poisoned_memory(case.device, [leaf.nbytes for leaf in leaves]):
        return torch.autograd.grad(out, leaves, inputs.dout)


def _remembered(first: Sequence[Tensor], results: Sequence[Tensor]) -> str:
    """Whether results are those of an earlier call, though the inputs changed, or lie in their memory."""
    if any(a.data_ptr() == b.data_ptr() and a.numel() for a, b in zip(first, results, strict=False)):
        return (
            "a second call returns the memory of the first one's result, which is still in use: cached, or overwritten"
        )
    if len(first) == len(results) and all(map(torch.equal, first, results)):
        return "a second call gives the result of the first, though its inputs changed in place: it is a cached one"
    return ""
