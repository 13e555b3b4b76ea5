"""The command `mtabench compare`: read two runs and say what changed."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from mtabench.comparing import across
from mtabench.comparing.across import ratios
from mtabench.comparing.compare import compare
from mtabench.comparing.comparison_data import ratios_data
from mtabench.comparing.reporting import ComparisonOptions, check_outputs, refusal_reported, report
from mtabench.errors import UsageError
from mtabench.json_output import print_json
from mtabench.results.outputs import write_text
from mtabench.results.runs import read_run


@contextmanager
def without_cycle_search() -> Iterator[None]:
    """Within it Python looks for no cycles of objects: among millions of samples that takes a quarter of the time."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@without_cycle_search()
def run_across(base: Path, head: Path, asked: ComparisonOptions, typed: Sequence[str]) -> int:
    """Print how many times as long cells take on the device of `head` as on that of `base`; 0.

    Raises UsageError for an option that is for verdicts, `typed` or an output of `asked`, and NotComparableError if no
    cell has a time in both.
    """
    others = [*typed, *(name for name in asked.outputs if name != "markdown")]
    if others:
        option = f"--{others[0].replace('_', '-')}"
        raise UsageError(f"{option} is for verdicts, and --across-devices gives none; leave one of them out")
    check_outputs(asked, (base, head))
    found = ratios(*(read_run(path, samples_needed=False) for path in (base, head)))
    if "markdown" in asked.outputs:
        write_text(asked.outputs["markdown"], across.markdown_text(found) + "\n")
    if asked.format == "json":
        print_json("compare", ratios_data(found))
    else:
        across.report(found, asked.format == "markdown")
    return 0


@without_cycle_search()
def run(base: Path, head: Path, asked: ComparisonOptions, rerun_unclear: bool) -> int:
    """Compare two results files and say what changed; the exit code.

    With `rerun_unclear` the cells that are unclear are measured again, in pairs of processes of both revisions, and
    judged by those. Raises NotComparableError, which the Markdown and the JUnit file asked for then say.
    """
    check_outputs(asked, (base, head))
    runs = read_run(base), read_run(head)
    with refusal_reported(asked):
        if rerun_unclear:
            from mtabench.comparing.rerun import compare_again  # which loads torch

            found = compare_again(*runs, asked)
        else:
            found = compare(*runs, asked.threshold, asked.fail_on)
    return report(found, asked)
