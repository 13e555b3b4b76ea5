"""What a worker does, in a task of Dask's or in a thread of the sweep's process; nothing here imports torch.

Workers on this machine are a measuring process each: one a GPU or a share of the cores.

The kernel ends a measuring process with the thread that started it: Dask's worker has one thread for all its tasks.
"""

import os
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

from mtabench.cluster.facts import Facts, Gpu, facts_here, gpus_of_machine
from mtabench.errors import MtabenchError, UsageError
from mtabench.options import ClusterOptions
from mtabench.processes import ProcessEndedError
from mtabench.sweeps.measuring_process import CORES, MeasuringProcess, Outcome, pin_cores

processes: dict[str, tuple[str, MeasuringProcess]] = {}  # by worker, each with the sweep that it is for


@dataclass(frozen=True, slots=True)
class Measurer:
    """Measures for one sweep: in a process on "cuda" or "cpu", with variables of its own.

    `name` is "GPU 0" or "CPU 0,1" on this machine, and the address of a worker of Dask's.
    """

    run_id: str
    name: str
    device: str
    environment: Mapping[str, str] = field(default_factory=dict)

    def start(self) -> Facts:
        """Start the process; what it is. Raises MtabenchError if it cannot start, or has no such device."""
        received: list[Facts | MtabenchError] = []
        try:
            self._process().call(send_facts, (self.device,), received.append)
        except ProcessEndedError as error:
            raise MtabenchError(f"the measuring process does not start: {error}") from None
        (facts,) = received
        if isinstance(facts, MtabenchError):
            raise facts
        return facts

    def measure(self, request: bytes, doing: Callable[[str], None] | None = None) -> Outcome:
        """Measure a packed Request; `doing` receives what the process works on, or it becomes events of Dask's."""
        return self._process().measure(request, doing or self._log)

    def _log(self, text: str) -> None:
        from distributed import get_worker

        # Dask's messages hold plain texts, no kinds of them.
        get_worker().log_event(self.run_id, {"worker": self.name, "text": str(text)})

    def _process(self) -> MeasuringProcess:
        """The process of this sweep here; another sweep's ends, since both would share the device."""
        run_id, process = processes.get(self.name) or ("", MeasuringProcess())
        if run_id != self.run_id:
            process.stop()
            process = MeasuringProcess(self.environment)
            processes[self.name] = self.run_id, process
        return process


def stop(run_id: str) -> None:
    """End the measuring processes of a sweep for good, even in the middle of a group."""
    for its, process in list(processes.values()):
        if its == run_id:
            process.stop()


def send_facts(send: Callable[[object], None], device: str) -> None:
    """In the measuring process: send what it is, or why it cannot measure on "cuda" or "cpu"."""
    pin_cores()
    try:
        send(facts_here(device))
    except MtabenchError as error:
        send(error)


class LocalWorkers:
    """The workers that --gpus or --workers ask for; none starts before it has a task.

    `device_name` is empty if it is not known yet. Raises UsageError for GPUs or cores that are not there.
    """

    def __init__(self, asked: ClusterOptions, run_id: str) -> None:
        self.device_name = ""
        if asked.workers is not None:
            chosen = _shares(asked.workers)
        else:
            gpus = _chosen(asked.gpus or "all")
            self.device_name = gpus[0].name
            # By their UUIDs: CUDA may count GPUs in another order than nvidia-smi.
            chosen = {f"GPU {gpu.index}": {"CUDA_VISIBLE_DEVICES": gpu.uuid} for gpu in gpus}
        device = "cuda" if asked.workers is None else "cpu"
        self._measurers = {name: Measurer(run_id, name, device, variables) for name, variables in chosen.items()}
        self._threads = ThreadPoolExecutor(len(chosen))
        self._run_id = run_id

    def there(self) -> Collection[str]:
        """The names of all workers."""
        return self._measurers.keys()

    def start(self, name: str) -> Future[Facts]:
        """See Measurer.start."""
        return self._threads.submit(self._measurers[name].start)

    def measure(self, name: str, request: bytes, doing: Callable[[str], None]) -> Future[Outcome]:
        """See Measurer.measure."""
        return self._threads.submit(self._measurers[name].measure, request, doing)

    def stop(self) -> None:
        """End the measuring processes."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        stop(self._run_id)


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


def _shares(workers: int) -> dict[str, dict[str, str]]:
    """Equal shares of the cores; what is left over is left alone, so that all workers measure on the same."""
    cores = sorted(os.sched_getaffinity(0))
    if workers > len(cores):
        raise UsageError(
            f"--workers {workers} is more than the {len(cores)} cores of this machine; give at most that many"
        )
    share = len(cores) // workers
    named = [",".join(map(str, cores[number * share : (number + 1) * share])) for number in range(workers)]
    return {f"CPU {mine}": {CORES: mine, "OMP_NUM_THREADS": str(share)} for mine in named}
