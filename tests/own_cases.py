"""Cases of functions in files, loaded as --impl loads them, and what a sweep says of them before it times them."""

import shlex
import sys
from pathlib import Path

from mta_kernels.operation import Operation
from mtabench import registry
from mtabench.checking.judge import Judge, results_of
from mtabench.problem.case import Case
from mtabench.problem.inputs import make_inputs
from mtabench.registry import chosen, implementation_of

OWN = Path(__file__).with_name("own_kernels.py")
EXAMPLES = Path(__file__).parents[1] / "docs/examples"
TINY = shlex.split("--seq 32 --head-dim 16 --heads 2 --kv-heads 1 --device cpu --rounds 2 --time-limit 1 --no-plot")


def forget(monkeypatch):
    """Have what a test loads, and finds beside it, gone after it."""
    monkeypatch.setattr(registry, "_LOADED", {})
    monkeypatch.setattr(sys, "path", [*sys.path])


def own(function, pass_="fwd", **changes):
    """A case of a function of own_kernels.py, which is loaded."""
    (entry,) = chosen([f"own={OWN}:{function}"])
    return case_of(entry, pass_, **changes)


def case_of(entry, pass_="fwd", device="cpu", **changes):
    taps = (3, 4) if entry.op == "conv-attention" else None
    return Case(pass_, entry.name, Operation.of(taps, 16), "fp32", 1, 4, 2, changes.get("seq", 65), 16, None, device)


def check_timed(judge, closure, one, inputs):
    """Raise WrongResultError if a closure that was right is wrong as it is timed."""
    watch = judge.watch()
    watch.change()
    watch.change_gradient()
    watch.look([results_of(closure, one, inputs)])
    watch.end(judged=True)


def judged(one, seed=0):
    inputs = make_inputs(one, seed)
    return Judge(one, inputs, seed).first_of(implementation_of(one).build(one, inputs), one)
