"""The same numbers laid out in memory in other ways, with NaN between them."""

from __future__ import annotations

import torch
from torch import Tensor

FAR = 2**31 + 64  # elements between two sequences: an offset that 32 bits do not hold
AROUND = 67  # elements before and behind, so that a read outside finds NaN, and one of them is not aligned
LAYOUTS_THAT_REPEAT: dict[str, tuple[int, ...]] = {
    "expanded": (0,),
    "expanded heads": (1,),
    "expanded everywhere": (0, 1, 2, 3),
}


class Placed:
    """A tensor `x` with the values it was made of, and all of the memory that it lies in."""

    def __init__(self, values: Tensor, layout: str) -> None:
        self.layout = layout
        shape, strides, offset, size = _geometry(values, layout)
        # NaN; or 1, which a length, a bound or a page may be, so that a wrong read ends, and is wrong.
        garbage = float("nan") if values.is_floating_point() else 1
        self.memory = torch.full((size,), garbage, dtype=values.dtype, device=values.device)
        self.x = self.memory.as_strided(shape, strides, offset)
        self.put(values)
        self._before: Tensor | None = None

    def put(self, values: Tensor) -> None:
        """Other values at the same place; where the layout repeats some, the first of those."""
        first = _first(values, self.layout)
        self.x[first].copy_(values[first])

    def keep(self) -> None:
        """Note what all of the memory holds now."""
        self._before = None if self.layout == "far" else self.memory.clone()

    def changed(self) -> Tensor:
        """Whether anything was written there since: one bool, on the device."""
        if self._before is None:
            return torch.zeros((), dtype=torch.bool, device=self.memory.device)
        return (self.memory.view(torch.uint8) != self._before.view(torch.uint8)).any()


def as_laid_out(values: Tensor, layout: str) -> Tensor:
    """The values that a tensor of that layout has: what has no stride repeats the first."""
    return values[_first(values, layout)].expand_as(values)


def _first(values: Tensor, layout: str) -> tuple[slice, ...]:
    """What a layout has in memory."""
    repeated = LAYOUTS_THAT_REPEAT.get(layout, ())
    return tuple(slice(0, 1) if dim in repeated else slice(None) for dim in range(values.dim()))


def _geometry(values: Tensor, layout: str) -> tuple[tuple[int, ...], tuple[int, ...], int, int]:
    """Shape, strides, offset, and elements in all."""
    shape = tuple(values.shape)
    dims = list(range(len(shape)))
    order, steps, pads, offset = dims, [1] * len(dims), [0] * len(dims), 64
    if layout == "transposed" and len(dims) > 2:
        order = [0, 2, 1, *dims[3:]]
    elif layout == "columns first" and len(dims) > 1:
        order = [*dims[:-2], dims[-1], dims[-2]]
    elif layout == "permuted":
        order = [*dims[1:-1], 0, dims[-1]] if len(dims) > 2 else dims[::-1]
    elif layout == "steps":
        steps[-1] = 2
    elif layout == "rows apart" and len(dims) > 1:
        steps[-2] = 3
    elif layout == "padded":
        pads[-1] = 5
    elif layout == "offset":
        offset = AROUND
    strides = [0] * len(dims)
    size = 1
    for dim in reversed(order):
        strides[dim] = size * steps[dim]
        size *= shape[dim] * steps[dim] + pads[dim]
    for dim in LAYOUTS_THAT_REPEAT.get(layout, ()):
        if dim < len(dims):
            strides[dim] = 0
    if layout == "far":
        strides[0] = FAR
        size = FAR * (shape[0] - 1) + size
    return shape, tuple(strides), offset, offset + size + AROUND
