"""What one kernel does, and the time that it takes by the rule of this package."""

from __future__ import annotations

import math
from dataclasses import dataclass

from mtabench.model.devices import Rates
from mtabench.problem.case import BYTES_PER_ELEMENT, Case

GAP_S = 2e-6  # from one kernel of a stream to the next: launch latency, the last programs, the first ones
# What runs one after the other within a program, and what runs beside it.
IN_TURN = ("tensor cores", "exponentials", "CUDA cores")
BESIDE = ("shared memory", "L2", "memory")


@dataclass(frozen=True, slots=True)
class Kernel:
    """All launches of one kernel in a call.

    `macs` are multiply-adds on the tensor cores, those of masked scores in the tiles that are computed included, at
    `tensor_share` of the rate of a plain product, or of `mma.sync` if they are `by_mma`; `fmas` those on the CUDA
    cores, `fma_rate` a second. The bytes are read and written; `shared_share` is the part of shared memory's peak that
    it reaches, `memory_share` that of a copy's bandwidth, `memory_limit` the bytes a second that its programs can ask
    for. `waves` of programs, one after the other on an SM, take `wave_s` each before and after their loops.
    `overlapped`: exponentials run beside products.
    """

    name: str
    launches: int = 1
    macs: float = 0.0
    tensor_share: float = 1.0
    by_mma: bool = False
    exponentials: float = 0.0
    overlapped: bool = False
    fmas: float = 0.0
    fma_rate: float = 1.0
    shared_bytes: float = 0.0
    shared_share: float = 1.0
    l2_bytes: float = 0.0
    memory_bytes: float = 0.0
    memory_share: float = 1.0
    memory_limit: float = math.inf
    waves: float = 0.0
    wave_s: float = 0.0


@dataclass(frozen=True, slots=True)
class KernelTime:
    """A kernel's terms in seconds, by name, None where the device's limit is unknown; and what they come to."""

    kernel: Kernel
    terms: dict[str, float | None]

    @property
    def seconds(self) -> float:
        """By the rule of this package."""
        known = {name: value or 0.0 for name, value in self.terms.items()}
        in_turn, beside = self._order
        busy = max(sum(known[name] for name in in_turn), *(known[name] for name in beside))
        return busy + known["start-up"] + known["launch gaps"]

    @property
    def bound_by(self) -> tuple[str, float]:
        """The largest term that counts, and its seconds."""
        known = {name: value or 0.0 for name, value in self.terms.items()}
        in_turn, beside = self._order
        side = max(beside, key=lambda name: known[name])
        side_hidden = sum(known[name] for name in in_turn) >= known[side]
        hidden = beside if side_hidden else tuple(name for name in (*IN_TURN, *BESIDE) if name != side)
        counted = {name: value for name, value in known.items() if name not in hidden}
        name = max(counted, key=lambda name: counted[name])
        return name, counted[name]

    @property
    def _order(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Terms in turn, and those beside them."""
        if not self.kernel.overlapped:
            return IN_TURN, BESIDE
        return tuple(name for name in IN_TURN if name != "exponentials"), ("exponentials", *BESIDE)


def time_of(kernel: Kernel, rates: Rates) -> KernelTime:
    """The terms of a kernel on a device."""
    macs = rates.mma_macs if kernel.by_mma else rates.macs
    return KernelTime(
        kernel,
        {
            "tensor cores": kernel.macs / (macs * kernel.tensor_share) if macs else None,
            "exponentials": kernel.exponentials / rates.exponentials,
            "CUDA cores": kernel.fmas / kernel.fma_rate,
            "shared memory": kernel.shared_bytes / (rates.shared_bytes * kernel.shared_share),
            "L2": kernel.l2_bytes / rates.l2_bytes if rates.l2_bytes else None,
            "memory": kernel.memory_bytes / min(rates.memory_bytes * kernel.memory_share, kernel.memory_limit),
            "start-up": kernel.waves * kernel.wave_s,
            "launch gaps": kernel.launches * GAP_S,
        },
    )


def tensor_bytes(case: Case) -> tuple[int, int]:
    """Bytes of q, and of k, each of `case.seq` rows a head."""
    row = case.batch * case.seq * case.head_dim * BYTES_PER_ELEMENT[case.dtype]
    return case.heads * row, case.kv_heads * row


def scores(rows: int, block_m: int, block_n: int, causal: bool) -> int:
    """Scores of a head that tiles of `block_m` queries by `block_n` keys compute: whole tiles up to the diagonal."""
    if not causal:
        return -(-rows // block_m) * block_m * (-(-rows // block_n) * block_n)
    starts = range(0, rows, block_m)
    return sum(block_m * (-(-min(first + block_m, rows) // block_n) * block_n) for first in starts)
