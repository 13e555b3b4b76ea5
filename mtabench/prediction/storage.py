"""What one call of an implementation keeps in memory and moves through it, by its shape alone."""

from __future__ import annotations

from dataclasses import dataclass

from mtabench.prediction.memory import expected_memory_bytes, input_bytes, stored_by, stored_scores
from mtabench.prediction.roofline import planned_bytes
from mtabench.problem.case import BYTES_PER_ELEMENT, Case
from mtabench.problem.rungs import traffic
from mtabench.problem.work import bytes_moved, executed_flops
from mtabench.registry import implementation_of


@dataclass(frozen=True, slots=True)
class Storage:
    """Bytes of one call: inputs, the peak beyond them, and what of it are scores; beside them all `N x N` scores once.

    `traffic` is read from and written to memory, None where that is not modelled: each kernel takes what it reads from
    there once, and finds it in the caches when it reads it again. `flops` are executed.
    """

    score_matrix: int
    scores: int
    beyond: int
    inputs: int
    traffic: float | None
    flops: int

    @property
    def needed(self) -> int:
        """The peak with the inputs."""
        return self.inputs + self.beyond

    @property
    def intensity(self) -> float | None:
        """FLOPs executed a byte of traffic."""
        return self.flops / self.traffic if self.traffic else None


def storage_of(case: Case) -> Storage:
    """What a cell stores and moves."""
    work = implementation_of(case).work
    rows = 1 if case.pass_ == "decode" else case.seq
    return Storage(
        score_matrix=case.batch * case.heads * rows * case.seq * BYTES_PER_ELEMENT[case.dtype],
        scores=stored_scores(case, work), beyond=expected_memory_bytes(case, work), inputs=input_bytes(case),
        traffic=_traffic(case, work), flops=executed_flops(case, work),
    )  # fmt: skip


def _traffic(case: Case, work: str) -> float | None:
    if rung := stored_by(case):
        return traffic(case, rung)
    once = work == "tiled" or (work == "overlapped" and case.pass_ == "fwd")
    return planned_bytes(case) or (bytes_moved(case) if once else None)
