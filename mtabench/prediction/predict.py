"""The least time of a call, by one rule: its FLOPs and its bytes over what the device does of a product and a copy.

    max(FLOPs / rate of a plain 16-bit product, bytes / bandwidth of a copy) + a gap for each launch

No constant is of a kernel. So this is a bound. A call comes near it if it multiplies by the GPU's fastest instructions;
docs/profiling.md has a table of how near.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mtabench import registry
from mtabench.prediction.devices import Device, Rates, find_device
from mtabench.problem.case import Case
from mtabench.problem.work import bytes_moved, executed_flops, stored_share

if TYPE_CHECKING:
    from mta_kernels.plan import KernelCall

GAP_S = 2e-6  # from one kernel of a stream to the next: launch latency, the last programs, the first ones
CANNOT = re.compile(r"backend '\w+' cannot run this: (.+); backend='auto'.+")
STAND_IN = find_device("h200")  # whose kernels are meant where no device is named


@dataclass(frozen=True, slots=True)
class Prediction:
    """The work of one call, and the seconds that it takes at least; `calls` is empty for other projects' kernels."""

    calls: Sequence[KernelCall]
    flops: int
    moved_bytes: float
    product_s: float
    copy_s: float
    gaps_s: float

    @property
    def seconds(self) -> float:
        """By the rule of this module."""
        return max(self.product_s, self.copy_s) + self.gaps_s

    @property
    def bound_by(self) -> str:
        """Which of the three is most of it: "products", "memory" or "launches"."""
        terms = {"products": self.product_s, "memory": self.copy_s, "launches": self.gaps_s}
        return max(terms, key=lambda name: terms[name])


def unpredicted(case: Case, device: Device = STAND_IN) -> str | None:
    """Why nothing is predicted of a cell on a device, or None."""
    implementation = registry.implementation_of(case)
    if case.layers is not None:
        return "a whole model is not predicted"
    if not implementation.planned and implementation.work != "tiled":
        planned = dict.fromkeys(entry.name for entry in registry.IMPLEMENTATIONS if entry.planned)
        return f"{case.impl} is not planned; {', '.join(planned)} are"
    if case.pass_ not in implementation.passes:
        return f"{case.impl} has no {case.pass_} pass"
    if implementation.planned:
        from mtabench.prediction.plans import plan_of

        try:
            plan_of(case, device.planned)
        except (ValueError, TypeError, RuntimeError) as error:
            return CANNOT.sub(r"\1", str(error))
    return None


def moved_bytes(case: Case, calls: Sequence[KernelCall]) -> float:
    """Bytes that kernels read and write: all of the tensors that they take, of chunks of scores those that count."""
    return sum(call.bytes for call in calls) * stored_share(case, registry.implementation_of(case).work)


def predict(case: Case, device: Device, rates: Rates) -> Prediction:
    """The prediction for a cell that `unpredicted` says nothing against."""
    implementation = registry.implementation_of(case)
    calls: Sequence[KernelCall] = ()
    if implementation.planned:
        from mtabench.prediction.plans import plan_of

        calls = plan_of(case, device.planned).calls
    flops = executed_flops(case, implementation.work)
    moved = moved_bytes(case, calls) if calls else bytes_moved(case)
    # A decode step is replayed as a CUDA graph, whose gaps are hidden by kernels that begin early.
    gaps_s = 0.0 if case.pass_ == "decode" else max(len(calls), 1) * GAP_S
    return Prediction(calls, flops, moved, flops / 2 / rates.macs, moved / rates.memory_bytes, gaps_s)
