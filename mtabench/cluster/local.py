"""Workers on this machine, a measuring process each: one a GPU or a share of the cores."""

import os
from collections.abc import Callable, Mapping

from mtabench.cluster.facts import Facts, Gpu, facts_here, gpus_of_machine
from mtabench.cluster_options import ClusterOptions
from mtabench.errors import MtabenchError, UsageError
from mtabench.processes import ProcessEndedError
from mtabench.sweeps.measuring_process import CORES, MeasuringProcess, pin_cores


class LocalWorker(MeasuringProcess):
    """A worker on this machine; `device_name` is empty if it is not known yet."""

    is_there = True

    def __init__(self, name: str, device: str, environment: Mapping[str, str], device_name: str = "") -> None:
        super().__init__(environment)
        self.name, self.device_name = name, device_name
        self._device = device

    def start(self) -> Facts:
        """Start the process; what it is. Raises MtabenchError if it cannot start, or has no such device."""
        said: list[Facts | MtabenchError] = []
        try:
            self.call(send_facts, (self._device,), said.append)
        except ProcessEndedError as error:
            raise MtabenchError(f"the measuring process does not start: {error}") from None
        if not isinstance(said[0], Facts):
            raise said[0]
        return said[0]


def send_facts(send: Callable[[object], None], device: str) -> None:
    """In the measuring process: send what it is, or why it cannot measure on "cuda" or "cpu"."""
    pin_cores()
    try:
        send(facts_here(device))
    except MtabenchError as error:
        send(error)


def local_workers(asked: ClusterOptions) -> list[LocalWorker]:
    """The workers that --gpus or --workers ask for; raises UsageError for GPUs or cores that are not there."""
    if asked.workers is not None:
        return _shares(asked.workers)
    # By their UUIDs: CUDA may count GPUs in another order than nvidia-smi.
    return [
        LocalWorker(f"GPU {gpu.index}", "cuda", {"CUDA_VISIBLE_DEVICES": gpu.uuid}, gpu.name)
        for gpu in _chosen(asked.gpus or "all")
    ]


def _chosen(text: str) -> list[Gpu]:
    """The GPUs named by `all` or by indices as nvidia-smi has them."""
    there = {gpu.index: gpu for gpu in gpus_of_machine()}
    if not there:
        raise UsageError(
            f"--gpus {text} cannot be had, since nvidia-smi lists no GPU here that CUDA_VISIBLE_DEVICES lets through; "
            "for processes that share the CPU give --workers 2 --device cpu"
        )
    if text.strip().lower() == "all":
        return list(there.values())
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and len(part) < 5 for part in parts):
        raise UsageError(f"--gpus {text!r} cannot be read; expected all, or numbers of GPUs such as 0,2")
    missing = [part for part in parts if int(part) not in there]
    if missing:
        raise UsageError(
            f"--gpus {text}: there is no GPU {missing[0]} here; expected all, or some of "
            f"{', '.join(map(str, there))}, as nvidia-smi numbers them"
        )
    return [there[number] for number in dict.fromkeys(map(int, parts))]


def _shares(workers: int) -> list[LocalWorker]:
    """Equal shares of the cores; what is left over is left alone, so that all workers measure on the same."""
    cores = sorted(os.sched_getaffinity(0))
    if workers > len(cores):
        raise UsageError(
            f"--workers {workers} is more than the {len(cores)} cores of this machine; give at most that many"
        )
    share = len(cores) // workers
    named = [",".join(map(str, cores[number * share : (number + 1) * share])) for number in range(workers)]
    return [LocalWorker(f"CPU {mine}", "cpu", {CORES: mine, "OMP_NUM_THREADS": str(share)}) for mine in named]
