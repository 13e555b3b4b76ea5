"""What GPUs can do: one literal table, with its sources, and the rates that a prediction goes by."""

from dataclasses import dataclass

from mta_kernels.planned import H200, PlannedGpu
from mtabench.errors import UsageError, hint_at
from mtabench.static.limits import limits_of


@dataclass(frozen=True, slots=True)
class Device:
    """Limits of a model of GPU; `name` is what CUDA calls it.

    `tensor_tflops` counts dense products of 16-bit numbers. `measured` are a copy in GB/s and a 16-bit product in
    TFLOP/s, None where not measured.
    """

    name: str
    capability: tuple[int, int]
    sm_count: int
    tensor_tflops: float
    memory_gbytes_s: float
    memory_bytes: float
    measured: tuple[float, float] | None = None

    @property
    def planned(self) -> PlannedGpu:
        """The device as plans of calls take it."""
        limits = limits_of("sm_{}{}".format(*self.capability))
        return PlannedGpu(
            self.name, self.capability, limits.shared_per_block, limits.shared_per_sm, self.sm_count,
            int(self.memory_bytes), H200.clusters if self.name == H200.name else (),
        )  # fmt: skip


# SMs, products and memory: NVIDIA's whitepapers and data sheets of A100, H100, H200 and B200.
# Measured: `mtabench env --measure` on an H200, whose file is not kept.
DEVICES = (
    Device("NVIDIA A100-SXM4-80GB", (8, 0), 108, 312.0, 2039.0, 80e9),
    Device("NVIDIA H100 80GB HBM3", (9, 0), 132, 989.0, 3350.0, 80e9),
    Device("NVIDIA H200", (9, 0), 132, 989.0, 4800.0, 141e9, (4242.0, 784.0)),
    Device("NVIDIA B200", (10, 0), 148, 2250.0, 8000.0, 180e9),
)
# What an H200 reaches of its data sheet: taken for devices that were not measured.
MATMUL_SHARE, COPY_SHARE = 0.79, 0.88


@dataclass(frozen=True, slots=True)
class Rates:
    """What a device does in a second: multiply-adds of a plain 16-bit product, and bytes of a copy.

    `source` names their origin.
    """

    macs: float
    memory_bytes: float
    source: str


def find_device(name: str) -> Device:
    """The device of this name, as typed ("h200") or as CUDA calls it; raises UsageError unless there is just one."""
    wanted = _words(name)  # whole words: an A10 is no A100
    found = [device for device in DEVICES if wanted and wanted <= _words(device.name)]
    if len(found) == 1:
        return found[0]
    if found:
        names = " or ".join(device.name for device in found)
        raise UsageError(f"a device called {name!r} could be {names}; give more of its name")
    short = [device.name.removeprefix("NVIDIA ").partition("-")[0].split()[0].lower() for device in DEVICES]
    raise UsageError(f"the limits of a device called {name!r} are not known; {hint_at(name, short)}")


def _words(name: str) -> set[str]:
    return set(name.lower().replace("-", " ").split())


def known_device(name: str) -> Device | None:
    """The same, None for a device whose limits are not known."""
    try:
        return find_device(name)
    except UsageError:
        return None


def rates_of(device: Device) -> Rates:
    """The rates of a device, as measured or else guessed."""
    if device.measured is not None:
        copy, product = device.measured
        source = "measured (mtabench.prediction.devices)"
    else:
        copy, product = device.memory_gbytes_s * COPY_SHARE, device.tensor_tflops * MATMUL_SHARE
        source = "guessed from its data sheet and what an H200 reaches of its own"
    return Rates(product * 1e12 / 2, copy * 1e9, source)
