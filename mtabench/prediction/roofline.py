"""Where a timed cell stands below the roofline: its work, its bytes, the least time they take, what is left to win."""

from dataclasses import dataclass

from mtabench.prediction.memory import expected_memory_bytes, input_bytes
from mtabench.prediction.predict import moved_bytes, unpredicted
from mtabench.problem.case import BYTES_PER_ELEMENT, Case
from mtabench.problem.operations import PLAIN
from mtabench.problem.work import bytes_moved, executed_flops, useful_flops
from mtabench.registry import implementation_of, is_known


@dataclass(frozen=True, slots=True)
class Standing:
    """A cell beside what its device can do at most; FLOPs, bytes and milliseconds of one call.

    `useful_flops` and `least_bytes` are what the operation needs in any implementation. `executed_flops` and
    `model_bytes` (None without a model) are this implementation's, and a profiler counted `counted_bytes`. `roof_ms` is
    the least time of the first two at the device's measured ceilings, `own_roof_ms` of the others: the gain left
    without another algorithm.
    """

    median_ms: float
    useful_flops: int
    executed_flops: int
    least_bytes: int
    model_bytes: float | None
    counted_bytes: float | None
    roof_ms: float
    own_roof_ms: float
    compute_bound: bool

    @property
    def intensity(self) -> float:
        """Useful FLOPs a byte that must move."""
        return self.useful_flops / self.least_bytes

    @property
    def fraction(self) -> float:
        """Of the roofline, 1 at best."""
        return self.roof_ms / self.median_ms

    @property
    def speedup_left(self) -> float:
        """How many times faster the operation could be here at most."""
        return self.median_ms / self.roof_ms

    @property
    def own_speedup_left(self) -> float:
        """How many times faster this algorithm could be here at most."""
        return self.median_ms / self.own_roof_ms


def standing(
    case: Case, median_ms: float, matmul_tflops: float, memory_gbytes_s: float, counted_bytes: float | None = None
) -> Standing:
    """The standing of a cell on a device with these measured ceilings; of memory the one that holds for the cell."""
    useful = useful_flops(case)
    # Results may name a function of a file, which this does not load: useful work is what is known then.
    executed = executed_flops(case, implementation_of(case).work) if is_known(case.impl) else useful
    least, modelled = bytes_moved(case), planned_bytes(case)
    compute_ms, memory_ms = useful / matmul_tflops / 1e9, least / memory_gbytes_s / 1e6
    own_bytes = counted_bytes or modelled or least
    return Standing(
        median_ms=median_ms, useful_flops=useful, executed_flops=executed, least_bytes=least, model_bytes=modelled,
        counted_bytes=counted_bytes, roof_ms=max(compute_ms, memory_ms),
        own_roof_ms=max(executed / matmul_tflops / 1e9, own_bytes / memory_gbytes_s / 1e6),
        compute_bound=compute_ms >= memory_ms,
    )  # fmt: skip


def planned_bytes(case: Case) -> float | None:
    """Bytes that an implementation moves through device memory by its plan, None where there is none."""
    if case.device != "cuda" or not is_known(case.impl) or unpredicted(case):
        return None
    if not implementation_of(case).planned:
        return bytes_moved(case)
    from mtabench.prediction.plans import plan_of

    return moved_bytes(case, plan_of(case).calls)


@dataclass(frozen=True, slots=True)
class Storage:
    """Bytes of one call: inputs and the peak beyond them; beside them all `N x N` scores once.

    `traffic` is read from and written to memory, None where that is not modelled. Each kernel reads its data from
    memory once, and finds it in the caches when it reads it again. `flops` are executed.
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
