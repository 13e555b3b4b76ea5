"""What runs in Dask's worker processes, called by name from the sweep's process; nothing here imports torch.

The functions that start and use the measuring process are tasks: they run in the worker's one task thread, which
lives as long as the worker, and with which the kernel ends the process.
"""

from __future__ import annotations

from distributed import get_worker

from mtabench.cluster.facts import Facts
from mtabench.cluster.measurer import MeasuringProcess, Outcome

_measurer: MeasuringProcess | None = None


def start(run_id: str, device: str) -> Facts:
    """Start the measuring process of a sweep in the place of an earlier one; what it is. Raises MtabenchError."""
    global _measurer
    if _measurer is not None:
        _measurer.stop()
    _measurer = MeasuringProcess(run_id, device)
    return _measurer.start()


def measure(request: bytes, run_id: str, topic: str) -> Outcome:
    """Measure a group; what the process works on becomes events of Dask's under `topic`."""
    worker = get_worker()
    if _measurer is None or _measurer.run_id != run_id:
        return Outcome(lost="another sweep took its worker")
    # Dask's messages hold plain texts, no kinds of them.
    return _measurer.measure(
        request, lambda text: worker.log_event(topic, {"worker": worker.address, "text": str(text)})
    )


def stop(run_id: str) -> None:
    """End the measuring process of a sweep, even in the middle of a group."""
    global _measurer
    if _measurer is not None and _measurer.run_id == run_id:
        _measurer.stop()
        _measurer = None
