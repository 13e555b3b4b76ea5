"""--ranks, checked before anything is started."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from mtabench import registry
from mtabench.cluster_options import ClusterOptions
from mtabench.errors import UsageError
from mtabench.problem.case import Case
from mtabench.sweeps.cells_plan import any_plan
from mtabench.sweeps.plan import Options, Plan


def plan_over_ranks(options: Options, ranks: int, asked: ClusterOptions) -> Plan:
    """The cells of a sweep over ranks; raises UsageError, in one sentence, for what it could not do."""
    plan = any_plan(_options_over_ranks(options, ranks, asked))
    _check_cases(plan.cases, ranks)
    return replace(plan, baseline=None, notes=())  # speedups are over one rank, not over another implementation


def _options_over_ranks(options: Options, ranks: int, asked: ClusterOptions) -> Options:
    if ranks < 2:
        raise UsageError(f"--ranks is {ranks}; it must be 2 or more, and one GPU is what a sweep without it measures")
    if asked.anything:
        raise UsageError(f"--ranks and {asked.source} exclude each other: ranks work on one cell together")
    if options.isolate or options.timer == "graph":
        what = "--isolate" if options.isolate else f"--timer {options.timer}"
        raise UsageError(f"{what} cannot be had with --ranks, whose processes take part in every call; leave it out")
    if options.baseline is not None:
        raise UsageError("--baseline cannot be had with --ranks, where speedups refer to the same kernels on one rank")
    if options.impl is None and options.cells is None:
        from mtabench.environment import resolve_device

        return replace(options, impl="triton" if resolve_device(options.device) == "cuda" else "eager")
    return options


def _check_cases(cases: Iterable[Case], ranks: int) -> None:
    for case in cases:
        if case.op == "mta":
            raise UsageError("--ranks shares sequences of conv attention alone; leave out --op mta and --layer")
        if not registry.implementation_of(case).ranks_backend:
            able = [entry.name for entry in registry.IMPLEMENTATIONS if entry.ranks_backend]
            raise UsageError(
                f"{case.impl} cannot share a sequence over ranks; with --ranks give --impl {' or '.join(able)}"
            )
        if case.seq % (2 * ranks):
            raise UsageError(
                f"--seq {case.seq} cannot be shared by {ranks} ranks, two equal chunks each; "
                f"give a multiple of {2 * ranks}, such as {-(-case.seq // (2 * ranks)) * 2 * ranks}"
            )
        least = 2 * ranks * (case.conv.query_taps + case.conv.key_taps - 1)
        if case.seq < least:
            raise UsageError(
                f"--seq {case.seq} is too short for {ranks} ranks and --conv {case.taps}, whose taps reach into "
                f"neighbouring chunks; give {least} or more"
            )
