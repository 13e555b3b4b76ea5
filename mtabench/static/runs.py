"""Compile for many targets at once, in processes of their own, and gather what comes of it in the order asked for."""

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

from mtabench.errors import MtabenchError
from mtabench.processes import ProcessEndedError, call_in_process, in_threads
from mtabench.static.compiling import Job, ShapeDone, Source, compile_job
from mtabench.static.limits import Limits
from mtabench.static.records import ALL, FAILED, Inspection, Kernel
from mtabench.static.shapes import Shape

LONGEST_S = 3600.0

# Called as a shape of a target is compiled: the target, the shape, its kernels.
Progress = Callable[[Limits, Shape, Sequence[Kernel]], None]


def inspect(
    targets: Sequence[Limits], shapes: Sequence[Shape], sources: Sequence[Source], *,
    names: Sequence[str] = (), progress: Progress = lambda *args: None,
) -> Inspection:  # fmt: skip
    """Compile the kernels that the sources launch; `names` keeps those that hold one.

    At most one process a CPU. A process that dies (a compiler may crash) costs the shapes that it had left: they have
    one failed row each. Raises MtabenchError if a tool is missing.
    """
    jobs = list(_jobs(targets, shapes, sources, tuple(names)))
    done: dict[tuple[str, Shape], ShapeDone] = {}
    for job, message in _results(jobs):
        if isinstance(message, str):
            raise MtabenchError(message)
        if isinstance(message, ShapeDone):
            done[job.limits.target, message.shape] = message
            progress(job.limits, message.shape, message.kernels)
        else:
            for shape in job.shapes:
                if (job.limits.target, shape) not in done:
                    lost = Kernel(job.limits.target, shape.name, ALL, FAILED, reason=str(message))
                    done[job.limits.target, shape] = ShapeDone(shape, (lost,), {})
                    progress(job.limits, shape, (lost,))
    ordered = [done[limits.target, shape] for limits in targets for shape in shapes]
    kernels = [kernel for found in ordered for kernel in found.kernels]
    toolchain = dict(sorted(item for found in ordered for item in found.toolchain.items()))
    return Inspection(kernels, shapes, toolchain, sorted(set().union(*(found.launched for found in ordered))))


def _jobs(
    targets: Sequence[Limits], shapes: Sequence[Shape], sources: Sequence[Source], names: tuple[str, ...]
) -> Iterator[Job]:
    """A target in few pieces, since each process imports torch anew, and in so many that all CPUs have work."""
    count = cpus()
    pieces = -(-count // len(targets)) if len(targets) < count else 1 + (len(targets) % count > 0)
    pieces = min(len(shapes), pieces)
    for limits in targets:
        for piece in range(pieces):
            yield Job(limits, tuple(shapes[piece::pieces]), tuple(sources), names)


def _results(jobs: Sequence[Job]) -> Iterator[tuple[Job, Any]]:
    """What the processes send, and the exception of one that died, as it comes."""
    free = threading.Semaphore(cpus())

    def compile_one(job: Job, give: Callable[[tuple[Job, Any]], None]) -> None:
        try:
            with free:
                call_in_process(compile_job, (job,), LONGEST_S, lambda message: give((job, message)))
        except (ProcessEndedError, TimeoutError) as error:
            give((job, error))

    return in_threads([partial(compile_one, job) for job in jobs])


def cpus() -> int:
    """CPUs that this process may use: the most processes at a time."""
    return len(os.sched_getaffinity(0))
