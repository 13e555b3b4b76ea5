"""The time of a cell by the model: its kernels on a device, added up."""

from __future__ import annotations

from dataclasses import dataclass

from mtabench.model import banded, dense, fused, plain
from mtabench.model.devices import Device, Rates
from mtabench.model.fused import Tiles
from mtabench.model.kernel import Kernel, KernelTime, time_of
from mtabench.problem.case import Case
from mtabench.registry import find

MODELLED = ("eager", "triton", "hopper", "sdpa-flash", "sdpa-cudnn")
# Seconds that the host takes to launch one kernel: Triton's four of a forward and Hopper's two (host-time.csv), 18 of a
# Triton backward (1 ms in a run of an earlier commit, whose rows are not kept), PyTorch's operators. Hopper's backward
# was not measured: it is taken for little more than its forward.
HOST_S = {("triton", "fwd"): 7e-6, ("triton", "bwd"): 55e-6, ("hopper", "fwd"): 9e-6, ("hopper", "bwd"): 10e-6}
OPERATOR_HOST_S = 8e-6


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
    if case.impl not in MODELLED:
        return f"{case.impl} is not modelled; {', '.join(MODELLED[:-1])} and {MODELLED[-1]} are"
    if case.pass_ not in find(case.impl).passes:
        return f"{case.impl} has no {case.pass_} pass"
    if case.dtype == "fp32":
        return "fp32 is not modelled; fp16 and bf16 are"
    if case.impl != "hopper":
        return None
    if device is not None and device.capability != (9, 0):
        return f"{device.name} is no Hopper GPU (sm_90), which is what hopper is for"
    if case.conv.query_taps > banded.MOST_TAPS[0] or case.conv.key_taps > banded.MOST_TAPS[1]:
        return "hopper takes up to {}x{} taps".format(*banded.MOST_TAPS)
    if case.pass_ == "bwd" and case.head_dim > banded.MOST_BACKWARD:
        return f"hopper has no backward for head dims above {banded.MOST_BACKWARD}"
    return None


def kernels_of(case: Case, tiles: Tiles, sm_count: int) -> list[Kernel]:
    """The kernels of one call of a cell that `unmodelled` says nothing against."""
    if case.impl == "eager":
        return dense.kernels(case)
    if case.impl.startswith("sdpa-"):
        return plain.kernels(case)
    if case.impl == "hopper":
        return (banded.forward if case.pass_ == "fwd" else banded.backward)(case, sm_count)
    of_pass = {"fwd": fused.forward, "bwd": fused.backward, "decode": fused.decode}[case.pass_]
    return of_pass(case, tiles, sm_count)


def predict(case: Case, device: Device, rates: Rates, tiles: Tiles | None = None) -> Prediction:
    """The prediction for a cell that `unmodelled` says nothing against; `tiles` are those of the Triton kernels."""
    if case.impl == "triton":
        tiles = tiles or Tiles()
    kernels = kernels_of(case, tiles or Tiles(), device.sm_count)
    launches = sum(kernel.launches for kernel in kernels)
    # A decode step is replayed as a CUDA graph, which the host launches at once.
    host_s = 0.0 if case.pass_ == "decode" else launches * HOST_S.get((case.impl, case.pass_), OPERATOR_HOST_S)
    return Prediction(tuple(time_of(kernel, rates) for kernel in kernels), host_s, tiles)
