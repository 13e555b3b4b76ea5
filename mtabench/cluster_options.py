"""The options of a sweep that ask for workers, checked before anything is started or looked for."""

from dataclasses import asdict, dataclass, fields
from importlib.util import find_spec

from mtabench.errors import UsageError
from mtabench.options import WHOLE, Options, Text, crew


@dataclass(frozen=True, slots=True)
class ClusterOptions:
    """--gpus, --workers and --scheduler as typed; None where nothing was typed."""

    gpus: Text = crew("Spread the sweep over GPUs of this machine: all, or numbers such as 0,2.")
    workers: int | None = crew("With --device cpu: so many processes, each on its share of the cores.", **WHOLE)
    scheduler: Text = crew(
        "Spread the sweep over the Dask cluster at tls://HOST:PORT. Needs [cluster]; docs/cluster.md."
    )

    @property
    def anything(self) -> bool:
        """Whether other processes than this one are to measure."""
        return self != ClusterOptions()

    def device(self, options: Options) -> str | None:
        """ "cuda" or "cpu", whatever this machine has; None if this process measures, on what it finds.

        Raises UsageError for options that exclude or need each other, and without Dask.
        """
        given = [name for name, value in asdict(self).items() if value is not None]
        if not given:
            return None
        if len(given) > 1:
            raise UsageError(
                f"--{given[0]} and --{given[1]} exclude each other: --gpus and --workers start workers on this "
                "machine, --scheduler uses those of a cluster that is there"
            )
        if options.isolate:
            raise UsageError(
                "--isolate starts a process a cell, and a worker measures all cells of a shape in one; drop --isolate "
                f"or --{given[0]}"
            )
        if self.gpus is not None and options.device == "cpu":
            raise UsageError(
                f"--gpus {self.gpus} measures on GPUs and --device cpu on the CPU; for processes that share the CPU "
                "give --workers 2 --device cpu"
            )
        if self.workers is not None and options.device != "cpu":
            raise UsageError(
                f"--workers {self.workers} shares the cores of this CPU and needs --device cpu; GPUs are for --gpus all"
            )
        if self.workers is not None and self.workers < 1:
            raise UsageError(f"--workers is {self.workers}; it must be 1 or more")
        if self.scheduler is not None and find_spec("distributed") is None:
            raise UsageError(
                "--scheduler needs the package distributed, which is not installed; pip install 'mtabench[cluster]'"
            )
        return "cpu" if options.device == "cpu" else "cuda"


NAMES = tuple(field.name for field in fields(ClusterOptions))
