"""Workers on this machine: a Dask cluster that lives as long as the sweep, one worker a GPU or a share of the cores."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, Pipe
from typing import TYPE_CHECKING

from mtabench.cluster.facts import Gpu, fits, gpus_of_machine
from mtabench.cluster.measurer import CORES
from mtabench.cluster_options import ClusterOptions
from mtabench.errors import MtabenchError, UsageError
from mtabench.processes import die_with_parent, kill, last_line, start_process

if TYPE_CHECKING:
    from distributed import Security

RESOURCES = {"cuda": "GPU", "cpu": "CPU"}


@dataclass(frozen=True, slots=True)
class Local:
    """One worker to start: what sets its process apart, and the name of its device, empty if it is not known yet."""

    environment: Mapping[str, str]
    device: str


def local_workers(asked: ClusterOptions) -> list[Local]:
    """The workers that --gpus or --workers ask for; raises UsageError for GPUs or cores that are not there."""
    if asked.workers is not None:
        return _shares(asked.workers)
    # By their UUIDs: CUDA may count GPUs in another order than nvidia-smi.
    return [Local({"CUDA_VISIBLE_DEVICES": gpu.uuid}, gpu.name) for gpu in _chosen(asked.gpus or "all", asked.on)]


@contextmanager
def local_cluster(workers: Sequence[Local], device: str) -> Iterator[tuple[str, Security]]:
    """The address of a scheduler of these workers, and the credentials for it; it ends with the context.

    Each worker has its device as a resource that it has once. All talk by TLS, with a certificate that is made for
    them and never leaves their memory: others on this machine can reach the ports, and do nothing with them.

    The scheduler, and what starts workers anew, run in a process of their own: beside this one's work they answer
    in time, and Ctrl-C at the terminal does not reach them. Raises MtabenchError if they cannot be started.
    """
    ours, theirs = Pipe()
    with ours, tempfile.TemporaryFile() as output, tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        with theirs:
            process = start_process(f"{__name__}:serve", theirs.fileno(), output)
        try:
            ours.send((workers, device, folder))
            try:
                yield ours.recv()
            except EOFError:
                raise MtabenchError(f"the workers cannot be started{last_line(output)}") from None
        finally:
            kill(process)


def serve(descriptor: int) -> None:
    """In that process: start scheduler and workers, and wait to be killed."""
    from distributed import Nanny, Scheduler, Security, SpecCluster

    die_with_parent()
    with Connection(descriptor) as pipe:
        workers, device, folder = pipe.recv()
        security = Security.temporary()
        common = {"host": "127.0.0.1", "protocol": "tls", "security": security, "dashboard": False}
        options = common | {
            "nthreads": 1,
            "memory_limit": 0,  # Dask would pause or end a worker above it
            "resources": {RESOURCES[device]: 1},
            "local_directory": folder,
        }
        cluster = SpecCluster(
            scheduler={"cls": Scheduler, "options": common | {"dashboard_address": "127.0.0.1:0"}},
            workers={
                number: {"cls": Nanny, "options": options | {"env": dict(worker.environment)}}
                for number, worker in enumerate(workers)
            },
            security=security,
        )
        pipe.send((cluster.scheduler_address, security))
        with suppress(EOFError):
            pipe.recv()


def _chosen(text: str, on: str | None) -> list[Gpu]:
    """The GPUs named by `all` or by indices as nvidia-smi has them, those whose name has `on` in it."""
    there = {gpu.index: gpu for gpu in gpus_of_machine()}
    if not there:
        raise UsageError(
            f"--gpus {text} cannot be had, since nvidia-smi lists no GPU here that CUDA_VISIBLE_DEVICES lets through; "
            "for processes that share the CPU give --workers 2 --device cpu"
        )
    if text.strip().lower() == "all":
        gpus = list(there.values())
    else:
        parts = [part.strip() for part in text.split(",")]
        if not all(part.isdecimal() and len(part) < 5 for part in parts):
            raise UsageError(f"--gpus {text!r} cannot be read; expected all, or numbers of GPUs such as 0,2")
        missing = [part for part in parts if int(part) not in there]
        if missing:
            raise UsageError(
                f"--gpus {text}: there is no GPU {missing[0]} here; expected all, or some of "
                f"{', '.join(map(str, there))}, as nvidia-smi numbers them"
            )
        gpus = [there[number] for number in dict.fromkeys(map(int, parts))]
    chosen = [gpu for gpu in gpus if fits(on, gpu.name)]
    if not chosen:
        raise UsageError(f"--on {on} fits none of these GPUs: {', '.join(dict.fromkeys(gpu.name for gpu in gpus))}")
    return chosen


def _shares(workers: int) -> list[Local]:
    """Equal shares of the cores; what is left over is left alone, so that all workers measure on the same."""
    cores = sorted(os.sched_getaffinity(0))
    if workers > len(cores):
        raise UsageError(
            f"--workers {workers} is more than the {len(cores)} cores of this machine; give at most that many"
        )
    share = len(cores) // workers
    shares = [cores[number * share : (number + 1) * share] for number in range(workers)]
    return [Local({CORES: ",".join(map(str, mine)), "OMP_NUM_THREADS": str(share)}, "") for mine in shares]
