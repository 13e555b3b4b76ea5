"""What a call may not do besides giving a right result: change its inputs, or leave it to another stream or thread.

On a GPU a call is made behind a delay on the current stream, so that work on another stream, which does not wait for
it, comes too early or too late: its result is looked at in the stream's order, before anything waits for the device.
"""

import time
from collections.abc import Mapping, Sequence
from types import MappingProxyType

import torch
from torch import Tensor

from mtabench.measuring.failures import WrongResultError
from mtabench.measuring.samplers import FASTEST_CLOCK_HZ
from mtabench.problem.inputs import INTEGERS, Inputs

HOLD_S = 5e-3  # of the current stream: the CPU launches a call in less
LATE_S = 0.3  # what a thread of a CPU may take to write what it should have written
LATE = (
    "its result is not there when the call is over, and comes later: it works on another stream, or in another thread, "
    "for which the current one does not wait"
)
EARLY = "right on an idle GPU, wrong behind other work: it works on another stream, which does not wait for this one"


Marks = Mapping[str, tuple[bool, list[Tensor]]]


class InputsChangedError(WrongResultError):
    """A call changed what it was given, so that the inputs of all that comes after it are others."""


def hold_back(device: str) -> None:
    """Keep the current stream of a GPU busy for a while; what follows on it waits."""
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
    elif doubted or not all(map(_is_finite, results)):
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


def _is_finite(x: Tensor) -> bool:
    return bool(torch.isfinite(x.detach()).all())
