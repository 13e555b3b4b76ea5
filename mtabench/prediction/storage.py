"""What one call of an implementation keeps in memory and moves through it, by its shape alone."""

from dataclasses import dataclass

from mtabench.prediction.memory import expected_memory_bytes, input_bytes
from mtabench.prediction.roofline import planned_bytes
from mtabench.problem.case import BYTES_PER_ELEMENT, Case
from mtabench.problem.operations import PLAIN
from mtabench.problem.work import bytes_moved, executed_flops
from mtabench.registry import implementation_of


@dataclass(frozen=True, slots=True)
class Storage:
    """Bytes of one call: inputs and the peak beyond them; beside them all `N x N` scores once.

    `traffic` is read from and written to memory, None where that is not modelled: each kernel takes what it reads from
    there once, and finds it in the caches when it reads it again. `flops` are executed.
    """

    score_matrix: int
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
    matrix = case.batch * case.heads * rows * case.seq * BYTES_PER_ELEMENT[case.dtype]
    beyond, traffic = expected_memory_bytes(case, work), planned_bytes(case)
    if case.op == PLAIN and beyond > matrix:
        traffic = None  # kernels of one structure of arguments, whose tensors a plan counts once
    elif work == "tiled" or (work == "overlapped" and case.pass_ == "fwd"):
        traffic = traffic or bytes_moved(case)
    return Storage(matrix, beyond, input_bytes(case), traffic, executed_flops(case, work))
