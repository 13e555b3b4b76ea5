"""Implementations that end a worker, for sweeps on several workers, besides `planted_cells`.

`plant` registers them in this process. Measuring processes do so by `planted_site/sitecustomize.py`.
"""

import os
import signal
import sys
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import planted_cells

from mtabench import registry

broken = False
FOLDER = Path(__file__).parent
OWN = ("kills-at-16", "crashes-at-32", "breaks-at-64", "kills-once", "waits-at-16")
FLAG = "MTABENCH_TEST_FLAG"  # a file that `kills-once` makes before it kills, and for which `waits-at-16` waits


def kill_worker():
    """Dask's, whose child measures."""
    os.kill(os.getppid(), signal.SIGKILL)
    time.sleep(1000)


def kill_once():
    """The first process that comes here; several may come at the same time."""
    with suppress(FileExistsError), Path(os.environ[FLAG]).open("x") as flag:
        flag.write(f"{min(os.sched_getaffinity(0))}")
        flag.flush()
        os.kill(os.getpid(), signal.SIGKILL)


def break_device():
    """As a kernel that breaks the GPU's context: nothing works in this process afterwards."""
    global broken
    broken = True
    raise RuntimeError("planted")


def build(case, inputs):
    closure = registry.find("eager").build(case, inputs)
    if case.impl == "kills-at-16" and case.seq == 16:
        return kill_worker
    if case.impl == "crashes-at-32" and case.seq == 32:
        return planted_cells.crash
    if case.impl == "breaks-at-64" and case.seq == 64:
        return break_device
    if case.impl == "kills-once":
        kill_once()
    if case.impl == "waits-at-16" and case.seq == 16:
        while not Path(os.environ[FLAG]).exists():
            time.sleep(0.05)
    return closure


def implementations():
    """The registry's, and the planted ones."""
    eager = registry.find("eager")
    own = (replace(eager, name=name, build=build) for name in OWN)
    return (*planted_cells.implementations(), *own)


def plant():
    """Register them here, and measure with a short warm-up and made-up ceilings."""
    from mtabench.measuring import timing
    from mtabench.measuring.ceilings import Ceilings
    from mtabench.sweeps import sweep

    registry.IMPLEMENTATIONS = implementations()
    timing.WARM_UP_SECONDS = 0.05
    sweep.environment.device_works = lambda device: not broken
    sweep.measure_ceilings = lambda device, dtype: Ceilings(10.0, 0.1, 12.0)


def environment():
    """For a process whose workers have them."""
    return os.environ | {"PYTHONPATH": os.pathsep.join([str(FOLDER / "planted_site"), *filter(None, sys.path)])}
