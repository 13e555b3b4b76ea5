"""Implementations that crash, hang or are wrong, and a `twin` of eager, for isolated cells.

A test that puts `measure_group` in the place of the real one has them registered in the processes of its cells.
"""

import os
import signal
import time
from dataclasses import replace

from mtabench import registry
from mtabench.measuring import timing
from mtabench.measuring.ceilings import Ceilings
from mtabench.sweeps import measuring_process, sweep

real_measure_group = measuring_process.measure_group


def crash():
    os.kill(os.getpid(), signal.SIGSEGV)


def hang():
    time.sleep(1000)


def build(case, inputs):
    closure = registry.find("eager").build(case, inputs)
    planted = {"crashes": crash, "hangs": hang, "wrong": lambda: closure() * 2}
    return planted.get(case.impl, closure)


def changed(name, **fields):
    """The registry's, with other fields of one of them, which is alone in its name then."""
    one = registry.find(name)
    return tuple(
        replace(one, **fields) if other is one else other
        for other in registry.IMPLEMENTATIONS
        if other is one or other.name != name
    )


def implementations():
    """The registry's, and the planted ones."""
    eager = registry.find("eager")
    names = ("crashes", "hangs", "wrong", "twin")
    return (*registry.IMPLEMENTATIONS, *(replace(eager, name=name, build=build) for name in names))


def measure_group(send, *arguments):
    registry.IMPLEMENTATIONS = implementations()
    sweep.measure_ceilings = lambda device, dtype: Ceilings(10.0, 0.1, 12.0)
    timing.WARM_UP_SECONDS = 0.05
    real_measure_group(send, *arguments)
