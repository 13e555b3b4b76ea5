"""What the options of a sweep say of measuring, as settings and as the words of a command line."""

from __future__ import annotations

from dataclasses import replace

from mtabench.measuring import timing
from mtabench.sweeps.plan import Options, Plan


def make_settings(plan: Plan) -> timing.Settings:
    """How the plan's options ask to measure; where they say nothing, as timing.Settings does."""
    options = plan.options
    settings = timing.Settings(timer=options.timer, cache=options.cache)
    if options.rounds is not None:
        fewest = min(settings.min_rounds, options.rounds)
        settings = replace(settings, min_rounds=fewest, max_rounds=options.rounds)
    if options.time_limit is not None:
        settings = replace(settings, time_limit_s=options.time_limit)
    return settings


def measuring_words(options: Options) -> list[str]:
    """The options of a sweep that say how to measure, where they are not the defaults: words of a command line."""
    usual = timing.Settings()
    given = {
        "--timer": (options.timer, usual.timer),
        "--cache": (options.cache, usual.cache),
        "--rounds": (options.rounds, usual.max_rounds),
        "--time-limit": (options.time_limit, usual.time_limit_s),
        "--cell-timeout": (options.cell_timeout, None),
        "--seed": (options.seed, None),
    }
    words = ["--isolate"] if options.isolate else []
    for name, (value, default) in given.items():
        if value is not None and value != default:
            words += [name, f"{value:g}" if isinstance(value, float) else str(value)]
    return words
