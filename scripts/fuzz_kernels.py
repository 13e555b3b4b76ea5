"""Random cases of the kernels, held to a definition in float64: docs/fuzzing.md.

    PYTHONPATH=.:kernels python3 scripts/fuzz_kernels.py --seconds 600 --jobs 14 --op mta --pass decode --out fuzz.csv

A case that fails prints one line with the command that repeats it. The exit code is 4 if any did.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

sys.path.insert(1, str(Path(__file__).parents[1] / "tests"))

from fuzz.cases import BACKENDS, Target, draw
from fuzz.totals import Totals, check_totals_file
from fuzz.workers import Ended, run_workers

from mtabench.commands import WRONG_RESULT
from mtabench.environment import describe, let_triton_interpret, resolve_device
from mtabench.errors import UsageError
from mtabench.prose import all_or_one, plural
from mtabench.results.outputs import check_folder, named

PASSES = {"bwd": False, "decode": True}
MAX_JOBS = 256


def main() -> int:
    """Run the cases that the options choose; 0, 4 if a case failed, or 2 for options that do not fit."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=600.0, help="the time that new cases begin in (600)")
    parser.add_argument("--cases", type=int, help="end after so many cases")
    parser.add_argument("--jobs", type=int, default=1, help="so many processes share the cases and all GPUs (1)")
    parser.add_argument("--op", nargs="+", choices=BACKENDS, default=[*BACKENDS], help="operations (all)")
    parser.add_argument(
        "--pass", nargs="+", choices=PASSES, default=[*PASSES], dest="passes",
        help="bwd: calls of all rows, most with their backward; decode: decode steps (both)",
    )  # fmt: skip
    parser.add_argument("--impl", nargs="+", help="backends (all fused ones that can run here)")
    parser.add_argument("--device", choices=("auto", "cuda", "cpu"), default="auto")
    parser.add_argument("--seed", type=int, help="of all cases; a new one if not given")
    parser.add_argument("--case", type=int, help="run the case of this number alone, and show what it is")
    parser.add_argument("--out", type=Path, help="the CSV file that gets the totals")
    options = parser.parse_args()
    try:
        return run(options)
    except UsageError as error:
        parser.exit(2, f"fuzz: {error}\n")


def run(options: argparse.Namespace) -> int:
    """Run random cases, or one by its number; WRONG_RESULT if any failed."""
    _check(options)
    device = resolve_device(options.device)
    let_triton_interpret(device)
    targets = _targets(options, device)
    if options.case is not None:
        return WRONG_RESULT * _one(options.seed, options.case, targets, device)
    seed = int(time.time()) if options.seed is None else options.seed
    names = ", ".join(_named(target) for target in targets)
    until = f"{options.seconds:g} s" + (f" or {options.cases} cases" if options.cases else "")
    print(f"fuzz: seed {seed}, {names} on {device}, {plural(options.jobs, 'job')}, {until}", flush=True)
    totals = Totals()
    for ended in run_workers(seed, targets, device, options.jobs, options.seconds, options.cases):
        totals.add(ended)
        if ended.wrong:
            print(_line(ended, seed, device), flush=True)
    if not totals.cases:
        raise UsageError(f"no case ran in {options.seconds:g} s; give --seconds more time")
    print("\n".join(totals.lines()))
    if options.out is not None:
        totals.append_to(
            options.out, {**describe(device), "date": f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ}", "seed": seed}
        )
        print(f"totals: {named(options.out)}")
    failures = totals.failures
    print(f"{failures} of {totals.cases} cases failed" if failures else f"{all_or_one(totals.cases, 'case')} passed")
    return WRONG_RESULT * (failures > 0)


def _named(target: Target) -> str:
    return f"{target.op} {target.backend} {'decode' if target.decode else 'bwd'}"


def _one(seed: int, number: int, targets: Sequence[Target], device: str) -> bool:
    """One case, with all that was drawn for it."""
    from fuzz.trial import prepare, try_case

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
    pass_ = "decode" if ended.pass_ == "decode" else "bwd"
    repro = f"scripts/fuzz_kernels.py --seed {seed} --case {ended.number} --op {ended.op} --pass {pass_}"
    repro += f" --impl {ended.backend} --device {device}"
    found = f"{ended.op} {ended.backend} {ended.pass_}: {' '.join(ended.wrong[0].split())}"
    return f"FAILED {found}{more} | {repro}"


def _check(options: argparse.Namespace) -> None:
    if not (options.seconds > 0 and math.isfinite(options.seconds)):
        raise UsageError(f"--seconds is {options.seconds:g}; expected seconds above 0, such as 600")
    if options.cases is not None and options.cases < 1:
        raise UsageError(f"--cases is {options.cases}; expected a number of cases from 1 on")
    if options.case is not None and (options.case < 0 or options.seed is None):
        raise UsageError(
            f"--case {options.case} is one of a seed's cases from 0 on; give --seed and --case of a failure's line"
        )
    if options.seed is not None and options.seed < 0:
        raise UsageError(f"--seed is {options.seed}; expected a whole number from 0 on")
    if not 1 <= options.jobs <= MAX_JOBS:
        raise UsageError(f"--jobs is {options.jobs}; expected 1 to {MAX_JOBS} processes")
    if options.out is not None:
        if options.case is not None:
            raise UsageError("--out takes the totals of a fuzz, and --case runs one case; leave out one of them")
        check_totals_file(options.out)
        check_folder(options.out)


def _targets(options: argparse.Namespace, device: str) -> list[Target]:
    """The chosen backends of operations, or all fused ones, that can run on this machine."""
    known = dict.fromkeys(backend for op in options.op for backend in BACKENDS[op]["known"])
    for backend in options.impl or ():
        if backend not in known:
            raise UsageError(f"--impl {backend} has no cases; expected one or more of {', '.join(known)}")
    found = [
        Target(op, backend, PASSES[pass_])
        for pass_ in options.passes
        for op in options.op
        for backend in (options.impl or BACKENDS[op]["cuda"] if options.impl or device == "cuda" else ("triton",))
        if backend in BACKENDS[op]["known"] and (backend, pass_) != ("hopper", "decode")
    ]
    reasons = {backend: _why_not(backend, device) for _, backend, _ in found}
    for backend, reason in reasons.items():
        if reason is not None:
            print(f"{backend} not checked: {reason}")
    found = [target for target in found if reasons[target.backend] is None]
    if not found:
        raise UsageError("nothing can be checked: no backend that was asked for can run here; give another --impl")
    return found


def _why_not(backend: str, device: str) -> str | None:
    """Why no case of a backend can run here, or None."""
    if backend == "auto":
        return None
    import torch
    from fuzz.calls import BACKENDS as NAMES

    from mta_kernels.conv_attention import unsupported

    dtype = torch.float32 if device == "cpu" else torch.float16
    typical: dict[str, Any] = {"device": device, "dtype": dtype, "head_dim": 64, "query_taps": 1, "key_taps": 1}
    return unsupported(NAMES.get(backend, backend), **typical)


if __name__ == "__main__":
    sys.exit(main())
