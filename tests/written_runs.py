"""Results files with samples that are given, for the tests of `mtabench compare`."""

import numpy as np
from changed_cases import with_changes

from mta_kernels.operation import Operation
from mtabench.measuring.timing import Measurement
from mtabench.problem.case import Case
from mtabench.results.rows import RunFacts, cell_row, sample_lines, timed_row
from mtabench.results.writer import Writer

ENVIRONMENT = {"device": "some, device", "driver": "1.2", "cuda": "13.0", "torch": "2.13.0", "triton": "3.6.0"}


def case(seq=64, impl="eager", **changes):
    base = Case("fwd", impl, Operation.of((6, 11), 16), "fp32", 1, 2, 2, seq, 16, None, "cpu")
    return with_changes(base, **changes)


def rounds(ms, noise=0.002, count=10, seed=0):
    """Samples around `ms`, ten a round."""
    return (ms * np.exp(np.random.default_rng(seed).normal(0, noise, (count, 10)))).tolist()


def write_run(path, cells, run_id="base", started="2026-01-02T03:04:05Z", cache="warm", run_delay=None, **environment):
    """Write a run: `cells` maps a case to its samples by round, or to its status and reason."""
    facts = RunFacts(run_id, started, ENVIRONMENT | environment)
    with Writer(path) as writer:
        for one, result in cells.items():
            if isinstance(result, tuple):
                writer.write([cell_row(one, facts, *result)])
            else:
                row = timed_row(one, facts, Measurement("cpu", cache, result, run_delay=run_delay), 1e-6, None)
                writer.write([row], sample_lines(one, facts, result))
    return path


WITH_TIME = {case(64): 1.0, case(128): 2.0, case(256): 4.0}


def write_pair(folder, base=None, head=None, **facts):
    """Write base.csv and head.csv: three cells each, and what is given instead or besides."""
    cells = {one: rounds(ms, seed=i) for i, (one, ms) in enumerate(WITH_TIME.items())}
    again = {one: rounds(ms, seed=9 + i) for i, (one, ms) in enumerate(WITH_TIME.items())}
    write_run(folder / "base.csv", cells | (base or {}))
    given = {"run_id": "head", "started": "2026-01-03T03:04:05Z"} | facts
    left = {one: result for one, result in (again | (head or {})).items() if result is not None}
    write_run(folder / "head.csv", left, **given)
