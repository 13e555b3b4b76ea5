"""What GPUs can do: one literal table, with its sources, and the rates that a prediction goes by."""

from __future__ import annotations

import difflib
from dataclasses import dataclass

from mtabench.errors import UsageError
from mtabench.static.limits import limits_of


@dataclass(frozen=True, slots=True)
class Device:
    """Limits of a model of GPU; `name` is what CUDA calls it.

    `tensor_tflops` counts dense products of 16-bit numbers. `exponentials` and `shared_bytes` are those of an SM in a
    clock, and so are `mma_macs`, multiply-adds of 16-bit numbers by `mma.sync`; `l2_bytes` is that of the whole L2.
    None where unknown. `measured` are a copy in GB/s and a 16-bit product in TFLOP/s, where we measured.
    """

    name: str
    capability: tuple[int, int]
    sm_count: int
    clock_mhz: int
    tensor_tflops: float
    exponentials: int
    shared_bytes: int
    l2_bytes: int | None
    memory_gbytes_s: float
    memory_bytes: float
    mma_macs: float | None = None
    measured: tuple[float, float] | None = None

    @property
    def shared_memory(self) -> int:
        """Bytes that one block can have."""
        return limits_of("sm_{}{}".format(*self.capability)).shared_per_block


# SMs, highest clocks, products and memory: NVIDIA's whitepapers and data sheets of A100, H100, H200 and B200.
# Exponentials (16) and bytes of shared memory (128, 32 banks of 4) a clock: CUDA C++ Programming Guide, throughput of
# arithmetic instructions and shared memory. L2 of the A100: its whitepaper (5120 bytes a clock); of GH100: 96 slices
# of 64 bytes, which agrees with Nsight Compute on an H200 (11 TB/s read at 88 % of the peak:
# results/nvidia-h200/profile/bwd/counters.csv). `mma.sync`: the A100's only products, so its peak; of GH100 2048 in
# 6.52 clocks of each of four schedulers (results/nvidia-h100/experiments/cuda-forward-instructions.csv).
# Measured: `mtabench env --measure` on an H200, whose file is not kept.
HOPPER_MMA_MACS = 4 * 2048 / 6.52
DEVICES = (
    Device("NVIDIA A100-SXM4-80GB", (8, 0), 108, 1410, 312.0, 16, 128, 5120, 2039.0, 80e9, 1024),
    Device("NVIDIA H100 80GB HBM3", (9, 0), 132, 1980, 989.0, 16, 128, 6144, 3350.0, 80e9, HOPPER_MMA_MACS),
    Device("NVIDIA H200", (9, 0), 132, 1980, 989.0, 16, 128, 6144, 4800.0, 141e9, HOPPER_MMA_MACS, (4242.0, 784.0)),
    Device("NVIDIA B200", (10, 0), 148, 1965, 2250.0, 16, 128, None, 8000.0, 180e9),
)
# What an H200 reaches of its data sheet: taken for devices that were not measured.
MATMUL_SHARE, COPY_SHARE = 0.79, 0.88


@dataclass(frozen=True, slots=True)
class Rates:
    """What a device does in a second: multiply-adds of a plain 16-bit product and of `mma.sync`, exponentials, bytes.

    `source` says who measured a product and a copy.
    """

    macs: float
    exponentials: float
    shared_bytes: float
    l2_bytes: float | None
    memory_bytes: float
    source: str
    mma_macs: float | None = None


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
    near = difflib.get_close_matches(name.lower(), short, n=1)
    hint = f"did you mean {near[0]}?" if near else f"expected one of {', '.join(short)}"
    raise UsageError(f"the limits of a device called {name!r} are not known; {hint}")


def _words(name: str) -> set[str]:
    return set(name.lower().replace("-", " ").split())


def known_device(name: str) -> Device | None:
    """The same, None for a device whose limits are not known."""
    try:
        return find_device(name)
    except UsageError:
        return None


def rates_of(device: Device, ceilings: tuple[float, float] | None = None, source: str = "") -> Rates:
    """The rates of a device; `ceilings` are a copy in GB/s and a product in TFLOP/s measured there, from `source`."""
    if ceilings is None and device.measured is not None:
        ceilings, source = device.measured, "measured (mtabench.model.devices)"
    if ceilings is None:
        ceilings = device.memory_gbytes_s * COPY_SHARE, device.tensor_tflops * MATMUL_SHARE
        source = "guessed from its data sheet and what an H200 reaches of its own"
    cycles = device.sm_count * device.clock_mhz * 1e6
    return Rates(
        macs=ceilings[1] * 1e12 / 2,
        exponentials=device.exponentials * cycles,
        shared_bytes=device.shared_bytes * cycles,
        l2_bytes=device.l2_bytes * device.clock_mhz * 1e6 if device.l2_bytes else None,
        memory_bytes=ceilings[0] * 1e9,
        source=source,
        mma_macs=device.mma_macs * cycles if device.mma_macs else None,
    )
