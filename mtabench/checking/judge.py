"""Whether an implementation's results can be believed: by the oracle, by probes, and by results of timed calls."""

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from math import prod

import torch
from torch import Tensor

from mtabench.checking.oracle import Check, Oracle, each, listed
from mtabench.checking.probes import Probe, changed, make_probes
from mtabench.checking.side_effects import (
    EARLY,
    InputsChangedError,
    check_in_time,
    check_plain,
    check_unchanged,
    hold_back,
    look,
    marks,
)
from mtabench.checking.timed_results import TimedResults
from mtabench.measuring.failures import WrongResultError
from mtabench.measuring.poison import poisoned_memory
from mtabench.problem.case import Case
from mtabench.problem.inputs import Inputs, make_inputs
from mtabench.registry import implementation_of

Result = Tensor | Sequence[Tensor]
Call = Callable[[Probe | None], Result]


class Judge:
    """Judges implementations of one problem, one after the other; what is drawn comes from the run's `seed`."""

    def __init__(self, case: Case, inputs: Inputs, seed: int) -> None:
        self._case, self._inputs, self._seed = case, inputs, seed
        self._oracle = Oracle(case, inputs, seed)
        self.probes = make_probes(case, inputs, seed, self._oracle.row_tolerances)

    def first(
        self, call: Callable[[Probe | None], Result], idle: Callable[[Probe | None], Result] | None = None
    ) -> Check:
        """Judge an implementation by calls of one closure: twice on the inputs as they are, then as probes change them.

        `call` gives the result, and has changed the inputs back; `idle` does so on a device that has nothing else to
        do, if there is such a thing.
        """
        first = listed(call(None))
        for results in (first, listed(call(None))):
            check = self._oracle.check(results)
            if not check.ok:
                return replace(check, reason=EARLY) if idle and self._oracle.check(idle(None)).ok else check
        for probe in self.probes:
            fault = self._fault(probe, first, call)
            if fault:
                late = idle is not None and not self._fault(probe, first, idle)
                return replace(check, ok=False, reason=EARLY if late else fault)
        return check

    def _fault(self, probe: Probe, first: Sequence[Tensor], call: Call) -> str:
        """What is wrong with the results of inputs that a probe changes, or an empty text."""
        results = listed(call(probe))
        return _remembered(first, results, probe) or self._oracle.fault(results) or probe.fault(first, results)

    def first_of(self, closure: Callable[[], Tensor], case: Case) -> Check:
        """Judge an implementation by its closure over this problem's inputs, which are the same afterwards."""
        within = implementation_of(case).within

        def call(probe: Probe | None, idle: bool = False) -> Result:
            with within():  # before the GPU is held back, which is shorter
                if not idle:
                    hold_back(case.device)
                if probe is None:
                    return results_of(closure, case, self._inputs, idle)
                with changed(probe, self._inputs) as inputs:
                    return results_of(closure, case, inputs, idle)

        try:
            return self.first(call, partial(call, idle=True) if case.device == "cuda" else None)
        except WrongResultError as error:
            if isinstance(error, InputsChangedError):
                self._restore()
            return Check(False, None, self._oracle.tolerance, str(error))

    @torch.no_grad()
    def _restore(self) -> None:
        """Draw the inputs again, at the same addresses: an implementation changed them."""
        fresh = make_inputs(self._case, self._seed)
        for name in ("q", "k", "v", "dout", "lengths", *self._inputs.mixers):
            if (tensor := getattr(self._inputs, name)) is not None:
                drawn = getattr(fresh, name)
                if tensor.shape != drawn.shape:  # it was resized, and is elsewhere from now on
                    tensor.data = drawn.data
                tensor.copy_(drawn)
                tensor.requires_grad_(drawn.requires_grad)
        self._inputs.refresh()

    def rest(self) -> None:
        """Hold no memory of a GPU until the last calls are judged."""
        self._oracle.rest()

    def watch(self) -> TimedResults:
        """What judges timed calls of a cell of this problem, whose closure is made by now."""
        return TimedResults(self._inputs, self._oracle, self._restore)


def results_of(
    closure: Callable[[], Tensor], case: Case, inputs: Inputs, idle: bool = False
) -> Tensor | tuple[Tensor, ...]:
    """The output of a closure, or in backward the gradients (dq, dk, dv, the mixers'); free memory is NaN before.

    With `idle` a GPU has nothing else to do before the call, and is done with it on return. Raises WrongResultError if
    the result comes later than the call is over, has no gradients since it has another shape, or lacks some of them,
    and InputsChangedError if the call changes its inputs.
    """
    results: Tensor | tuple[Tensor, ...]
    wait = torch.cuda.synchronize if idle else lambda: None
    leaves = list(inputs.differentiable.values())
    before = marks(inputs)
    rows = 1 if case.pass_ == "decode" else inputs.q.shape[2]
    try:
        with poisoned_memory(case.device, [prod((*inputs.q.shape[:2], rows, inputs.q.shape[3])) * inputs.q.itemsize]):
            wait()
            results = out = closure()
        if case.pass_ == "bwd":
            with poisoned_memory(case.device, [leaf.nbytes for leaf in leaves]):
                wait()
                if inputs.dout is not None and out.shape != inputs.dout.shape:
                    raise WrongResultError(f"out is {list(out.shape)}; expected {list(inputs.dout.shape)}")
                gradients = torch.autograd.grad(out, leaves, inputs.dout, allow_unused=True)
                results = tuple(gradient for gradient in gradients if gradient is not None)
                if len(results) < len(leaves):
                    raise WrongResultError(_without_gradient(inputs, gradients))
        wait()
    except Exception:
        with suppress(RuntimeError):  # of a device that a kernel broke
            check_unchanged(before, inputs)
        raise
    check_plain(each(results))
    found = listed(results)
    check_in_time(case.device, look(found), found)
    check_unchanged(before, inputs)
    return results


def _without_gradient(inputs: Inputs, gradients: Sequence[Tensor | None]) -> str:
    missing = [name for name, gradient in zip(inputs.differentiable, gradients, strict=True) if gradient is None]
    return (
        f"there is no gradient of {' and '.join(missing)}: autograd finds no way from the output to "
        f"{'it' if len(missing) == 1 else 'them'}; is it detached, or computed without autograd?"
    )


def _remembered(first: Sequence[Tensor], results: Sequence[Tensor], probe: Probe) -> str:
    """Whether results are those of an earlier call, though the inputs changed, or lie in their memory."""
    if any(a.data_ptr() == b.data_ptr() and a.numel() for a, b in zip(first, results, strict=False)):
        return (
            "a second call returns the memory of the first one's result, which is still in use: cached, or overwritten"
        )
    if probe.alters and len(first) == len(results) and all(map(torch.equal, first, results)):
        return "a second call gives the result of the first, though its inputs changed in place: it is a cached one"
    return ""
