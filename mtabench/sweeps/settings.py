"""What the options of a sweep say of measuring, as settings and as the words of a command line."""

from mtabench.measuring import timing
from mtabench.problem.axes import parse_percent
from mtabench.sweeps.plan import Options, Plan


def make_settings(plan: Plan) -> timing.Settings:
    """How the plan's options want to measure; where they say nothing, as timing.Settings does."""
    options = plan.options
    usual = timing.Settings()
    rounds = options.rounds or usual.max_rounds
    return timing.Settings(
        timer=options.timer,
        cache=options.cache,
        min_rounds=min(usual.min_rounds, rounds),
        max_rounds=rounds,
        time_limit_s=options.time_limit or usual.time_limit_s,
        ci_target=None if options.target is None else parse_percent(options.target, "--target"),
    )


def measuring_words(options: Options) -> list[str]:
    """The options of a sweep that say how to measure, where they are not the defaults: words of a command line."""
    usual = timing.Settings()
    given = {
        "--timer": (options.timer, usual.timer),
        "--cache": (options.cache, usual.cache),
        "--rounds": (options.rounds, usual.max_rounds),
        "--time-limit": (options.time_limit, usual.time_limit_s),
        "--target": (options.target, None),
        "--cell-timeout": (options.cell_timeout, None),
        "--seed": (options.seed, None),
    }
    words = ["--isolate"] if options.isolate else []
    for name, (value, default) in given.items():
        if value is not None and value != default:
            words += [name, f"{value:g}" if isinstance(value, float) else str(value)]
    return words
