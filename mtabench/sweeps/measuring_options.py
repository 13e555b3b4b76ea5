"""The options of a sweep that say how to measure, of kernels and of models alike: what they may be."""

from secrets import randbelow

from mtabench.errors import UsageError
from mtabench.options import CACHES, TIMERS, Options
from mtabench.problem.axes import parse_percent

SEEDS = 2**31


def check_measuring(options: Options) -> None:
    """Raise UsageError for options on how to measure that cannot be, whatever is measured."""
    if options.batch is not None and options.tokens is not None:
        raise UsageError("--batch and --tokens exclude each other: --tokens 16k sets batch = 16k / seq")
    for value, known, what in ((options.timer, TIMERS, "--timer"), (options.cache, CACHES, "--cache")):
        if value not in known:
            raise UsageError(f"{what} {value!r} is not known; expected one of {', '.join(known)}")
    limits = {
        "--rounds": options.rounds, "--time-limit": options.time_limit, "--cell-timeout": options.cell_timeout
    }  # fmt: skip
    for what, number in limits.items():
        if number is not None and not 0 < number < 1e6:
            raise UsageError(f"{what} is {number}; it must be more than 0 and less than a million")
    if options.target is not None:
        parse_percent(options.target, "--target")
    if options.seed is not None:
        check_seed(options.seed)
    if options.cell_timeout is not None and not options.isolate:
        raise UsageError("--cell-timeout needs --isolate: only a cell in a process of its own can be stopped")


def check_seed(seed: int | None) -> int:
    """A seed as typed, or a new one if none was; raises UsageError for one out of range."""
    if seed is None:
        return randbelow(SEEDS)
    if not 0 <= seed < SEEDS:
        raise UsageError(f"--seed {seed} is out of range; expected 0 to {SEEDS - 1}")
    return seed
