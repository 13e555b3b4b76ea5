"""What runs in Dask's worker processes, called by name from the sweep's process; nothing here imports torch.

The functions that start and use the measuring process are tasks: they run in the worker's one task thread, which
lives as long as the worker, and with which the kernel ends the process.
"""

from distributed import get_worker

from mtabench.cluster.facts import Facts
from mtabench.cluster.local import LocalWorker
from mtabench.sweeps.measuring_process import Outcome

_measurer: LocalWorker | None = None  # its name is the sweep


def start(run_id: str, device: str) -> Facts:
    """Start the measuring process of a sweep in the place of an earlier one; what it is. Raises MtabenchError."""
    return _of(run_id, device).start()


def measure(run_id: str, device: str, request: bytes) -> Outcome:
    """Measure a group; what the process works on becomes events of Dask's."""
    worker = get_worker()

    def doing(text: str) -> None:  # Dask's messages hold plain texts, no kinds of them
        worker.log_event(run_id, {"worker": worker.address, "text": str(text)})

    return _of(run_id, device).measure(request, doing)


def stop(run_id: str) -> None:
    """End the measuring process of a sweep, even in the middle of a group."""
    global _measurer
    if _measurer is not None and _measurer.name == run_id:
        _measurer.stop()
        _measurer = None


def _of(run_id: str, device: str) -> LocalWorker:
    """What measures for this sweep here; another sweep's process ends, since both would share the device."""
    global _measurer
    if _measurer is None or _measurer.name != run_id:
        if _measurer is not None:
            _measurer.stop()
        _measurer = LocalWorker(run_id, device, {})
    return _measurer
