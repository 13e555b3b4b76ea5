"""The command `mtabench compare`: read two runs and say what changed."""

import gc
from pathlib import Path

from mtabench.comparing.compare import compare, compare_devices
from mtabench.comparing.reporting import ComparisonOptions, check_outputs, refusal_reported, report
from mtabench.results.runs import read_run


def run(base: Path, head: Path, options: ComparisonOptions, across_devices: bool) -> int:
    """Compare two results files and say what changed; the exit code.

    With `across_devices` there is no verdict, and samples are not needed. Raises NotComparableError, which the Markdown
    and the JUnit file, where wanted, then report.
    """
    check_outputs(options, (base, head))
    was_enabled = gc.isenabled()
    gc.disable()  # to look for cycles among millions of samples takes a quarter of the time
    try:
        runs = read_run(base, not across_devices), read_run(head, not across_devices)
        with refusal_reported(options):
            found = compare_devices(*runs) if across_devices else compare(*runs, options.threshold, options.fail_on)
        return report(found, options)
    finally:
        if was_enabled:
            gc.enable()
