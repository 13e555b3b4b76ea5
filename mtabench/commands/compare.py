"""The command `mtabench compare`: read two runs and say what changed."""

from __future__ import annotations

from pathlib import Path

from mtabench.comparing.compare import compare
from mtabench.comparing.reporting import ComparisonOptions, check_outputs, refusal_reported, report
from mtabench.results.runs import read_run


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
