"""`mtabench verify --fuzz`: which operations and backends, the workers, a line a failure, and the totals."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from mtabench.commands import WRONG_RESULT
from mtabench.environment import describe, let_triton_interpret, resolve_device
from mtabench.errors import NothingCheckedError, UsageError
from mtabench.fuzzing.draws import OPERATIONS, Target, draw
from mtabench.fuzzing.totals import Totals, check_totals_file
from mtabench.fuzzing.workers import Ended, run_workers
from mtabench.problem import axes
from mtabench.prose import all_or_one, plural
from mtabench.results.outputs import check_folder, named

MAX_JOBS = 256


def run(
    seconds: float, op: str | None, impl: str | None, device: str, seed: int | None, case: int | None, jobs: int,
    out: Path | None,
) -> int:  # fmt: skip
    """Run random cases for some seconds, or one case by its number; WRONG_RESULT if any failed.

    Raises UsageError for options that do not fit, and NothingCheckedError where no case ran.
    """
    _check(seconds, seed, case, jobs, out)
    where = resolve_device(device)
    let_triton_interpret(where)
    targets = _targets(op, impl, where)
    if case is not None:
        return WRONG_RESULT * _one(seed or 0, case, targets, where)
    seed = int(time.time()) if seed is None else seed
    names = ", ".join(" ".join(target) for target in targets)
    print(f"fuzz: seed {seed}, {names} on {where}, {plural(jobs, 'job')}, {seconds:g} s", flush=True)
    totals = Totals()
    for ended in run_workers(seed, targets, where, jobs, seconds):
        failed = bool(ended.wrong)
        totals.add(ended.op, ended.backend, ended.pass_, refused=ended.refused, failed=failed, seconds=ended.seconds)
        if failed:
            print(_line(ended, seed, where), flush=True)
    if not totals.cases:
        raise NothingCheckedError(f"no case ran in {seconds:g} s; give --fuzz more time")
    print("\n".join(totals.lines()))
    if out is not None:
        date = f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ}"
        totals.append_to(out, {**describe(where), "date": date, "seed": seed})
        print(f"totals: {named(out)}")
    failures = totals.failures
    print(f"{failures} of {totals.cases} cases failed" if failures else f"{all_or_one(totals.cases, 'case')} passed")
    return WRONG_RESULT * (failures > 0)


def _one(seed: int, number: int, targets: Sequence[Target], device: str) -> bool:
    """One case, with all that was drawn for it."""
    from mtabench.fuzzing.trial import prepare, try_case

    drawn = draw(seed, number, targets, device)
    print(drawn.described(), flush=True)
    prepare(device)
    outcome = try_case(drawn)
    for wrong in outcome.wrong:
        print(f"{wrong.check}: {wrong.text}")
    if not outcome.wrong:
        print("refused, as it should be" if outcome.refused else "passed")
    return bool(outcome.wrong)


def _line(ended: Ended, seed: int, device: str) -> str:
    """What is wrong, and what to type to see it again."""
    more = f" (and {len(ended.wrong) - 1} more)" if len(ended.wrong) > 1 else ""
    again = f"mtabench verify --fuzz 0 --seed {seed} --case {ended.number}"
    again += f" --op {ended.op} --impl {ended.backend} --device {device}"
    found = f"{ended.op} {ended.backend} {ended.pass_}: {' '.join(ended.wrong[0].split())}"
    return f"FAILED {found}{more} | {again}"


def _check(seconds: float, seed: int | None, case: int | None, jobs: int, out: Path | None) -> None:
    if not (seconds >= 0 and math.isfinite(seconds)):
        raise UsageError(f"--fuzz is {seconds:g}; expected seconds, such as 600")
    if seconds == 0 and case is None:
        raise UsageError("--fuzz 0 runs one case alone: give its number with --case, or more seconds")
    if case is not None and (case < 0 or seed is None):
        raise UsageError(
            f"--case {case} is one of a seed's cases from 0 on; give --seed and --case of a failure's line"
        )
    if seed is not None and seed < 0:
        raise UsageError(f"--seed is {seed}; expected a whole number from 0 on")
    if not 1 <= jobs <= MAX_JOBS:
        raise UsageError(f"--jobs is {jobs}; expected 1 to {MAX_JOBS} processes")
    if out is not None:
        if case is not None:
            raise UsageError("--out takes the totals of a fuzz, and --case runs one case; leave out one of them")
        check_totals_file(out)
        check_folder(out)


def _targets(op: str | None, impl: str | None, device: str) -> list[Target]:
    """The backends of operations asked for, or all fused ones, that can run on this machine."""
    ops = axes.parse_names(op, "--op") if op is not None else list(OPERATIONS)
    for name in ops:
        if name not in OPERATIONS:
            raise UsageError(f"--fuzz has no cases for --op {name!r}; expected one or more of {', '.join(OPERATIONS)}")
    asked = axes.parse_names(impl, "--impl") if impl is not None else None
    known = dict.fromkeys(backend for name in ops for backend in OPERATIONS[name].backends)
    for backend in asked or ():
        if backend not in known:
            raise UsageError(f"--fuzz has no cases for {backend!r}; expected one or more of {', '.join(known)}")
    wanted = [
        Target(name, backend)
        for name in ops
        for backend in (OPERATIONS[name].usual[device] if asked is None else asked)
        if backend in OPERATIONS[name].backends
    ]
    refusals = {backend: _why_not(backend, device) for _, backend in wanted}
    for backend, reason in refusals.items():
        if reason is not None:
            print(f"{backend} not checked: {reason}")
    found = [target for target in wanted if refusals[target.backend] is None]
    if not found:
        raise NothingCheckedError("nothing was checked: no implementation that was asked for can run here")
    return found


def _why_not(backend: str, device: str) -> str | None:
    """Why no case of a backend can run here, or None."""
    if backend == "auto":
        return None
    import torch

    from mta_kernels.conv_attention import unsupported
    from mtabench.fuzzing.calls import BACKENDS

    dtype = torch.float32 if device == "cpu" else torch.float16
    typical: dict[str, Any] = {"device": device, "dtype": dtype, "head_dim": 64, "query_taps": 1, "key_taps": 1}
    return unsupported(BACKENDS.get(backend, backend), **typical)
