"""Whether an implementation's results can be believed: by the oracle, by probes, and by results of timed calls.

The inputs of each timed call are others, at the same addresses. Which results are judged is drawn at random, and
nothing in a window differs, so a call cannot know whether it is looked at.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from math import prod
from random import SystemRandom
from types import MappingProxyType

import torch
from torch import Tensor

from mtabench.checking.oracle import Check, Oracle, each, listed
from mtabench.checking.probes import Probe, changed, make_probes
from mtabench.measuring.failures import WrongResultError
from mtabench.measuring.poison import poisoned_memory
from mtabench.measuring.samplers import FASTEST_CLOCK_HZ
from mtabench.measuring.timing import Watch
from mtabench.problem.case import Case
from mtabench.problem.inputs import INTEGERS, Inputs, make_inputs
from mtabench.registry import implementation_of

HOLD_S = 5e-3  # of the current stream: the CPU launches a call in less
LATE_S = 0.3  # what a thread of a CPU may take to write what it should have written
LATE = (
    "its result is not there when the call is over, and comes later: it works on another stream, or in another thread, "
    "for which the current one does not wait"
)
EARLY = "right on an idle GPU, wrong behind other work: it works on another stream, which does not wait for this one"


Marks = Mapping[str, tuple[bool, list[Tensor]]]
RANDOM = SystemRandom()
Result = Tensor | Sequence[Tensor]
Call = Callable[[Probe | None], Result]


class InputsChangedError(WrongResultError):
    """A call changed what it was given, so that the inputs of all that comes after it are others."""


def hold_back(device: str) -> None:
    """Keep the current stream of a GPU busy for a while; what follows on it waits.

    Work on another stream, which does not wait for this one, comes too early or too late then: its result is looked at
    in the stream's order, before anything waits for the device.
    """
    if device == "cuda":
        torch.cuda._sleep(int(HOLD_S * FASTEST_CLOCK_HZ))


def look(results: Sequence[Tensor]) -> list[Tensor]:
    """What tells whether results change from here on: on a GPU in the current stream's order; waits for nothing."""
    return [sums for result in results for sums in _sums(result)]


def check_plain(results: Sequence[Tensor]) -> None:
    """Raise WrongResultError for a subclass of a tensor, which could compute when somebody looks at it."""
    for result in results:
        if type(result) is not Tensor:
            raise WrongResultError(f"its result is a {type(result).__name__}; expected a torch.Tensor, no subclass")


def check_in_time(device: str, seen: Sequence[Tensor], results: Sequence[Tensor], doubted: bool = False) -> None:
    """Raise WrongResultError if results are others than `look` saw, once all work is over.

    A CPU is waited for if results are `doubted`, or have NaN, as the memory of before has where it is poisoned.
    """
    if device == "cuda":
        torch.cuda.synchronize()
    elif doubted or not all(torch.isfinite(x.detach()).all() for x in results):
        time.sleep(LATE_S)
    if not all(map(torch.equal, seen, look(results))):
        raise WrongResultError(LATE)


def marks(inputs: Inputs, known: Marks = MappingProxyType({})) -> Marks:
    """What tells whether inputs are the same: sums of bits, and whether they have gradients; or what is `known`."""
    given = inputs.differentiable | {"dout": inputs.dout, "lengths": inputs.lengths} | inputs.elsewhere
    return {
        name: known[name] if name in known else (tensor.requires_grad, _sums(tensor))
        for name, tensor in given.items()
        if tensor is not None
    }


def check_unchanged(before: Marks, inputs: Inputs) -> None:
    """Raise InputsChangedError unless the inputs are those that `before` are the marks of."""
    now = marks(inputs)
    changed = [
        name
        for name, (requires_grad, sums) in before.items()
        if requires_grad != now[name][0] or not all(map(torch.equal, sums, now[name][1]))
    ]
    if changed:
        raise InputsChangedError(f"it changes its inputs: {', '.join(changed)}")


def _sums(x: Tensor) -> list[Tensor]:
    """Of the bits along rows and along columns, each added up with odd weights: few numbers, which take no memory.

    Of eight bytes at a time, where rows have as many: PyTorch makes an int64 copy of what it adds up.
    """
    flat = x.detach().contiguous().flatten()
    whole = all(count * x.element_size() % 8 == 0 for count in (*x.shape[-1:], flat.storage_offset()))
    bits = flat.view(INTEGERS[8 if whole else x.element_size()]).unflatten(0, (*x.shape[:-1], -1))
    sums = [bits.sum(dim, dtype=torch.int64).flatten() for dim in range(-min(bits.dim(), 2), 0)]
    return [(each * torch.arange(1, 2 * len(each), 2, device=x.device)).sum() for each in sums]


class TimedResults(Watch):
    """Changes signs of columns of the inputs before each call, and judges the result that was kept last.

    Columns of q and k change alike, so scores stay as they are; columns of the output follow v. Dout changes between
    forward and backward, so that a forward cannot know the gradients.
    """

    def __init__(self, inputs: Inputs, oracle: Oracle, draw_again: Callable[[], None]) -> None:
        """`draw_again` gives the inputs their values back after a call changed them."""
        self._inputs, self._oracle, self._draw_again = inputs, oracle, draw_again
        self._device, self._before = inputs.q.device, marks(inputs)
        self._generator = torch.Generator(self._device).manual_seed(RANDOM.getrandbits(62))
        bits = INTEGERS[inputs.q.element_size()]
        unchanged = torch.zeros(3, inputs.q.shape[-1], dtype=bits, device=self._device)
        self._flipped = dict(zip(("keys", "values", "dout"), unchanged, strict=True))
        self._values = unchanged[0]
        self._results: Sequence[Tensor] = []
        self._seen: Sequence[Tensor] = []

    def change(self) -> None:
        """See `Watch`."""
        self._before = marks(self._inputs, self._before)  # copies of caches may have been made since
        keys, self._values = self._drawn(2)
        self._flip(keys=keys, values=self._values)

    def change_gradient(self) -> None:
        """See `Watch`."""
        if self._inputs.dout is not None:
            self._flip(dout=self._values ^ self._drawn(1)[0, :1])

    def look(self, results: Sequence[Tensor | Sequence[Tensor]]) -> None:
        """See `Watch`."""
        self._results = each(RANDOM.choice(results))
        check_plain(self._results)
        self._seen = look(self._results)

    def end(self, judged: bool = False) -> None:
        """See `Watch`."""
        results, seen, self._results, self._seen = self._results, self._seen, [], []
        try:
            if judged and results:
                check = self._oracle.check(results, self._signs())
                check_in_time(self._device.type, seen, results, doubted=not check.ok)
                if not check.ok:
                    raise WrongResultError(f"right before it was timed, and a timed call is wrong: {check.reason}")
        finally:
            self._restore()

    def _restore(self) -> None:
        try:
            self._flip(**{name: bits.clone() for name, bits in self._flipped.items()})
            check_unchanged(self._before, self._inputs)
        except (InputsChangedError, RuntimeError) as error:  # they have another shape, perhaps
            self._draw_again()
            for bits in self._flipped.values():
                bits.zero_()
            raise InputsChangedError(f"right before it was timed; when timed {error}") from None

    def _drawn(self, count: int) -> Tensor:
        """Sign bits of columns, each there or not by chance: `[count, D]`."""
        size, dtype = (count, len(self._values)), self._values.dtype
        drawn = torch.randint(0, 2, size, generator=self._generator, dtype=dtype, device=self._device)
        return drawn.mul_(torch.iinfo(dtype).min)

    def _flip(self, **bits: Tensor) -> None:
        self._inputs.flip(**bits)
        for name, those in bits.items():
            self._flipped[name] ^= those

    def _signs(self) -> dict[str, Tensor]:
        """Of the columns of each result, or of all of it, what the changes so far made of them."""
        keys, values, dout = (1 - 2 * (bits < 0).int() for bits in self._flipped.values())
        if self._inputs.dout is None:
            return {"out": values}
        whole = (dout * values)[0]
        others = {f"d{name}": whole for name in self._inputs.mixers}
        return others | {"dq": whole * keys, "dk": whole * keys, "dv": dout, "dgate_weight": dout}


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

        `call` gives the result, and has changed the inputs back. `idle` does so on a device that has nothing else to
        do, if there is such a call.
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
    the result comes after the call has returned, or if gradients are missing or of another shape. Raises
    InputsChangedError if the call changes its inputs.
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
    """Why results repeat an earlier call though the inputs changed, or lie in its memory; empty if they do not."""
    if any(a.data_ptr() == b.data_ptr() and a.numel() for a, b in zip(first, results, strict=False)):
        return (
            "a second call returns the memory of the first one's result, which is still in use: cached, or overwritten"
        )
    if probe.alters and len(first) == len(results) and all(map(torch.equal, first, results)):
        return "a second call gives the result of the first, though its inputs changed in place: it is a cached one"
    return ""
