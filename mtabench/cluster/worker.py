"""What a worker does, in a task of Dask's or in a thread of the sweep's process; nothing here imports torch.

The kernel ends a measuring process with the thread that started it: Dask's worker has one thread for all its tasks.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from mtabench.cluster.facts import Facts, facts_here
from mtabench.errors import MtabenchError
from mtabench.processes import ProcessEndedError
from mtabench.sweeps.measuring_process import MeasuringProcess, Outcome, pin_cores

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
        """Measure a packed Request; `doing` is given what the process works on, or it becomes events of Dask's."""
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
