"""The time of a cell by the model: its kernels on a device, added up."""

from __future__ import annotations

from dataclasses import dataclass

from mtabench import registry
from mtabench.model.devices import Device, Rates
from mtabench.model.fused import Tiles
from mtabench.model.kernel import Kernel, KernelTime, time_of
from mtabench.problem.case import Case

OPERATOR_HOST_S = 8e-6  # that the host takes to launch one kernel, if the implementation says nothing else


@dataclass(frozen=True, slots=True)
class Prediction:
    """What the model says of a cell: its kernels' times, and the seconds that the host needs to launch them."""

    kernels: tuple[KernelTime, ...]
    host_s: float
    tiles: Tiles | None

    @property
    def gpu_s(self) -> float:
        """Seconds on the GPU."""
        return sum(kernel.seconds for kernel in self.kernels)

    @property
    def seconds(self) -> float:
        """Of a call as a sweep times it: the GPU's or the host's, whichever is longer."""
        return max(self.gpu_s, self.host_s)

    @property
    def largest(self) -> tuple[str, str, float]:
        """The kernel, the term and the seconds of the largest single term."""
        kernel = max(self.kernels, key=lambda time: time.bound_by[1])
        return (kernel.kernel.name, *kernel.bound_by)


def unmodelled(case: Case, device: Device | None = None) -> str | None:
    """Why there is no prediction for a cell, on this device if one is given, or None."""
    implementation = registry.implementation_of(case)
    if implementation.kernels is None:
        entries = [entry for entry in registry.IMPLEMENTATIONS if entry.kernels and entry.op == implementation.op]
        modelled = list(dict.fromkeys(entry.name for entry in entries or registry.IMPLEMENTATIONS if entry.kernels))
        return f"{case.impl} is not modelled; {', '.join(modelled[:-1])} and {modelled[-1]} are"
    if case.pass_ not in implementation.passes:
        return f"{case.impl} has no {case.pass_} pass"
    if case.page_size is not None:
        return "a cache in pages is not modelled; a contiguous one is"
    if case.dtype == "fp32":
        return "fp32 is not modelled; fp16 and bf16 are"
    reasons = (why(case, device) for why in (implementation.never_on, implementation.not_modelled) if why)
    return next(filter(None, reasons), None)


def kernels_of(case: Case, tiles: Tiles, device: Device) -> list[Kernel]:
    """The kernels of one call on a device, of a cell that `unmodelled` says nothing against."""
    kernels = registry.implementation_of(case).kernels
    assert kernels
    return kernels(case, tiles, device)


def tiles_on(case: Case, device: Device) -> Tiles | None:
    """The tile sizes that the kernels of a cell take on a device, None if they are not tuned."""
    tiles = registry.implementation_of(case).tiles
    return tiles(case, device) if tiles else None


def predict(case: Case, device: Device, rates: Rates, tiles: Tiles | None = None) -> Prediction:
    """The prediction for a cell that `unmodelled` says nothing against; `tiles` are those of tuned kernels."""
    implementation = registry.implementation_of(case)
    if implementation.tiles:
        tiles = tiles or Tiles()
    kernels = kernels_of(case, tiles or Tiles(), device)
    launches = sum(kernel.launches for kernel in kernels)
    # A decode step is replayed as a CUDA graph, which the host launches at once.
    host_s = 0.0 if case.pass_ == "decode" else launches * implementation.host_s.get(case.pass_, OPERATOR_HOST_S)
    return Prediction(tuple(time_of(kernel, rates) for kernel in kernels), host_s, tiles)
