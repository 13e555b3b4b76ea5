"""What a call may not do besides giving a right result: change its inputs, or leave it to another stream or thread.

On a GPU a call is made behind a delay on the current stream, so that work on another stream, which does not wait for
it, comes too early or too late: its result is looked at in the stream's order, before anything waits for the device.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from mtabench.measuring.failures import WrongResultError
from mtabench.measuring.samplers import FASTEST_CLOCK_HZ
from mtabench.problem.inputs import Inputs

HOLD_S = 5e-3  # of the current stream: the CPU launches a call in less
LATE_S = 0.3  # what a thread of a CPU may take to write what it should have written
LATE = (
    "its result is not there when the call is over, and comes later: it works on another stream, or in another thread, "
    "for which the current one does not wait"
)
EARLY = "right on an idle GPU, wrong behind other work: it works on another stream, which does not wait for this one"
INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class InputsChangedError(WrongResultError):
    """A call changed what it was given, so that the inputs of all that comes after it are others."""


def hold_back(device: str) -> None:
    """Keep the current stream of a GPU busy for a while; what follows on it waits."""
    if device == "cuda":
        torch.cuda._sleep(int(HOLD_S * FASTEST_CLOCK_HZ))


def look(device: str, results: Sequence[Tensor]) -> list[Tensor]:
    """What a GPU's current stream sees of results when it comes to them; waits for nothing."""
    return [sums for result in results for sums in _sums(result)] if device == "cuda" else []


def check_plain(results: Sequence[Tensor]) -> None:
    """Raise WrongResultError for a subclass of a tensor, which could compute when somebody looks at it."""
    for result in results:
        if type(result) is not Tensor:
            raise WrongResultError(f"its result is a {type(result).__name__}; expected a torch.Tensor, no subclass")


def check_in_time(device: str, seen: Sequence[Tensor], results: Sequence[Tensor]) -> None:
    """Raise WrongResultError if results are others once all work is over: on a CPU, where memory of before is NaN."""
    if device == "cuda":
        torch.cuda.synchronize()
        late = not all(map(torch.equal, seen, look(device, results)))
    elif all(map(_is_finite, results)):
        late = False
    else:
        time.sleep(LATE_S)
        late = all(map(_is_finite, results))
    if late:
        raise WrongResultError(LATE)


def marks(inputs: Inputs) -> dict[str, list[Tensor]]:
    """What tells whether inputs are the same: sums of their bits along rows and along columns, and their gradients."""
    given = inputs.differentiable | {"dout": inputs.dout, "lengths": inputs.lengths} | inputs.pages
    return {
        name: [*_sums(tensor), torch.tensor(tensor.requires_grad)]
        for name, tensor in given.items()
        if tensor is not None
    }


def check_unchanged(before: Mapping[str, Sequence[Tensor]], inputs: Inputs) -> None:
    """Raise InputsChangedError unless the inputs are those that `before` are the marks of."""
    now = marks(inputs)
    changed = [name for name, sums in before.items() if not all(map(torch.equal, sums, now[name]))]
    if changed:
        raise InputsChangedError(f"it changes its inputs: {', '.join(changed)}")


def _sums(x: Tensor) -> list[Tensor]:
    bits = x.detach().view(INTEGERS[x.element_size()])
    return [bits.sum(dim, dtype=torch.int64) for dim in range(-min(x.dim(), 2), 0)]


def _is_finite(x: Tensor) -> bool:
    return bool(torch.isfinite(x.detach()).all())
